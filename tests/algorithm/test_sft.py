"""Imitating the best of the policy's own rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agentlightning as agl
from agentlightning.data.credit.table import RewardedGroup
from agentlightning.data.transitions import Transition
from agentlightning.errors import ConfigError
from tests import agents
from tests.test_trainer import TASKS, trainer

ONE = np.ones(2, np.int32)


def group(*rewards: float) -> RewardedGroup:
    call = Transition("r", "a", "s", 0, 0, "policy", ONE, ONE, np.zeros(2, np.float32), ONE, "stop")
    return RewardedGroup([[call, call] for _ in rewards], list(rewards))


def kept(algorithm: agl.SFT, *groups: RewardedGroup) -> list[list[bool]]:
    """Of each group, which rollouts are trained; all tokens of all calls of those, with weight 1."""
    credited = algorithm.advantages(groups)
    assert all((one.advantages == 1).all() for members in credited for rollout in members for one in rollout)
    assert all(len(rollout) in (0, 2) for members in credited for rollout in members)
    return [[bool(rollout) for rollout in members] for members in credited]


def test_the_best_of_each_group_is_kept() -> None:
    assert kept(agl.SFT(), group(0, 1, 0.5), group(3, 2, 3)) == [[False, True, False], [True, False, False]]
    assert kept(agl.SFT(best=2), group(0, 1, 0.5)) == [[False, True, True]]


def test_a_group_of_equals_has_no_best() -> None:
    assert kept(agl.SFT(), group(1, 1, 1)) == [[False, False, False]]
    assert kept(agl.SFT(best=None, threshold=1.0), group(1, 1, 0)) == [[True, True, False]]


def test_the_highest_fraction_of_a_step_is_kept() -> None:
    assert kept(agl.SFT(best=None, fraction=0.5), group(1, 2), group(3, 4)) == [[False, False], [True, True]]


def test_every_condition_must_hold() -> None:
    assert kept(agl.SFT(threshold=0.6), group(0, 0.5), group(0, 0.7)) == [[False, False], [False, True]]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"best": 8}, "of groups of 8"),
        ({"best": None}, "nothing says which rollouts are kept"),
        ({"fraction": 0.0}, "above 0"),
        ({"loss": "gspo"}, "one loss"),
    ],
)
def test_what_keeps_nothing_or_everything_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        agl.SFT(**wrong)


def test_imitated_rollouts_become_likelier(tmp_path: Path) -> None:
    small: dict[str, Any] = {"tasks_per_step": 3, "group_size": 4, "max_tokens": 6, "temperature": 2.0}
    result = trainer(tmp_path, algorithm=agl.SFT(steps=1, epochs=3, minibatches=2, **small)).fit(agents.vowels, TASKS)
    values = result.metrics[-1].values
    assert 3 <= values["sequences"] <= 6  # one rollout of each task, of two calls that may be one sequence
    assert values["policy_version"] == 1
    assert values["max_ratio_error"] > 0
