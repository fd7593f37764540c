"""Self-play of two players, with rewards that add up to 0: R is the first player's reward, −R the
other's.

Players are told apart by the name of their agent (`agl.agent`, or the first line of the system
prompt). One policy may play both, which `RAE` is for. If each player has a policy of its own
(`model: {first: …, second: …}`), give `returns: selfplay.py:zero_sum` to any algorithm: each policy
is compared with itself alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from agentlightning.algorithm import Reinforcement
from agentlightning.data.credit import RewardedGroup
from agentlightning.data.sequences import CreditedTransition
from agentlightning.data.transitions import Transition
from agentlightning.errors import ConfigError


def zero_sum(
    reward: float, transitions: Sequence[Transition], *, first: str = "first"
) -> np.ndarray:
    """x = R for the calls of `first`, −R for those of the other."""
    return np.array([reward if call.agent == first else -reward for call in transitions])


@dataclass(kw_only=True)
class RAE(Reinforcement):
    """Role-conditioned advantage estimation (SPIRAL, arXiv:2506.24119): A = ±R − b of the player in
    this game, where b is a running mean, b ← `decay`·b + (1 − `decay`)·(±R), over all rollouts. The
    game is `task["game"]`, if there is one.

    Without it, what one side of the table earns by its position alone counts as skill. Here b
    changes after a step, so that all rollouts of a step are compared with the same b."""

    first: str = "first"
    decay: float = 0.95
    group_size: int = 1
    name: str = "rae"
    means: dict[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.decay < 1:
            raise ConfigError(f"decay is {self.decay}; it must lie in [0, 1)")

    def advantages(self, groups: Sequence[RewardedGroup]) -> list[list[list[CreditedTransition]]]:
        return [
            [
                [self._credit(call, self._role(group, call), reward) for call in calls]
                for calls, reward in zip(group.transitions, group.rewards, strict=True)
            ]
            for group in groups
        ]

    def step_done(self, groups: Sequence[RewardedGroup]) -> dict[str, float]:
        for group in groups:
            for calls, reward in zip(group.transitions, group.rewards, strict=True):
                for role, call in {self._role(group, call): call for call in calls}.items():
                    earned = self._earned(call, reward)
                    self.means[role] = (
                        self.decay * self.means.get(role, 0.0) + (1 - self.decay) * earned
                    )
        return {f"role_mean/{role}": mean for role, mean in self.means.items()}

    def state(self) -> dict[str, float]:
        return self.means

    def restore(self, state: dict[str, float]) -> None:
        self.means = state

    def _role(self, group: RewardedGroup, call: Transition) -> str:
        game = group.task.get("game") if isinstance(group.task, dict) else None
        return f"{game}/{call.agent}" if game else str(call.agent)

    def _earned(self, call: Transition, reward: float) -> float:
        return float(zero_sum(reward, [call], first=self.first)[0])

    def _credit(self, call: Transition, role: str, reward: float) -> CreditedTransition:
        advantage = self._earned(call, reward) - self.means.get(role, 0.0)
        return CreditedTransition(call, np.full(len(call.response_ids), advantage, np.float32))
