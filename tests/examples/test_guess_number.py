"""The guessing game, trained for a step as its README says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from agentlightning.data.credit import Returns
from tests.examples.loading import EXAMPLES, load_example
from tests.examples.training import steps_of
from tests.transitions import transition

GUESS = EXAMPLES / "guess_number"
game = load_example("guess_number", "agent", "credit")


def test_a_wrong_guess_narrows_what_is_left() -> None:
    assert game.agent.narrowed(1, 64, 32, 40) == (33, 64)
    assert game.agent.narrowed(33, 64, 48, 40) == (33, 47)
    assert game.agent.narrowed(33, 47, 12, 40) == (33, 47)


def test_guesses_are_compared_with_those_that_had_as_many_numbers_left() -> None:
    calls = [transition([1], [2], state=state) for state in ("[1, 64]", "[1, 8]", "[9, 16]", "[3, 3]")]
    values = np.array([0.5, 0.2, 0.6, 0.9])
    found = game.credit.numbers_left(
        Returns(values, np.arange(4), np.ones(4, int), np.zeros(4, int), values, calls=calls)
    )
    assert found == pytest.approx([0, -0.2 / 0.3, 0.2 / 0.3, 0])


@pytest.mark.slow
def test_it_trains(tmp_path: Path) -> None:
    small = ("steps=1", "tasks_per_step=2", "group_size=4")
    settings = [word for one in small for word in ("--set", f"algorithm.{one}")]
    command = [sys.executable, "-m", "agentlightning.cli.main", "train", "run.yaml", *settings]
    command += ["--run-dir", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=GUESS, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert steps_of(tmp_path / "run")[-1]["calls"] >= 8
