"""Rejection-sampling fine-tuning: the policy imitates the best of its own rollouts (RAFT,
arXiv:2304.06767; STaR, arXiv:2203.14465), or of recorded ones."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np

from agentlightning.algorithm.base import RunContext
from agentlightning.algorithm.budget import UNLIMITED
from agentlightning.algorithm.rl.groups import Groups
from agentlightning.algorithm.rl.reinforcement import Reinforcement
from agentlightning.data.credit import RewardedGroup
from agentlightning.data.sequences import CreditedTransition
from agentlightning.data.transitions import Transition
from agentlightning.errors import ConfigError
from agentlightning.learner.losses import LossKind
from agentlightning.store.base import LightningStore

# Settings for new rollouts.
_OF_FRESH: Final = (
    "max_staleness",
    "dynamic_sampling",
    "difficulty",
    "curriculum",
    "rise_at",
    "target_reward",
    "judge",
)


@dataclass(kw_only=True)
class SFT(Reinforcement):
    """Fine-tuning on rollouts that are kept: their sampled tokens have the loss −log p. The
    recorded tokens are trained, not their text tokenised again. Each step samples anew with the
    current weights.

    A rollout must meet all conditions that are given; among equals, the first count.

    Settings: best: it is among so many best of its group, and the group is not all alike. fraction:
        it is among this share of the best of the step. threshold: its reward is at least this.
        traces: train on recorded groups instead of new rollouts, again and again: a run's
        directory, a SQLite file, a
            `postgresql://` URL or a server's URL. Held-out rollouts are left out. A rollout without
            a group counts as a group, which has no best. `group_size` has no effect.
        traces_run: only this run of `traces`; default: all."""

    best: int | None = 1
    fraction: float | None = None
    threshold: float | None = None
    traces: str | None = None
    traces_run: str | None = None
    loss: LossKind = "policy_gradient"
    aggregation: Any = "token-mean"
    name: str = "sft"

    imitates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss != "policy_gradient":
            raise ConfigError(
                f"loss is {self.loss!r}; fine-tuning has one loss, −log p: leave it out"
            )
        if self.old != "behaviour":
            raise ConfigError(
                f"old is {self.old!r}; fine-tuning has no importance ratio: leave it out"
            )
        self._check_traces()
        if self.best is not None and not 1 <= self.best < (
            math.inf if self.traces else self.group_size
        ):
            raise ConfigError(
                f"best is {self.best}, of groups of {self.group_size}; it must be at least 1 and "
                "leave some out, or give best=None with a threshold or a fraction"
            )
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise ConfigError(f"fraction is {self.fraction}; it must be above 0 and at most 1")
        if self.best is None and self.fraction is None and self.threshold is None:
            raise ConfigError("no rule selects rollouts; give best, fraction or threshold")

    def _check_traces(self) -> None:
        if self.traces is None and self.traces_run is not None:
            raise ConfigError("traces_run names a run in a store; also give traces, the store")
        if self.traces is not None and "://" not in str(self.traces):
            self.traces = str(Path(self.traces).expanduser().absolute())
        given = [
            *(name for name in _OF_FRESH if getattr(self, name)),
            *["next_task"] * self.picks_tasks,
            *["budget"] * (self.budget != UNLIMITED),
        ]
        if self.traces is not None and given:
            raise ConfigError(
                f"{given[0]} is for new rollouts, and with traces there are none: leave one of "
                "them out"
            )

    @property
    def fewest_rewarded(self) -> int:
        return 1 if self.best is None else 2

    def traces_beside(self, store: LightningStore) -> AbstractAsyncContextManager[LightningStore]:
        from agentlightning.algorithm.rl.traces import open_traces

        return super().traces_beside(store) if self.traces is None else open_traces(self.traces)

    @asynccontextmanager
    async def groups(self, context: RunContext) -> AsyncGenerator[Groups]:
        from agentlightning.algorithm.rl.traces import RecordedGroups, read_groups

        if self.traces is None:
            async with super().groups(context) as groups:
                yield groups
            return
        if context.train_tasks:
            raise ConfigError("traces replace the training dataset: give one of the two")
        async with self.traces_beside(context.store) as traces:
            found = await read_groups(self, context, traces, self.traces_run, self.traces)
            yield RecordedGroups(self, context, traces, found)

    def advantages(self, groups: Sequence[RewardedGroup]) -> list[list[list[CreditedTransition]]]:
        """1 for every token of the kept rollouts; no transitions for the others."""
        rewards = [reward for group in groups for reward in group.rewards]
        kept = iter(
            self._kept(rewards, [best for group in groups for best in self._best(group.rewards)])
        )
        return [
            [
                [_imitated(transition) for transition in transitions] if keep else []
                for transitions, keep in zip(group.transitions, kept, strict=False)
            ]
            for group in groups
        ]

    def _kept(self, rewards: Sequence[float], best: Sequence[bool]) -> list[bool]:
        """Whether each rollout of a step is kept; `best` are the best of their groups."""
        count = len(rewards) if self.fraction is None else math.ceil(self.fraction * len(rewards))
        least = -math.inf if self.threshold is None else self.threshold
        ranks = list(zip(rewards, best, strict=True))  # among equals, the best of groups come first
        highest = _highest(ranks, count)
        return [
            high and among and reward >= least
            for high, (reward, among) in zip(highest, ranks, strict=True)
        ]

    def _best(self, rewards: Sequence[float]) -> list[bool]:
        """Whether each rollout of a group is among its best."""
        if self.best is None:
            return [True] * len(rewards)
        if len(set(rewards)) < 2:
            return [False] * len(rewards)
        return _highest(rewards, self.best)


def _highest(ranks: Sequence[Any], count: int) -> list[bool]:
    """Whether each is among the `count` highest; among equals, the first."""
    chosen = set(sorted(range(len(ranks)), key=ranks.__getitem__, reverse=True)[:count])
    return [index in chosen for index in range(len(ranks))]


def _imitated(transition: Transition) -> CreditedTransition:
    return CreditedTransition(transition, np.ones(len(transition.response_ids), np.float32))
