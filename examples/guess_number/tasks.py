"""The games: in training the 64 secrets; held out, games that begin after two guesses of somebody
else."""

from __future__ import annotations

import random
from functools import cache

from agent import HIGHEST, TRIES, Game

HELD_OUT = 256


def train() -> list[dict]:
    """Every secret once."""
    return [{"secret": secret} for secret in range(1, HIGHEST + 1)]


def held_out() -> list[dict]:
    """Games that begin after two random guesses among the numbers left, none of them right."""
    generator = random.Random("held out")
    games = []
    for number in range(HELD_OUT):
        secret = 1 + number % HIGHEST
        opening: list[int] = []
        while len(opening) < 2:
            game = Game(secret, opening)
            said = generator.randint(game.low, game.high)
            opening += [said] * (said != secret)
        games.append({"secret": secret, "opening": opening})
    return games


def halving(game: Game) -> float:
    """The reward of always guessing the middle of the numbers left, on average over them as
    secrets."""
    left = game.high - game.low + 1
    return 1 - (game.tried + guesses(left) / left - 1) / TRIES


@cache
def guesses(left: int) -> int:
    """How many guesses finding each of so many numbers takes, added up, if each guess is the
    middle."""
    return left + guesses((left - 1) // 2) + guesses(left // 2) if left else 0
