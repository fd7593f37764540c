"""The guessing game, trained for a step as its README says."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from agentlightning.algorithm.grpo import GRPO
from agentlightning.data.credit import RewardedGroup
from tests.examples.loading import load_example
from tests.transitions import transition

game = load_example("guess_number", "agent", "credit", "demonstrations", "tasks")


def test_a_wrong_guess_narrows_what_is_left_and_tells_one_word() -> None:
    played = game.agent.Game(40, opening=[32, 48, 12])
    assert (played.low, played.high, played.tried) == (33, 47, 3)
    assert [one["content"] for one in played.messages[2::2]] == ["higher", "lower", "higher"]


def test_halving_is_worth_what_playing_so_earns() -> None:
    earned = []
    for secret in range(1, 65):
        played = game.agent.Game(secret)
        while (said := (played.low + played.high) // 2) != secret:
            played.hear(said)
        earned.append(1 - played.tried / 10)
    assert (
        game.tasks.halving(game.agent.Game(1))
        == pytest.approx(np.mean(earned))
        == pytest.approx(0.5875)
    )


def test_held_out_games_begin_with_two_wrong_guesses_and_have_the_secret_left() -> None:
    for task in game.tasks.held_out():
        played = game.agent.Game(task["secret"], task["opening"])
        assert played.tried == 2
        assert played.low <= task["secret"] <= played.high
    assert "opening" not in game.tasks.train()[0]


def test_demonstrations_guess_numbers_that_are_left() -> None:
    generator = random.Random(3)
    for _ in range(200):
        said = [one["content"] for one in game.demonstrations.play(generator)["messages"]]
        guesses, hints = [int(one) for one in said[1::2]], said[2::2]
        assert len(guesses) == len(hints) + 1 <= game.agent.TRIES
        for number, (guess, hint) in enumerate(zip(guesses[:-1], hints, strict=True)):
            assert all((later > guess) == (hint == "higher") for later in guesses[number + 1 :])


def test_a_guess_is_credited_with_what_it_changed() -> None:
    """Two games: 64 numbers left, then 8, found by the third and by the second guess."""
    calls = [
        [
            transition([1], [2], rollout_id=name, call_index=index, state=state)
            for index, state in enumerate(states)
        ]
        for name, states in (("a", ("64", "8", "1")), ("b", ("64", "8")))
    ]
    algorithm = GRPO(
        returns=game.credit.further_guesses, baseline=game.credit.numbers_left, group_size=2
    )
    found = algorithm.advantages([RewardedGroup(calls, [0.8, 0.9])])[0]
    values = {"64": -0.15, "8": -0.05, "1": 0.0}
    changed = [
        -0.1 + values[after] - values[before] for before, after in pairwise(("64", "8", "1"))
    ]
    expected = np.array([*changed, 0.0, changed[0], 0.0 - values["8"]])
    own = np.array([one.advantages[0] for rollout in found for one in rollout])
    assert own == pytest.approx(expected / expected.std(), abs=1e-4)
