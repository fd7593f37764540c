"""The evaluations of a training run: at its start, at intervals, and at its end; and the best
weights."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from agentlightning.algorithm.base import Stopped
from agentlightning.algorithm.budget import BudgetTooSmall, OutOfBudget
from agentlightning.algorithm.evaluation import Evaluation, evaluate, why_unrewarded
from agentlightning.algorithm.rl.job import Job
from agentlightning.data.rewards import RewardSpec
from agentlightning.data.transitions import tool_success
from agentlightning.errors import ConfigError


class HeldOut:
    """Measures the weights of `job` on its held-out tasks; `evaluations` are the finished ones."""

    def __init__(self, job: Job) -> None:
        self.evaluations: list[Evaluation] = []
        self._job = job
        self._running: asyncio.Task[None] | None = None

    async def first(self) -> None:
        """Evaluate the starting weights, and reserve time for the final evaluation. A resumed run
        has the result in its store."""
        job = self._job
        if not job.context.val_tasks:
            return
        self._reserve()
        started = time.perf_counter()
        first = await self._evaluation(0, job.state.first_version)
        if first.unrewarded == len(first.tasks) and job.algorithm.judge is not None:
            raise ConfigError(
                "the judge compares rollouts of a group, so held-out tasks need a reward that the "
                "agent gives: leave val_dataset out, and compare the weights with agl regrade"
            )
        if first.unrewarded == len(first.tasks) and job.algorithm.unrewarded == "exclude":
            raise await why_unrewarded(job.context.store, [task.rollout for task in first.tasks])
        await self._keep(first)
        job.state.evaluation_seconds = max(
            job.state.evaluation_seconds, time.perf_counter() - started
        )
        if job.context.deadline is not None:
            job.context.deadline -= 1.5 * job.state.evaluation_seconds

    async def when_due(self) -> None:
        """Evaluate the current weights at intervals: before training continues or, if rollouts
        overlap anyway, beside it. Skipped while an evaluation is still running."""
        job = self._job
        every = job.algorithm.evaluation_interval
        step = job.state.step
        if not every or step % every or self._last == step or not self._affordable:
            return
        if not job.overlaps:
            await self._evaluate()
        elif not self._beside:
            await self.finished()
            await job.written(job.checkpoints.save_candidate)
            self._running = asyncio.create_task(self._evaluate())

    async def finished(self) -> None:
        """Wait for the evaluation beside training, and raise its error."""
        if self._running is not None:
            await self._running

    async def cancel(self) -> None:
        """Cancel the evaluation beside training."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def last(self) -> str | None:
        """Evaluate the final weights; returns why that stopped."""
        context = self._job.context
        if context.stop.is_set() or self._last in (None, self._job.state.step):
            return None
        context.deadline = None  # its time, and its part of the budget, were reserved at the start
        try:
            await self._evaluate()
        except Stopped as stopped:
            return str(stopped)
        return None

    def _reserve(self) -> None:
        """Keep the last evaluation's part of the budget. ConfigError if a new run has nothing left
        to train with."""
        context = self._job.context
        if context.spending is None:
            return
        algorithm = self._job.algorithm
        evaluation = context.spending.reserved = len(context.val_tasks)
        step = algorithm.tasks_per_step * algorithm.rollouts_per_group
        try:
            context.spending.require(0 if context.resume else evaluation + step)
        except OutOfBudget as error:
            raise BudgetTooSmall(
                f"{error}. The evaluations before and after take {evaluation} rollouts each and a "
                f"step {step}: give a larger budget, or fewer held-out tasks"
            ) from None

    @property
    def _affordable(self) -> bool:
        """Whether the budget leaves an evaluation between."""
        context = self._job.context
        try:
            if context.spending is not None:
                context.spending.require(len(context.val_tasks))
        except OutOfBudget:
            return False
        return True

    @property
    def _last(self) -> int | None:
        return self.evaluations[-1].step if self.evaluations else None

    @property
    def _beside(self) -> bool:
        """Whether an evaluation runs beside training."""
        return self._running is not None and not self._running.done()

    async def _evaluate(self) -> None:
        if self._job.context.val_tasks:
            await self._keep(
                await self._evaluation(self._job.state.step, self._job.state.policy_version)
            )

    async def _evaluation(self, step: int, version: int) -> Evaluation:
        algorithm = self._job.algorithm
        context = self._job.context
        return await evaluate(
            context,
            context.val_tasks,
            step=step,
            version=version,
            mode="val",
            config=algorithm.rollout,
            reward=RewardSpec(base=algorithm.reward.base, failed_tool=algorithm.reward.failed_tool),
            beside=self._beside,
        )

    async def _keep(self, evaluation: Evaluation) -> None:
        job = self._job
        self.evaluations.append(evaluation)
        worked = tool_success(task.traced for task in evaluation.tasks)
        values = evaluation.metrics | ({} if worked is None else {"val_tool_success": worked})
        await job.context.tracking.record(evaluation.step, values)
        best = job.state.best_reward
        if best is not None and evaluation.reward <= best:
            return
        if self._beside:  # the learner may be changing the weights now
            promote = partial(job.checkpoints.promote_candidate, evaluation.step, evaluation.reward)
            if await job.policies.in_thread(promote):
                job.state.best_reward = evaluation.reward
        elif evaluation.step == job.state.step:
            job.state.best_reward = evaluation.reward
            await job.written(job.checkpoints.save_best)
