"""Each algorithm by name: what it adds to GRPO, and that it trains."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.cli.fit import make_algorithm
from agentlightning.config import ALGORITHMS
from agentlightning.errors import ConfigError
from agentlightning.learner.losses import Loss
from tests import agents
from tests.test_trainer import TASKS, trainer

# those that train by rewards
NAMES = [name for name in ALGORITHMS if name not in ("apo", "gepa", "baseline", "opd")]


@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_of_a_run_file_trains(tmp_path: Path, name: str) -> None:
    grouped = (
        {"tasks_per_step": 3, "group_size": 4}
        if name not in ("reinforce++", "ppo")
        else {"tasks_per_step": 12}
    )
    chosen = make_algorithm(
        {"name": name, "steps": 1, "max_tokens": 6, "temperature": 2.0, **grouped}
    )
    result = trainer(tmp_path, algorithm=chosen).fit(agents.vowels, TASKS)
    assert result.metrics[-1].values["rollouts"] == 12
    assert result.metrics[-1].values["policy_version"] == 1
    assert math.isfinite(result.metrics[-1].values["loss"])
    assert result.directory.exists()


def test_dapo_clips_higher_refills_and_punishes_the_overlong() -> None:
    dapo = agl.DAPO(max_tokens=100)
    assert dapo.make_loss() == Loss(clip_low=0.2, clip_high=0.28, aggregation="token-mean")
    assert dapo.refills
    assert dapo.reward.terms([], [90], "") == {"overlong_penalty": -0.5}
    assert agl.DAPO(overlong=False).reward == agl.RewardSpec()
    own = agl.RewardSpec(overlong_penalty=0.3, overlong_length=50, overlong_buffer=10)
    assert agl.DAPO(reward=own).reward == own


def test_dr_grpo_divides_by_the_longest_answer_allowed() -> None:
    assert agl.DrGRPO(max_tokens=64).make_loss().constant_length == 64
    assert agl.DrGRPO(max_tokens=64, constant_length=32).make_loss().constant_length == 32
    assert agl.DrGRPO(aggregation="token-mean").make_loss().constant_length is None


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: agl.DAPO(), "give max_tokens, or overlong=False"),
        (lambda: agl.DrGRPO(), "give max_tokens, or constant_length"),
        (lambda: agl.RLOO(group_size=1), "needs at least 2"),
    ],
    ids=["dapo", "dr_grpo", "rloo"],
)
def test_what_an_algorithm_lacks_is_reported(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()
