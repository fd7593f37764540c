"""Why a run's held-out reward changed: by tag over its evaluations, with tools and lengths, and
task by task; and why rollouts failed."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Final

import msgspec

from agentlightning.algorithm.measures import EVALUATED_STEP, Measured, measured, task_of
from agentlightning.data.transitions import trace_rollout
from agentlightning.store.base import LightningStore
from agentlightning.types import And, Condition, Filter, Order, Rollout

_MOST: Final = 300  # rollouts to read per evaluation
_SHOWN: Final = 50  # tasks to compare side by side
_LATEST: Final = 500  # latest to read
_OF_A_CAUSE: Final = 20  # rollouts shown per cause
_PARTICULAR: Final = re.compile(r"0x[0-9a-f]+|[\w-]*\d[\w.-]*|'[^']*'|\"[^\"]*\"")
ALL: Final = "all tasks"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over the rollouts of each evaluation; None without rollouts."""

    name: str
    means: list[float | None]


class TaskRow(msgspec.Struct, frozen=True, kw_only=True):
    """Mean rewards on a task, which is JSON, and a rollout of each: by evaluation, or by run. None
    where it was not measured."""

    task: str
    rewards: list[float | None]
    rollout_ids: list[str | None]


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """`steps` are those of the run's evaluations. `rewards` are by tag; `behaviour` has the calls
    of each tool, answer tokens and calls per rollout; `tasks` start with the largest change from
    the first weights to the newest."""

    steps: list[int]
    rewards: list[Row]
    behaviour: list[Row]
    tasks: list[TaskRow]


class _Result(msgspec.Struct, frozen=True):
    """A failed rollout counts 0, as in every evaluation."""

    task: str
    reward: float
    rollout_id: str


async def progress(store: LightningStore, run_id: str) -> Progress:
    held_out = And([Condition("run_id", "eq", run_id), Condition("mode", "eq", "val")])
    by_step: dict[int, list[Rollout]] = {}
    for rollout in await store.query_rollouts(where=held_out):
        step = rollout.metadata.get(EVALUATED_STEP)
        if isinstance(step, int) and rollout.status in ("succeeded", "failed"):
            by_step.setdefault(step, []).append(rollout)
    seen = [
        [await _measure(store, rollout) for rollout in by_step[step][:_MOST]]
        for step in sorted(by_step)
    ]
    results = [
        [_Result(one.task, one.reward or 0.0, one.rollout_id) for one, _ in part] for part in seen
    ]
    names = list(dict.fromkeys(name for part in seen for _, counts in part for name in counts))
    tags = sorted({tag for part in seen for one, _ in part for tag in one.tags})
    return Progress(
        steps=sorted(by_step),
        rewards=[_row(tag or ALL, [_rewards(part, tag) for part in seen]) for tag in ("", *tags)],
        behaviour=[
            _row(name, [[float(counts[name]) for _, counts in part] for part in seen])
            for name in names
        ],
        tasks=_by_task(results),
    )


async def _measure(store: LightningStore, rollout: Rollout) -> tuple[Measured, Counter[str]]:
    """The measures of a rollout, and counts of its behaviour."""
    spans = await store.query_spans(rollout.rollout_id, "latest")
    traced = await asyncio.to_thread(trace_rollout, rollout, spans)
    counts = Counter({"calls": len(traced.transitions), "answer tokens": 0})
    for call in traced.transitions:
        counts["answer tokens"] += len(call.response_ids)
        for tool in call.tools:
            counts[f"tool {tool.tool}"] += 1
            counts["failed tools"] += tool.status < 0
    return measured(traced), counts


def _rewards(part: Sequence[tuple[Measured, Counter[str]]], tag: str) -> list[float]:
    """A failed rollout counts 0, as in every evaluation."""
    return [one.reward or 0.0 for one, _ in part if not tag or tag in one.tags]


def _row(name: str, values: Sequence[Sequence[float]]) -> Row:
    return Row(name=name, means=[fmean(of_step) if of_step else None for of_step in values])


def _by_task(parts: Sequence[Sequence[_Result]]) -> list[TaskRow]:
    """The tasks of which the results in `parts` differ most come first."""
    tasks: dict[str, list[list[_Result]]] = {}
    for place, part in enumerate(parts):
        for result in part:
            tasks.setdefault(result.task, [[] for _ in parts])[place].append(result)
    rows = [
        TaskRow(
            task=task,
            rewards=[fmean(result.reward for result in own) if own else None for own in results],
            rollout_ids=[own[0].rollout_id if own else None for own in results],
        )
        for task, results in tasks.items()
    ]
    return sorted(rows, key=lambda row: -_change(row))[:_SHOWN]


def _change(row: TaskRow) -> float:
    """The distance between the first and the last reward on a task; -1 for a task that was measured
    once."""
    known = [reward for reward in row.rewards if reward is not None]
    return abs(known[-1] - known[0]) if len(known) > 1 else -1.0


# --- several runs ---------------------------------------------------------------------------------


async def compared(store: LightningStore, run_ids: Sequence[str]) -> list[TaskRow]:
    """The rewards of each run's newest evaluation, task by task."""
    return _by_task([await _newest_results(store, run_id) for run_id in run_ids])


async def _newest_results(store: LightningStore, run_id: str) -> list[_Result]:
    held_out = And([Condition("run_id", "eq", run_id), Condition("mode", "in", ["val", "test"])])
    newest = Order(field="number", descending=True)
    rollouts = [
        rollout
        for rollout in (await store.page_rollouts(held_out, [newest], limit=_LATEST)).items
        if rollout.status in ("succeeded", "failed")
    ]
    step = max((_step(rollout) for rollout in rollouts), default=0)
    return [
        _Result(task_of(rollout.input), rollout.reward or 0.0, rollout.rollout_id)
        for rollout in rollouts
        if _step(rollout) == step
    ]


def _step(rollout: Rollout) -> int:
    """That of the evaluation; a run that only evaluates has one."""
    return step if isinstance(step := rollout.metadata.get(EVALUATED_STEP), int) else 0


# --- failures -------------------------------------------------------------------------------------


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """A cause of failures: a typical `reason`, the `count` of rollouts, and the latest of them."""

    reason: str
    count: int
    rollout_ids: list[str]


def failed(run_id: str) -> Filter:
    return And([Condition("run_id", "eq", run_id), Condition("status", "eq", "failed")])


async def causes(store: LightningStore, run_id: str) -> list[Cause]:
    """The causes of a run's latest failures, the most frequent first. Reasons that differ only in
    numbers, ids and quoted words have one cause."""
    newest = Order(field="start_time", descending=True)
    rollouts = (await store.page_rollouts(failed(run_id), [newest], limit=_LATEST)).items
    found: dict[str, list[tuple[str, str]]] = {}
    for rollout in rollouts:
        reason = (rollout.error or "failed").partition("\n")[0][:500]
        found.setdefault(_PARTICULAR.sub("…", reason), []).append((reason, rollout.rollout_id))
    alike = [
        Cause(
            reason=members[0][0],
            count=len(members),
            rollout_ids=[rollout_id for _, rollout_id in members[:_OF_A_CAUSE]],
        )
        for members in found.values()
    ]
    return sorted(alike, key=lambda cause: -cause.count)
