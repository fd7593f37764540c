"""Checks before training: the data fit the agent, and the reward says what is meant. Run with
`pytest`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1]
sys.path.insert(0, str(FOLDER))
from agent import TEAMS, reward  # noqa: E402 - found by the line above


@pytest.mark.parametrize("name", ["tasks.jsonl", "heldout.jsonl"])
def test_every_task_has_a_message_and_a_team_that_exists(name: str) -> None:
    tasks = [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]
    assert tasks
    assert all(task["message"] and task["team"] in TEAMS for task in tasks)


def test_only_the_right_team_is_rewarded() -> None:
    task = {"message": "Parcel gone.", "team": "shipping"}
    assert [reward(task, answer) for answer in ("shipping", " Shipping.", "billing", "")] == [
        1.0,
        1.0,
        0.0,
        0.0,
    ]
