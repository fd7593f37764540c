"""GRPO and its relatives: what a rollout's calls are worth, compared with other rollouts (arXiv:2402.03300)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentlightning.algorithm.rl.reinforcement import WITHOUT_VARIANCE, Reinforcement
from agentlightning.data.credit.table import RewardedGroup, make_credit
from agentlightning.data.sequences import CreditedTransition
from agentlightning.errors import ConfigError


@dataclass(kw_only=True)
class GRPO(Reinforcement):
    """Policy optimisation without a critic, by default GRPO: each sampled token of rollout i gets
    A_i = (R_i − mean) / (std + ε) over its group, in PPO's clipped loss.

    `returns` says how a rollout's reward is divided over its calls, `baseline` what that is compared with. Both are a
    name of `data/credit/table.py`, a reference (`file.py:function`) or a function, and are called with their options.
    What does not go together is refused."""

    returns: Any = "identical"  # str or function: what reads run files knows no such union
    returns_options: dict[str, Any] = field(default_factory=dict[str, Any])
    baseline: Any = "grpo"
    baseline_options: dict[str, Any] = field(default_factory=dict[str, Any])
    name: str = "grpo"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.credit = make_credit(
            self.returns, self.returns_options, self.baseline, self.baseline_options, reward=self.reward
        )
        if self.group_size < 2 and self.credit.compares_group:
            raise ConfigError(
                f"group_size is {self.group_size}; baseline {self.baseline!r} with returns {self.returns!r} compares "
                "rollouts of one task and needs at least 2"
            )

    def why_useless(self, group: RewardedGroup) -> str | None:
        reason = super().why_useless(group)
        if reason is None and self.credit.compares_group:
            credited = [item for rollout in self.advantages([group])[0] for item in rollout]
            return None if any(item.advantages.any() for item in credited) else WITHOUT_VARIANCE
        return reason

    def advantages(self, groups: Sequence[RewardedGroup]) -> list[list[list[CreditedTransition]]]:
        return self.credit.advantages(groups)
