"""Stores with one of everything in them, every call that can be made about it, and callers that make it over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import msgspec

from agentlightning.store import calls
from agentlightning.store.calls import Call
from agentlightning.store.sql import SqlStore
from agentlightning.tracing.otlp import PROTOBUF
from agentlightning.types import (
    Attempt,
    Condition,
    EnqueueRolloutRequest,
    Metrics,
    Rollout,
    Span,
)
from tests.server.exporters import encode_traces

# --- which scope opens which calls -------------------------------------------------------------------------------

READ = {
    calls.QueryRollouts,
    calls.WaitForRollouts,
    calls.FinishedAfter,
    calls.GetRollout,
    calls.QueryAttempts,
    calls.GetLatestAttempt,
    calls.GetSpans,
    calls.QuerySpans,
    calls.QueryResources,
    calls.GetLatestResources,
    calls.GetResources,
    calls.QueryRuns,
    calls.QueryMetrics,
    calls.CompleteGroupsAfter,
    calls.GetGroup,
    calls.QueryWorkers,
    calls.Statistics,
    calls.GetTime,
}
GRADER = READ | {calls.AddSpans}
WORKER = GRADER | {
    calls.StartRollout,
    calls.LeaseRollouts,
    calls.StartAttempt,
    calls.UpdateAttempt,
    calls.BeatHeart,
    calls.ExtendAttempts,
    calls.NextSpanSequenceId,
    calls.UpdateWorker,
    calls.IssueWorkerKey,
}
TRAINER = WORKER | {
    calls.EnqueueRollouts,
    calls.UpdateRollout,
    calls.CancelRollout,
    calls.AddResources,
    calls.StartRun,
    calls.UpdateRun,
    calls.NextPolicyVersion,
    calls.AddMetrics,
    calls.CreateGroup,
}
ADMIN = TRAINER | {
    calls.DeleteRollouts,
    calls.IssueKey,
    calls.IssueAttemptKey,
    calls.RevokeKey,
    calls.FindKey,
    calls.QueryKeys,
    calls.CheckStore,
    calls.ImportRollout,
}
OPENS = {"read": READ, "grader": GRADER, "worker": WORKER, "trainer": TRAINER, "admin": ADMIN}


# --- a furnished store -------------------------------------------------------------------------------------------


@dataclass
class Place:
    """One of everything; `tag` is in every id."""

    tag: str
    lease: int = 0
    key_id: str = "key-0"
    attempt_key: str = ""
    grading_key: str = ""

    def __getattr__(self, name: str) -> str:
        return f"{name.removesuffix('_id')}-{self.tag}"


def span_of(place: Place, number: int = 1, **fields: Any) -> Span:
    ids = {"rollout_id": place.rollout_id, "attempt_id": place.attempt_id}
    times = {"start_time": 1.0, "end_time": 2.0}
    return Span(
        **{**ids, **times, "sequence_id": 0, "trace_id": "7" * 32, "span_id": f"{number:016x}", "name": "n", **fields}
    )


async def furnish(store: SqlStore, tag: str) -> Place:
    place = Place(tag)
    perform = store.perform
    await perform(calls.StartRun(kind="train", manifest={}, run_id=place.run_id))
    await perform(calls.AddResources(resources={}, resources_id=place.resources_id))
    await perform(calls.CreateGroup(size=1, run_id=place.run_id, group_id=place.group_id))
    request = EnqueueRolloutRequest(
        input=f"input of {tag}",
        rollout_id=place.rollout_id,
        run_id=place.run_id,
        group_id=place.group_id,
        group_index=0,
    )
    await perform(calls.EnqueueRollouts(requests=[request]))
    attempted = await perform(
        calls.StartAttempt(rollout_id=place.rollout_id, attempt_id=place.attempt_id, worker_id=place.worker_id)
    )
    assert attempted.lease is not None
    await perform(calls.AddSpans(spans=[span_of(place)]))
    await perform(calls.AddMetrics(run_id=place.run_id, metrics=metrics_of(place)))
    of_attempt = {"rollout_id": place.rollout_id, "attempt_id": place.attempt_id}
    return replace(
        place,
        lease=attempted.lease.token,
        key_id=(await perform(calls.IssueKey(name="any", scopes=["read"]))).key_id,
        attempt_key=attempted.api_key,
        grading_key=await perform(calls.IssueAttemptKey(**of_attempt, rewards=True)),
    )


def metrics_of(place: Place) -> Metrics:
    return Metrics(run_id=place.run_id, step=1, time=1.0, values={"reward": 0.5})


def terminal(place: Place) -> Rollout:
    return Rollout(
        rollout_id=f"imported-{place.tag}",
        input=1,
        start_time=1.0,
        end_time=2.0,
        status="succeeded",
    )


def last_attempt(place: Place) -> Attempt:
    ids = {"rollout_id": terminal(place).rollout_id, "attempt_id": f"imported-{place.tag}"}
    return Attempt(**ids, sequence_id=1, start_time=1.0, status="succeeded")


NAMING: dict[type[Call[Any]], Callable[[Place], Call[Any]]] = {
    calls.StartRollout: lambda p: calls.StartRollout(
        request=EnqueueRolloutRequest(input=2, resources_id=p.resources_id)
    ),
    calls.EnqueueRollouts: lambda p: calls.EnqueueRollouts(requests=[EnqueueRolloutRequest(input=2, run_id=p.run_id)]),
    calls.WaitForRollouts: lambda p: calls.WaitForRollouts(rollout_ids=[p.rollout_id], timeout=0.0),
    calls.FinishedAfter: lambda p: calls.FinishedAfter(run_id=p.run_id),
    calls.GetRollout: lambda p: calls.GetRollout(rollout_id=p.rollout_id),
    calls.UpdateRollout: lambda p: calls.UpdateRollout(rollout_id=p.rollout_id, metadata={"seen": True}),
    calls.CancelRollout: lambda p: calls.CancelRollout(rollout_id=p.rollout_id),
    calls.StartAttempt: lambda p: calls.StartAttempt(rollout_id=p.rollout_id),
    calls.QueryAttempts: lambda p: calls.QueryAttempts(rollout_id=p.rollout_id),
    calls.GetLatestAttempt: lambda p: calls.GetLatestAttempt(rollout_id=p.rollout_id),
    calls.UpdateAttempt: lambda p: calls.UpdateAttempt(
        rollout_id=p.rollout_id, attempt_id=p.attempt_id, metadata={"seen": True}
    ),
    calls.BeatHeart: lambda p: calls.BeatHeart(rollout_id=p.rollout_id, attempt_id=p.attempt_id, lease=p.lease),
    calls.AddSpans: lambda p: calls.AddSpans(spans=[span_of(p, 2)]),
    calls.NextSpanSequenceId: lambda p: calls.NextSpanSequenceId(rollout_id=p.rollout_id, attempt_id=p.attempt_id),
    calls.GetSpans: lambda p: calls.GetSpans(rollout_id=p.rollout_id),
    calls.AddResources: lambda p: calls.AddResources(resources={}, parent_id=p.resources_id),
    calls.GetResources: lambda p: calls.GetResources(resources_id=p.resources_id),
    calls.UpdateRun: lambda p: calls.UpdateRun(run_id=p.run_id, status="failed"),
    calls.NextPolicyVersion: lambda p: calls.NextPolicyVersion(run_id=p.run_id),
    calls.AddMetrics: lambda p: calls.AddMetrics(run_id=p.run_id, metrics=metrics_of(p)),
    calls.QueryMetrics: lambda p: calls.QueryMetrics(run_id=p.run_id),
    calls.CompleteGroupsAfter: lambda p: calls.CompleteGroupsAfter(run_id=p.run_id),
    calls.CreateGroup: lambda p: calls.CreateGroup(size=1, run_id=p.run_id),
    calls.GetGroup: lambda p: calls.GetGroup(group_id=p.group_id),
    calls.IssueAttemptKey: lambda p: calls.IssueAttemptKey(rollout_id=p.rollout_id, attempt_id=p.attempt_id),
}
"""Calls that name something of a place."""

NAMELESS: dict[type[Call[Any]], Callable[[Place], Call[Any]]] = {
    calls.LeaseRollouts: lambda p: calls.LeaseRollouts(),
    calls.QueryRollouts: lambda p: calls.QueryRollouts(with_total=True),
    calls.QuerySpans: lambda p: calls.QuerySpans(with_total=True),
    calls.QueryResources: lambda p: calls.QueryResources(),
    calls.GetLatestResources: lambda p: calls.GetLatestResources(),
    calls.StartRun: lambda p: calls.StartRun(kind="train", manifest={}),
    calls.QueryRuns: lambda p: calls.QueryRuns(),
    calls.UpdateWorker: lambda p: calls.UpdateWorker(worker_id=p.worker_id),
    calls.IssueWorkerKey: lambda p: calls.IssueWorkerKey(worker_id=p.worker_id),
    calls.QueryWorkers: lambda p: calls.QueryWorkers(),
    calls.ExtendAttempts: lambda p: calls.ExtendAttempts(attempts=[(p.rollout_id, p.attempt_id)], seconds=1.0),
    calls.Statistics: lambda p: calls.Statistics(),
    calls.GetTime: lambda p: calls.GetTime(),
    calls.DeleteRollouts: lambda p: calls.DeleteRollouts(where=Condition("rollout_id", "eq", p.rollout_id)),
    calls.IssueKey: lambda p: calls.IssueKey(name="another", scopes=["read"]),
    calls.RevokeKey: lambda p: calls.RevokeKey(key_id=p.key_id),
    calls.FindKey: lambda p: calls.FindKey(api_key=p.attempt_key),
    calls.QueryKeys: lambda p: calls.QueryKeys(),
    calls.CheckStore: lambda p: calls.CheckStore(),
    calls.ImportRollout: lambda p: calls.ImportRollout(rollout=terminal(p), attempts=[last_attempt(p)], spans=[]),
}
EVERY = {**NAMING, **NAMELESS}


@dataclass
class Clock:
    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Caller:
    """An HTTP client with one key."""

    http: aiohttp.ClientSession
    key: str | None
    headers: dict[str, str] = field(default_factory=dict)

    async def __call__(self, call: Call[Any]) -> tuple[int, str]:
        method, _, path = call.route.partition(" ")
        fields = msgspec.to_builtins(call)
        path = path.format_map({name: fields.pop(name) for name in calls.path_fields(path)})
        given = {name: value for name, value in fields.items() if value is not None}
        sent: dict[str, Any] = {"json": given} if method != "GET" else {"params": {k: str(v) for k, v in given.items()}}
        return await self.request(method, f"/api/v1{path}", **sent)

    async def request(self, method: str, path: str, **sent: Any) -> tuple[int, str]:
        headers = {} if self.key is None else {"authorization": f"Bearer {self.key}"}
        async with self.http.request(method, path, headers={**headers, **sent.pop("headers", {})}, **sent) as answer:
            return answer.status, await answer.text(errors="replace")


async def issue(store: SqlStore, *scopes: str, **more: Any) -> str:
    return (await store.perform(calls.IssueKey(name="k", scopes=list(scopes), **more))).api_key


def otlp(*spans: Span) -> dict[str, Any]:
    return {"data": encode_traces(spans), "headers": {"content-type": PROTOBUF}}
