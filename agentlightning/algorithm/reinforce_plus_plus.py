"""REINFORCE++: no critic and no groups; advantages are whitened over the batch (arXiv:2501.03262)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agentlightning.algorithm.grpo import GRPO
from agentlightning.learner.base import KLEstimator


@dataclass(kw_only=True)
class REINFORCEPlusPlus(GRPO):
    """A of a token is γ^(tokens that follow in its call)·R, whitened over the rollouts of the batch. One rollout per
    task is enough: more tasks take the place of a group."""

    baseline: Any = "reinforce++"
    tasks_per_step: int = 128
    group_size: int = 1
    kl_estimator: KLEstimator = "k2"
    name: str = "reinforce++"


@dataclass(kw_only=True)
class REINFORCEPlusPlusBaseline(GRPO):
    """A_i = R_i − mean over its group, then whitened over the rollouts of the batch."""

    baseline: Any = "reinforce++_baseline"
    kl_estimator: KLEstimator = "k2"
    name: str = "reinforce++_baseline"
