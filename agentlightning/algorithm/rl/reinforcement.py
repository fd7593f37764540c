"""What every reinforcement-learning algorithm is: settings, advantages and a loss.

It knows groups of credited rollouts. It does not know how they are run (the loop) or how a gradient is taken (the
learner).
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

from agentlightning.algorithm.base import RunContext
from agentlightning.algorithm.evaluation import Evaluation
from agentlightning.data.agents import agent_pattern
from agentlightning.data.credit.table import RewardedGroup
from agentlightning.data.rewards import PLAIN, RewardSpec
from agentlightning.data.sequences import Aggregation, CreditedTransition, Level, build_sequences
from agentlightning.errors import ConfigError
from agentlightning.learner.base import KLEstimator, Loss, LossKind
from agentlightning.types import RolloutConfig


@dataclass(kw_only=True)
class Reinforcement(abc.ABC):
    """Settings every reinforcement-learning algorithm shares, and its two answers: advantages and a loss.

    A step samples `tasks_per_step` tasks, runs each `group_size` times, and makes `minibatches` optimiser steps.
    `reference` keeps a copy of the starting weights; straying from it costs `kl_coefficient` (0.04 by default).
    `reward` says what R is made of, `loss` how an advantage becomes a loss (`learner/losses.py`).
    `unrewarded` says what a rollout without a reward counts for: left out of its group, or a stated reward.
    `agents` are the names of the agents to train, as in `"writer|rewriter"`; without it all are.
    Training stops after `steps`, or once the mean training reward of three steps reaches `target_reward`."""

    steps: int = 100
    tasks_per_step: int = 16
    group_size: int = 8
    minibatches: int = 1
    level: Level = "trajectory"
    reward: RewardSpec = PLAIN
    loss: LossKind = "ppo_clip"
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    aggregation: Aggregation = "token-mean"
    constant_length: int | None = None
    reference: bool = False
    kl_coefficient: float | None = None
    kl_estimator: KLEstimator = "k3"
    entropy_coefficient: float = 0.0
    temperature: float = 1.0
    val_temperature: float = 1.0
    max_tokens: int | None = None
    unrewarded: Literal["exclude"] | float = "exclude"
    agents: str | None = None
    target_reward: float | None = None
    evaluate_every: int = 0
    checkpoint_every: int = 10
    rollout: RolloutConfig = field(
        default_factory=lambda: RolloutConfig(timeout_seconds=300.0, max_attempts=3, retry_condition=("unresponsive",))
    )
    name: str = "rl"

    def __post_init__(self) -> None:
        for name in ("steps", "tasks_per_step", "group_size", "minibatches", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.evaluate_every < 0:
            raise ConfigError(
                f"evaluate_every is {self.evaluate_every}; give a number of steps, or 0 for only at the ends"
            )
        for name, lowest in (("temperature", 1e-3), ("val_temperature", 0.0)):
            if not lowest <= getattr(self, name) <= 2:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must lie between {lowest} and 2")
        if self.unrewarded != "exclude" and not math.isfinite(self.unrewarded):
            raise ConfigError(f"unrewarded is {self.unrewarded}; give 'exclude', or a finite reward")
        if self.kl_coefficient and not self.reference:
            raise ConfigError("kl_coefficient pulls towards a reference policy; set reference=True to keep one")
        self.agent_pattern = None if self.agents is None else agent_pattern(self.agents)
        if self.loss == "policy_gradient" and self.minibatches > 1:
            raise ConfigError(
                f"loss 'policy_gradient' is right for the weights that sampled, and {self.minibatches} minibatches "
                "move them in between; give minibatches=1 or loss='importance_sampling'"
            )
        self.make_loss()  # refuses settings out of range now, rather than after the first rollouts
        build_sequences((), self.level)  # and a level that there is not

    @abc.abstractmethod
    def advantages(self, groups: Sequence[RewardedGroup]) -> list[list[list[CreditedTransition]]]:
        """Credit the groups of one step. The answer has, for each rollout of each group, its transitions with an
        advantage per sampled token."""

    def make_loss(self) -> Loss:
        """The loss of every batch."""
        return Loss(
            kind=self.loss,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
            aggregation=self.aggregation,
            constant_length=self.constant_length,
            kl_coefficient=self.kl_coefficient if self.kl_coefficient is not None else 0.04 * self.reference,
            kl_estimator=self.kl_estimator,
            entropy_coefficient=self.entropy_coefficient,
            temperature=self.temperature,
        )

    async def run(self, context: RunContext) -> None:
        """Train until done or stopped; afterwards `evaluations` holds the first and the last, and what lay between."""
        from agentlightning.algorithm.rl.loop import Loop

        self.evaluations: list[Evaluation] = []
        with ThreadPoolExecutor(1, "learner") as thread:
            self.stopped_because = await Loop(self, context, thread).run()
