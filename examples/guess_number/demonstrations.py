"""A tiny model for this example, so that nothing is downloaded. It has seen games whose guesses are
any of the numbers that are left: it knows the rules, and no way to play well."""

from __future__ import annotations

import random

from agent import HIGHEST, TRIES, Game

from agentlightning.learner.tiny import Policy, make_policy

GAMES = 12_000


def make(seed: int) -> Policy:
    """The model that training starts from; the same for the same seed."""
    generator = random.Random(seed)
    return make_policy([play(generator) for _ in range(GAMES)], seed=seed)


def play(generator: random.Random) -> dict:
    """One game, as a conversation."""
    game = Game(generator.randint(1, HIGHEST))
    said = 0
    while said != game.secret and game.tried < TRIES:
        said = generator.randint(game.low, game.high)
        game.hear(said)
    return {"messages": game.messages[:-1]}  # nothing is heard after the last guess
