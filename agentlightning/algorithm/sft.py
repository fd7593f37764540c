"""Rejection-sampling fine-tuning: the policy imitates the best of its own rollouts (RAFT, arXiv:2304.06767; STaR,
arXiv:2203.14465)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentlightning.algorithm.rl.reinforcement import Reinforcement
from agentlightning.data.credit.table import RewardedGroup
from agentlightning.data.sequences import CreditedTransition
from agentlightning.data.transitions import Transition
from agentlightning.errors import ConfigError
from agentlightning.learner.base import LossKind


@dataclass(kw_only=True)
class SFT(Reinforcement):
    """The loss of a sampled token of a rollout that is kept is −log p; the others are not trained. What is trained are
    the recorded tokens themselves, not their text tokenised again; each step samples anew from the weights it has.

    A rollout is kept if it is among the `best` of its group, unless all of the group are alike; among the highest
    `fraction` of the step; and of reward `threshold` or more. What is None is not asked of it."""

    best: int | None = 1
    fraction: float | None = None
    threshold: float | None = None
    loss: LossKind = "policy_gradient"
    name: str = "sft"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss != "policy_gradient":
            raise ConfigError(f"loss is {self.loss!r}; fine-tuning has one loss, −log p: leave it out")
        if self.best is not None and not 1 <= self.best < self.group_size:
            raise ConfigError(
                f"best is {self.best}, of groups of {self.group_size}; it must be at least 1 and leave some out, or "
                "give best=None with a threshold or a fraction"
            )
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise ConfigError(f"fraction is {self.fraction}; it must be above 0 and at most 1")
        if self.best is None and self.fraction is None and self.threshold is None:
            raise ConfigError("nothing says which rollouts are kept; give best, fraction or threshold")

    @property
    def imitates(self) -> bool:
        return True

    def advantages(self, groups: Sequence[RewardedGroup]) -> list[list[list[CreditedTransition]]]:
        """1 for every token of the rollouts that are kept; no transitions for the others."""
        least = self._least([reward for group in groups for reward in group.rewards])
        return [
            [
                [_imitated(transition) for transition in transitions] if kept and reward >= least else []
                for transitions, reward, kept in zip(
                    group.transitions, group.rewards, self._best(group.rewards), strict=True
                )
            ]
            for group in groups
        ]

    def _least(self, rewards: Sequence[float]) -> float:
        """The reward that is asked of a rollout, whatever its group."""
        least = -math.inf if self.threshold is None else self.threshold
        if self.fraction is not None and rewards:
            count = math.ceil(self.fraction * len(rewards))
            least = max(least, sorted(rewards, reverse=True)[count - 1])
        return least

    def _best(self, rewards: Sequence[float]) -> list[bool]:
        """Which rollouts of a group are among its best; of equals the first."""
        if self.best is None:
            return [True] * len(rewards)
        if len(set(rewards)) < 2:
            return [False] * len(rewards)
        order = sorted(range(len(rewards)), key=lambda index: -rewards[index])
        return [index in order[: self.best] for index in range(len(rewards))]


def _imitated(transition: Transition) -> CreditedTransition:
    return CreditedTransition(transition, np.ones(len(transition.response_ids), np.float32))
