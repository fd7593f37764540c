"""Rollouts of candidates on tasks: each is made once, all concurrently.

Tasks are numbered in an order drawn from the seed, the same for all candidates. A measured
(candidate, mode, number) is a rollout in the store; a resumed run finds it again."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

import msgspec

from agentlightning.algorithm.base import RunContext
from agentlightning.algorithm.evaluation import EvaluatedTask, Evaluation
from agentlightning.algorithm.prompt_search.budget import Spending, usage_of
from agentlightning.algorithm.prompt_search.candidates import Candidate, Candidates, Score
from agentlightning.algorithm.prompt_search.editing import in_words
from agentlightning.algorithm.rl.groups import withdraw_rollouts
from agentlightning.data.conversations import read_calls
from agentlightning.data.transitions import TracedRollout, trace_rollout
from agentlightning.errors import TrainingError
from agentlightning.types import EnqueueRolloutRequest, Mode, Rollout, RolloutConfig, Span

_NOT_RECORDED: Final = (
    "no rollout has a recorded conversation for the editing model to see. An agent's own client is "
    "recorded where its API is `llm` in initial_resources, and isolation='process' has the "
    "gateway in the environment; or make it from `llm`"
)
MEASURE: Final = "measure"
Measure: TypeAlias = tuple[str, Mode, int]
"""Name of a candidate, train or val, number of the task."""


class Measuring:
    """Outcomes by measure, without their transitions. A rollout without a reward counts 0, so
    failing cannot help."""

    def __init__(
        self, context: RunContext, candidates: Candidates, spending: Spending, timeout: float
    ) -> None:
        self.outcomes: dict[Measure, TracedRollout] = {}
        self.asked: set[Measure] = set()  # by this walk through the search
        self._context = context
        self._candidates = candidates
        self._spending = spending
        self._timeout = timeout
        self._recorded = False  # whether a conversation was recorded
        chance = random.Random(context.seed)
        self.tasks: dict[Mode, list[Any]] = {
            "train": [*context.train_tasks],
            "val": [*context.val_tasks],
        }
        for tasks in self.tasks.values():
            chance.shuffle(tasks)

    async def open(self) -> None:
        """Load what the run has measured earlier."""
        for rollout in await self._context.store.query_rollouts(
            run_id=self._context.run.run_id, status_in=["succeeded", "failed"]
        ):
            if MEASURE in rollout.metadata:
                await self._take(msgspec.convert(rollout.metadata[MEASURE], Measure), rollout)

    async def measure(self, wanted: Iterable[tuple[Candidate, Mode, int]]) -> None:
        """Run the missing rollouts and wait for all. OutOfBudget before the first, if not all
        fit."""
        asked: dict[Measure, Candidate] = {
            (candidate.name, mode, number): candidate for candidate, mode, number in wanted
        }
        missing = [measure for measure in asked if measure not in self.outcomes]
        if missing:
            self._spending.require(len(missing))
            requests = [await self._request(asked[measure], measure) for measure in missing]
            await self._run(requests, missing)
        self.asked.update(asked)
        if not self._recorded and any(
            outcome.rollout.status == "succeeded" for outcome in self.outcomes.values()
        ):
            raise TrainingError(_NOT_RECORDED)

    def reward(self, name: str, mode: Mode, number: int) -> float:
        return self.outcomes[name, mode, number].reward or 0.0

    def measured(self, name: str) -> list[int]:
        """Numbers of the held-out tasks on which a candidate has run."""
        return [
            number
            for number in range(len(self.tasks["val"]))
            if (name, "val", number) in self.asked
        ]

    def score(self, name: str, numbers: Sequence[int] | None = None) -> Score:
        """Over held-out tasks on which the candidate has run, at least one; default: all these."""
        numbers = self.measured(name) if numbers is None else numbers
        failed = sum(self.outcomes[name, "val", number].reward is None for number in numbers)
        rewards = [self.reward(name, "val", number) for number in numbers]
        return Score(statistics.fmean(rewards), len(numbers), failed)

    async def evaluation(self, name: str, step: int) -> Evaluation:
        """All held-out results of a candidate."""
        tasks: list[EvaluatedTask] = []
        for number in self.measured(name):
            rollout = self.outcomes[name, "val", number].rollout
            spans = await self._spans(rollout)
            tasks.append(
                EvaluatedTask(await asyncio.to_thread(trace_rollout, rollout, spans), tuple(spans))
            )
        return Evaluation(step, 0, tuple(tasks))

    async def in_words(self, measure: Measure) -> str:
        """A measured rollout as text."""
        traced = self.outcomes[measure]
        spans = await self._spans(traced.rollout)
        return in_words(traced.rollout.input, spans, traced.reward or 0.0, traced.rollout.status)

    async def _spans(self, rollout: Rollout) -> list[Span]:
        return await self._context.store.query_spans(rollout.rollout_id, "latest")

    async def _request(self, candidate: Candidate, measure: Measure) -> EnqueueRolloutRequest:
        version = await self._candidates.version(candidate)
        name, mode, number = measure
        run_id = self._context.run.run_id
        return EnqueueRolloutRequest(
            input=self.tasks[mode][number],
            rollout_id=f"{run_id}-{name}-{mode}-{number}-v{version.version}",
            mode=mode,
            resources_id=version.resources_id,
            run_id=run_id,
            config=RolloutConfig(
                timeout_seconds=self._timeout, max_attempts=3, retry_condition=("unresponsive",)
            ),
            metadata={MEASURE: measure} | self._context.noise(f"{mode}-{number}"),
        )

    async def _run(
        self, requests: Sequence[EnqueueRolloutRequest], measures: Sequence[Measure]
    ) -> None:
        ids = [request.rollout_id or "" for request in requests]
        waiting = dict(zip(ids, measures, strict=True))
        if self._context.resume:  # the interrupted process's rollouts used an endpoint that is gone
            await withdraw_rollouts(self._context, lambda rollout: rollout.rollout_id not in ids)
        self._context.progress.phase("evaluate", len(requests))
        await self._context.store.enqueue_many_rollouts(requests)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout
        while waiting:
            if loop.time() > deadline:
                await withdraw_rollouts(
                    self._context, lambda rollout: rollout.rollout_id in waiting
                )
            # A short wait only paces the display; finished rollouts wake it.
            awaited = self._context.store.wait_for_rollouts(list(waiting), timeout=1.0)
            for rollout in await self._context.unless_stopped(awaited):
                await self._take(waiting.pop(rollout.rollout_id), rollout)
            self._context.progress.advance(len(requests) - len(waiting))

    async def _take(self, measure: Measure, rollout: Rollout) -> None:
        spans = await self._spans(rollout)
        self._recorded |= bool(read_calls(spans)[0])
        traced = await asyncio.to_thread(trace_rollout, rollout, spans)
        # whose tokens would take much memory
        self.outcomes[measure] = replace(traced, transitions=())
        self._spending.add_rollout(usage_of(spans))
