"""`Reinforcement`: what every reinforcement-learning algorithm is. Its settings, run by the loop."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

from agentlightning.algorithm.base import RunContext
from agentlightning.algorithm.evaluation import Evaluation
from agentlightning.algorithm.rl.groups import Groups
from agentlightning.algorithm.rl.loop import EXPORTS, Loop
from agentlightning.algorithm.rl.settings import RLSettings
from agentlightning.errors import ConfigError
from agentlightning.store.base import LightningStore


class Reinforcement(RLSettings):
    """A dataclass below it defines `advantages`; its fields are its settings, those of `RLSettings` included."""

    evaluations: list[Evaluation]
    stopped_because: str

    def traces_beside(self, store: LightningStore) -> AbstractAsyncContextManager[LightningStore]:
        """The store with the rollouts that are learned from, where the run's own is `store`."""
        return nullcontext(store)

    @asynccontextmanager
    async def groups(self, context: RunContext) -> AsyncGenerator[Groups]:
        """What steps learn from. ConfigError or TrainingError where there is nothing to learn from."""
        if not context.train_tasks:
            raise ConfigError(f"{self.name} runs the agent on tasks: give a training dataset")
        yield Groups(self, context)

    async def run(self, context: RunContext) -> None:
        """Train until done or stopped; afterwards `evaluations` holds the first and the last, and what lay between."""
        async with self.groups(context) as groups:
            with ThreadPoolExecutor(1, "learner") as thread:
                loop = Loop(self, context, groups, thread)
                self.evaluations = loop.held_out.evaluations
                try:
                    self.stopped_because = await loop.run()
                finally:
                    await asyncio.to_thread(shutil.rmtree, context.directory / EXPORTS, ignore_errors=True)
