"""Runs the agent on tasks without training: before, beside and after training, and separately
(`Baseline`)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from agentlightning.algorithm.base import NoProgress, RunContext
from agentlightning.algorithm.budget import UNLIMITED, Budget, OutOfBudget, Price, usage_of
from agentlightning.algorithm.measures import EVALUATED_STEP
from agentlightning.data.call_filter import FROZEN
from agentlightning.data.rewards import PLAIN, RewardSpec
from agentlightning.data.transitions import TracedRollout, trace_rollout
from agentlightning.errors import ConfigError, NotFoundError, TrainingError, check_settings
from agentlightning.store.base import LightningStore
from agentlightning.store.sources import forked
from agentlightning.types import (
    LLM,
    EnqueueRolloutRequest,
    ForkSource,
    Mode,
    Rollout,
    RolloutConfig,
    Span,
)

SUPERVISED: Final = RolloutConfig(
    timeout_seconds=300.0, max_attempts=3, retry_condition=("unresponsive",), retry="replay"
)


_FIRST: Final = 8  # tasks from which the cost of one is known


@dataclass(frozen=True)
class EvaluatedTask:
    """One rollout of a task, with all its stored data."""

    traced: TracedRollout
    spans: tuple[Span, ...]

    @property
    def rollout(self) -> Rollout:
        return self.traced.rollout

    @property
    def reward(self) -> float | None:
        return self.traced.reward


@dataclass(frozen=True)
class Evaluation:
    """Rewards over tasks, for the weights of `step` and `policy_version`."""

    step: int
    policy_version: int
    tasks: tuple[EvaluatedTask, ...]

    @property
    def reward(self) -> float:
        """The mean reward. A rollout without a reward counts 0, so failing cannot help."""
        return sum(task.reward or 0.0 for task in self.tasks) / max(1, len(self.tasks))

    @property
    def unrewarded(self) -> int:
        return sum(task.reward is None for task in self.tasks)

    @property
    def metrics(self) -> dict[str, float]:
        return {"val_reward": self.reward, "val_unrewarded": float(self.unrewarded)}


def evaluation_id(run_id: str, mode: Mode, step: int, version: int) -> str:
    """The prefix of the ids of an evaluation's rollouts."""
    return f"{run_id}-{mode}-{step}-v{version}"


async def evaluate(
    context: RunContext,
    tasks: Sequence[Any],
    *,
    step: int,
    version: int,
    mode: Mode,
    config: RolloutConfig,
    reward: RewardSpec = PLAIN,
    samples: int = 1,
    beside: bool = False,
) -> Evaluation:
    """Run the agent `samples` times on every task in `mode`, and wait for all. Repeating this after
    a crash, or with more samples, reuses what has finished. Counts in the run's spending."""
    prefix = evaluation_id(context.run.run_id, mode, step, version)
    attempts = [
        (task, f"{index}-{sample}" if sample else f"{index}")
        for sample in range(samples)
        for index, task in enumerate(tasks)
    ]
    requests = [
        EnqueueRolloutRequest(
            input=task,
            rollout_id=f"{prefix}-{name}",
            mode=mode,
            resources_id=context.resources_id,
            run_id=context.run.run_id,
            config=config,
            metadata=context.noise(f"{mode}-{step}-{name}") | {EVALUATED_STEP: step},
        )
        for task, name in attempts
    ]
    return await run_all(context, requests, step, version, reward, beside=beside)


async def run_all(
    context: RunContext,
    requests: Sequence[EnqueueRolloutRequest],
    step: int,
    version: int,
    reward: RewardSpec = PLAIN,
    *,
    beside: bool = False,
) -> Evaluation:
    """Queue these rollouts, each with an id of its own, wait for all, and read them."""
    progress = NoProgress() if beside else context.progress  # it shows the phase of training
    progress.phase("evaluate", len(requests))
    await context.store.enqueue_many_rollouts(requests)
    finished = set[str]()
    names = [request.rollout_id or "" for request in requests]
    while len(finished) < len(names):
        waiting = [name for name in names if name not in finished]
        # A short wait only paces the display; finished rollouts end it, and none is queried twice.
        for rollout in await context.unless_stopped(
            context.store.wait_for_rollouts(waiting, timeout=1.0)
        ):
            finished.add(rollout.rollout_id)
        progress.advance(len(finished))
    # with what graders have given since they ended
    ended = await context.store.query_rollouts(rollout_id_in=names)
    rollouts = {rollout.rollout_id: rollout for rollout in ended}
    evaluated: list[EvaluatedTask] = []
    for name in names:
        spans = await context.store.query_spans(name, "latest")
        if context.spending is not None:
            context.spending.add_rollout(name, await asyncio.to_thread(usage_of, spans))
        traced = await asyncio.to_thread(trace_rollout, rollouts[name], spans, reward=reward)
        evaluated.append(EvaluatedTask(traced, tuple(spans)))
    if step == 0:
        await refuse_uncalled(context, [task.traced for task in evaluated])
    return Evaluation(step, version, tuple(evaluated))


async def refuse_uncalled(context: RunContext, rollouts: Sequence[TracedRollout]) -> None:
    """TrainingError if a model is served and no successful rollout called it."""
    succeeded = [traced for traced in rollouts if traced.rollout.status == "succeeded"]
    ignored = FROZEN if context.policies else None  # calls of a judge do not count
    if not succeeded or any(
        traced.transitions or set(traced.left_out.values()) - {ignored} for traced in succeeded
    ):
        return
    resources = (await context.resources()).resources.values()
    if not any(isinstance(resource, LLM) and resource.gateway for resource in resources):
        return
    raise TrainingError(
        f"{len(succeeded)} rollouts succeeded but none called the model being served. The agent "
        "probably uses its own base URL: make its client from `llm`, or run it with --isolation "
        "process, where the environment names this model. An agent that calls no model is "
        "measured without one, by agl.Trainer(algorithm=agl.Baseline())"
    )


async def why_unrewarded(store: LightningStore, rollouts: Sequence[Rollout]) -> TrainingError:
    """An error that explains why none of `rollouts` was rewarded, with the first failure."""
    failed = next((rollout for rollout in rollouts if rollout.status == "failed"), None)
    if failed is None:
        return TrainingError(
            f"none of {len(rollouts)} rollouts was rewarded: the agent must return a number, or "
            "call agl.emit_reward"
        )
    attempt = await store.get_latest_attempt(failed.rollout_id)
    ended = attempt.status if attempt else "failed"
    reason = "" if failed.error in (None, ended) else failed.error.strip().rstrip(".")
    advice = "Fix the agent (agl eval --show runs it on a few tasks) and try again"
    if ended == "unresponsive":
        reason = reason or "its worker was not heard of any more"
        advice = (
            "See that the server, its runners and the servers of its models run, then: agl train "
            "--resume"
        )
    return TrainingError(
        f"none of {len(rollouts)} rollouts was rewarded. The first to fail, {failed.rollout_id}, "
        f"ended as {ended}{': ' + reason if reason else ''}. {advice}"
    )


async def forks_of(
    context: RunContext, sources: Sequence[ForkSource], samples: int, config: RolloutConfig
) -> list[EnqueueRolloutRequest]:
    """Requests for `samples` forks at each source, with the run's models and all else that the
    source had. NotFoundError if a source is not in the run's store."""
    store = context.store
    run_id = context.run.run_id
    requests: list[EnqueueRolloutRequest] = []
    for place, source in enumerate(sources):
        rollout = await store.get_rollout_by_id(source.rollout_id)
        if rollout is None:
            raise NotFoundError(f"there is no rollout {source.rollout_id!r} in the store to fork")
        resources_id = await _resources_of_fork(context, rollout)
        for number in range(samples):
            request = forked(rollout, source, number)
            request = msgspec.structs.replace(
                request,
                rollout_id=f"{run_id}-fork-{place}-{number}",
                run_id=run_id,
                resources_id=resources_id,
                config=config,
                metadata=request.metadata | context.noise(request.metadata["sample"]),
            )
            requests.append(request)
    return requests


async def _resources_of_fork(context: RunContext, rollout: Rollout) -> str | None:
    """The resources of a rollout, with the models of this run instead of its own."""
    here = await context.resources()
    had = rollout.resources_id and await context.store.get_resources_by_id(rollout.resources_id)
    resources = dict(had.resources) if had else {}
    for name, resource in here.resources.items():
        if name not in resources or isinstance(resource, LLM):
            resources[name] = resource
    if resources == here.resources:
        return context.resources_id
    made = await context.store.add_resources(resources, metadata={"run_id": context.run.run_id})
    return made.resources_id


@dataclass
class Baseline:
    """Evaluation without training, for comparison. Runs the agent `samples` times on each
    validation task, in `mode`; `evaluations` then has the result.

    With a `budget` (and the `prices` of models) it is over when that is spent: the result is that
    of the tasks that were run, in the order of the dataset. With `sources`, these are forked
    `samples` times each instead; they must be in the run's store. `temperature` and `max_tokens`
    are those of calls that name none."""

    samples: int = 1
    rollout: RolloutConfig = SUPERVISED
    mode: Mode = "val"
    budget: Budget = UNLIMITED
    prices: dict[str, Price] = field(default_factory=dict[str, Price])
    sources: tuple[ForkSource, ...] = ()
    temperature: float = 1.0
    max_tokens: int | None = None
    name: str = "baseline"
    evaluations: list[Evaluation] = field(default_factory=list[Evaluation], init=False)
    stopped_because: str = field(default="done", init=False)

    def __post_init__(self) -> None:
        check_settings(self, least={"samples": 1, "max_tokens": 1})
        if self.sources and self.budget != UNLIMITED:
            raise ConfigError("a budget is for tasks; of forks, give the number: samples")

    async def run(self, context: RunContext) -> None:
        if self.sources:
            requests = await forks_of(context, self.sources, self.samples, self.rollout)
            self.evaluations = [await run_all(context, requests, 0, context.run.policy_version)]
            return
        tasks = context.val_tasks
        if not tasks:
            raise ConfigError(
                "there is nothing to evaluate: the validation dataset is missing or empty"
            )
        if self.budget == UNLIMITED:
            evaluation = await self._evaluate(context, tasks)
        else:
            await context.limit(self.budget, self.prices)
            evaluation = await self._within_budget(context)
        self.evaluations = [evaluation]
        await context.tracking.record(0, evaluation.metrics)

    async def _within_budget(self, context: RunContext) -> Evaluation:
        """Run ever more of the tasks, while the budget lasts."""
        spending = context.spending
        assert spending is not None
        tasks = context.val_tasks
        evaluation = Evaluation(0, context.run.policy_version, ())
        run = min(len(tasks), spending.rollouts // self.samples)  # by the process before
        if run:
            evaluation = await self._evaluate(context, tasks[:run])
        while run < len(tasks):
            wanted = min(len(tasks) - run, max(run, _FIRST))
            try:
                count = spending.fitting(wanted * self.samples) // self.samples
                if not count:
                    spending.require(self.samples)
            except OutOfBudget as error:
                if not run:
                    raise ConfigError(f"{error}: nothing was evaluated") from None
                self.stopped_because = f"{error}; {run} of {len(tasks)} tasks were run"
                context.progress.note(self.stopped_because)
                break
            run += max(1, count)
            evaluation = await self._evaluate(context, tasks[:run])
        return evaluation

    async def _evaluate(self, context: RunContext, tasks: Sequence[Any]) -> Evaluation:
        return await evaluate(
            context,
            tasks,
            step=0,
            version=context.run.policy_version,
            mode=self.mode,
            config=self.rollout,
            samples=self.samples,
        )
