"""GRPO: a rollout is as good as it did better than the other rollouts of its task (arXiv:2402.03300)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from agentlightning.algorithm.rl import Reinforcement
from agentlightning.data import credit
from agentlightning.data.sequences import CreditedTransition
from agentlightning.data.transitions import TracedRollout
from agentlightning.errors import ConfigError


@dataclass(kw_only=True)
class GRPO(Reinforcement):
    """Group-relative policy optimisation with the clipped surrogate.

    Every sampled token of rollout i gets A_i = (R_i − mean) / (std + ε) over its group; `normalize_by_std=False` leaves
    the division out (the advantage of Dr. GRPO, arXiv:2503.20783). Credit is `identical`: each transition returns R."""

    normalize_by_std: bool = True
    name: str = "grpo"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_size < 2:
            raise ConfigError(
                f"group_size is {self.group_size}; GRPO compares rollouts of one task and needs at least 2"
            )

    def advantages(self, group: list[TracedRollout], rewards: list[float]) -> list[list[CreditedTransition]]:
        baseline = credit.grpo if self.normalize_by_std else credit.dr_grpo
        return [
            [
                CreditedTransition(transition, np.full(len(transition.response_ids), advantage, np.float32))
                for transition in traced.transitions
            ]
            for traced, advantage in zip(group, baseline(rewards), strict=True)
        ]
