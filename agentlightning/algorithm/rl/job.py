"""What steps, evaluations and resumption of a training run share: its parts, its state, and how it is saved."""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from agentlightning.algorithm.base import RunContext
from agentlightning.algorithm.rl.checkpoints import Checkpoints, LoopState
from agentlightning.algorithm.rl.groups import Groups
from agentlightning.algorithm.rl.policies import Policies
from agentlightning.algorithm.rl.settings import RLSettings


@dataclass
class Job:
    algorithm: RLSettings
    context: RunContext
    groups: Groups
    policies: Policies
    checkpoints: Checkpoints
    state: LoopState = field(default_factory=LoopState)

    @property
    def run_id(self) -> str:
        return self.context.run.run_id

    @property
    def overlaps(self) -> bool:
        """Whether rollouts run while the learner learns."""
        return self.algorithm.max_staleness > 0

    @asynccontextmanager
    async def alone(self) -> AsyncGenerator[None]:
        """In the block, the learner has weights and cores to itself, unless rollouts run beside it."""
        if self.overlaps:
            yield
        else:
            async with self.context.calls_held(), self.policies.alone():
                yield

    def recent_rewards(self) -> list[float]:
        """The mean training rewards of the last three steps."""
        history = self.context.tracking.history
        return [history[step]["reward"] for step in sorted(history)[-3:] if "reward" in history[step]]

    async def save(self) -> None:
        """Write a checkpoint for resuming the run."""
        self.state.groups = self.groups.state
        self.state.algorithm = self.algorithm.saved_state()
        rewards = self.recent_rewards()
        self.state.recent_reward = sum(rewards) / len(rewards) if rewards else None
        await self.written(self.checkpoints.save)

    async def written(self, save: Callable[[Policies, LoopState], object]) -> None:
        """Write the current weights and state in the learner's thread, between changes."""
        await self.policies.in_thread(partial(save, self.policies, copy.deepcopy(self.state)))

    async def renew_version(self) -> None:
        """Publish the current weights again, as another version: finished rollouts never run again, and a resumed run
        whose agent was fixed must not reuse those that ended this one."""
        self.state.policy_version = await self.context.store.next_policy_version(self.run_id)
        if self.state.step == 0:
            self.state.first_version = self.state.policy_version
        self.groups.restart(self.state.policy_version)
        await self.policies.publish(self.state.policy_version)
