"""Rollouts of candidates on tasks: each is made once, all concurrently.

Tasks are numbered in an order drawn from the seed, the same for all candidates. A measured
(candidate, mode, number) is a rollout in the store; a resumed run finds it again."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from agentlightning.algorithm.base import RunContext, Stopped
from agentlightning.algorithm.budget import OutOfBudget, Spending, usage_of
from agentlightning.algorithm.evaluation import EvaluatedTask, Evaluation
from agentlightning.algorithm.prompt_search.candidates import Candidates
from agentlightning.algorithm.prompt_search.editing import in_words
from agentlightning.algorithm.rl.groups import withdraw_rollouts
from agentlightning.data.conversations import read_calls
from agentlightning.data.transitions import trace_rollout
from agentlightning.errors import TrainingError
from agentlightning.prompts.lineage import MEASURE, Candidate, Measure, Score
from agentlightning.prompts.replacing import met_components
from agentlightning.semconv import ERROR_TYPE
from agentlightning.types import EnqueueRolloutRequest, Mode, Rollout, RolloutConfig, Span

_NOT_RECORDED: Final = (
    "no rollout has a recorded conversation for the editing model to see. An agent's own client is "
    "recorded where its API is `llm` in initial_resources, and isolation='process' has the "
    "gateway in the environment; or make it from `llm`"
)
_TOO_LONG: Final = "context_length_exceeded"


class Measuring:
    """Finished rollouts by measure. A rollout without a reward counts 0, so
    failing cannot help."""

    def __init__(
        self,
        context: RunContext,
        candidates: Candidates,
        spending: Spending,
        timeout: float,
        report_share: float,
    ) -> None:
        self.outcomes: dict[Measure, Rollout] = {}
        self._met: dict[Measure, frozenset[str]] = {}  # texts that were put into calls
        self._tokens: dict[Measure, int] = {}
        self._overflown: set[Measure] = set()  # a call was too long for its model
        self.asked: set[Measure] = set()  # by this walk through the search
        self._context = context
        self._candidates = candidates
        self._spending = spending
        self._timeout = timeout
        self._recorded = False  # whether a conversation was recorded
        chance = random.Random(context.seed)
        train = chance.sample(context.train_tasks, len(context.train_tasks))
        held_out = chance.sample(context.val_tasks, len(context.val_tasks))
        reported = int(len(held_out) * report_share)
        self.tasks: dict[Mode, list[Any]] = {
            "train": train,
            "val": held_out[reported:],
            "test": held_out[:reported],
        }
        spending.reserved = 2 * reported

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
            rollout.status == "succeeded" for rollout in self.outcomes.values()
        ):
            raise TrainingError(_NOT_RECORDED)

    def reward(self, name: str, mode: Mode, number: int) -> float:
        """Of a measured rollout. Where a text that the candidate has changed met no call, the
        rollout is its parent's: that of the parent counts, if it was measured."""
        candidate = self._candidates.by_name[name]
        above = candidate.parent
        met = self._candidates.replaced(candidate) <= self._met[name, mode, number]
        if above is not None and not met and (above, mode, number) in self.outcomes:
            return self.reward(above, mode, number)
        return self._reward((name, mode, number)) or 0.0

    def _reward(self, measure: Measure) -> float | None:
        rollout = self.outcomes[measure]
        return rollout.reward if rollout.status == "succeeded" else None

    def measured(self, name: str, mode: Mode = "val") -> list[int]:
        """Numbers of the held-out tasks on which a candidate has run."""
        numbers = range(len(self.tasks[mode]))
        return [number for number in numbers if (name, mode, number) in self.asked]

    def score(self, name: str, numbers: Sequence[int] | None = None) -> Score:
        """Over held-out tasks on which the candidate has run, at least one; default: all these."""
        numbers = self.measured(name) if numbers is None else numbers
        failed = sum(self._reward((name, "val", number)) is None for number in numbers)
        mean = statistics.fmean(self.reward(name, "val", number) for number in numbers)
        tokens = statistics.fmean(self._tokens[name, "val", number] for number in numbers)
        overflows = sum((name, "val", number) in self._overflown for number in numbers)
        return Score(mean, len(numbers), failed, tokens, overflows)

    async def report(self, candidates: Sequence[Candidate]) -> list[Evaluation]:
        """The candidates on the tasks by which none was chosen; without such tasks, or the time
        or budget for them, on those by which they were."""
        self._spending.reserved = 0
        mode: Mode = "test" if self.tasks["test"] else "val"
        numbers = range(len(self.tasks[mode]))
        try:
            await self.measure([(one, mode, number) for one in candidates for number in numbers])
        except (OutOfBudget, Stopped):
            mode = "val"
        return [
            await self._evaluation(one, mode) for one in candidates if self.measured(one.name, mode)
        ]

    async def _evaluation(self, candidate: Candidate, mode: Mode) -> Evaluation:
        tasks: list[EvaluatedTask] = []
        for number in self.measured(candidate.name, mode):
            rollout = self.outcomes[candidate.name, mode, number]
            spans = await self.spans(rollout)
            tasks.append(
                EvaluatedTask(await asyncio.to_thread(trace_rollout, rollout, spans), tuple(spans))
            )
        return Evaluation(candidate.round, 0, tuple(tasks))

    async def in_words(self, measure: Measure) -> str:
        """A measured rollout as text."""
        rollout = self.outcomes[measure]
        spans = await self.spans(rollout)
        return in_words(rollout.input, spans, self._reward(measure) or 0.0, rollout.status)

    async def spans(self, rollout: Rollout) -> list[Span]:
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
        spans = await self.spans(rollout)
        self._recorded |= bool(read_calls(spans)[0])
        self.outcomes[measure] = rollout
        self._met[measure] = met_components(spans)
        if any(span.attributes.get(ERROR_TYPE) == _TOO_LONG for span in spans):
            self._overflown.add(measure)
        usage = usage_of(spans)
        self._tokens[measure] = sum(map(sum, usage.values()))
        self._spending.add_rollout(rollout.rollout_id, usage)
