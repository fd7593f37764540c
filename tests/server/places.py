"""Stores with one of everything in them, every call that can be made about it, and callers that
make it over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import msgspec

from agentlightning.arrays import plain
from agentlightning.store import calls
from agentlightning.store.base import CALLS
from agentlightning.store.calls import StoreCall
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

READ = {
    *(
        "page_rollouts",
        "wait_for_rollouts",
        "finished_after",
        "get_rollout_by_id",
        "query_attempts",
    ),
    *("get_latest_attempt", "query_spans", "page_spans", "query_resources", "get_latest_resources"),
    *(
        "get_resources_by_id",
        "query_runs",
        "query_metrics",
        "complete_groups_after",
        "get_group",
        "query_workers",
    ),
    *("statistics", "get_time"),
}
GRADER = READ | {"store_spans"}
WORKER = GRADER | {
    *(
        "start_rollout",
        "dequeue_many_rollouts",
        "start_attempt",
        "update_attempt",
        "end_attempt",
        "heartbeat",
        "extend_attempts",
    ),
    *("get_next_span_sequence_id", "update_worker", "issue_worker_key"),
}
TRAINER = WORKER | {
    *(
        "enqueue_many_rollouts",
        "update_rollout",
        "cancel_rollout",
        "add_resources",
        "start_run",
        "update_run",
    ),
    *("next_policy_version", "add_metrics", "create_group"),
}
ADMIN = TRAINER | {
    *("delete_rollouts", "issue_key", "issue_attempt_key", "revoke_key", "find_key", "query_keys"),
    *("check_store", "import_rollout", "delete_run"),
}
OPENS = {"read": READ, "grader": GRADER, "worker": WORKER, "trainer": TRAINER, "admin": ADMIN}


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
        **{
            **ids,
            **times,
            "sequence_id": 0,
            "trace_id": "7" * 32,
            "span_id": f"{number:016x}",
            "name": "n",
            **fields,
        }
    )


async def furnish(store: SqlStore, tag: str) -> Place:
    place = Place(tag)
    await store.start_run("train", {}, place.run_id)
    await store.start_run("train", {}, place.ended_run_id)
    await store.update_run(place.ended_run_id, "failed")
    await store.add_resources({}, resources_id=place.resources_id)
    await store.create_group(1, place.run_id, place.group_id)
    request = EnqueueRolloutRequest(
        input=f"input of {tag}",
        rollout_id=place.rollout_id,
        run_id=place.run_id,
        group_id=place.group_id,
        group_index=0,
    )
    await store.enqueue_many_rollouts([request])
    attempted = await store.start_attempt(
        place.rollout_id, place.worker_id, attempt_id=place.attempt_id
    )
    assert attempted.lease is not None
    await store.store_spans([span_of(place)])
    await store.add_metrics(metrics_of(place))
    return replace(
        place,
        lease=attempted.lease.token,
        key_id=(await store.issue_key("any", ["read"])).key_id,
        attempt_key=attempted.api_key,
        grading_key=await store.issue_attempt_key(place.rollout_id, place.attempt_id, rewards=True),
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


EVERY: dict[str, Callable[[Place], dict[str, Any]]] = {
    "start_rollout": lambda p: {"input": 2, "resources_id": p.resources_id},
    "enqueue_many_rollouts": lambda p: {
        "requests": [EnqueueRolloutRequest(input=2, run_id=p.run_id)]
    },
    "wait_for_rollouts": lambda p: {"rollout_ids": [p.rollout_id], "timeout": 0.0},
    "finished_after": lambda p: {"run_id": p.run_id},
    "get_rollout_by_id": lambda p: {"rollout_id": p.rollout_id},
    "update_rollout": lambda p: {"rollout_id": p.rollout_id, "metadata": {"seen": True}},
    "cancel_rollout": lambda p: {"rollout_id": p.rollout_id},
    "start_attempt": lambda p: {"rollout_id": p.rollout_id},
    "query_attempts": lambda p: {"rollout_id": p.rollout_id},
    "get_latest_attempt": lambda p: {"rollout_id": p.rollout_id},
    "update_attempt": lambda p: {
        "rollout_id": p.rollout_id,
        "attempt_id": p.attempt_id,
        "metadata": {"seen": True},
    },
    "heartbeat": lambda p: {
        "rollout_id": p.rollout_id,
        "attempt_id": p.attempt_id,
        "lease": p.lease,
    },
    "end_attempt": lambda p: {
        "rollout_id": p.rollout_id,
        "attempt_id": p.attempt_id,
        "status": "failed",
        "spans": [span_of(p, 4)],
        "metadata": {"seen": True},
    },
    "store_spans": lambda p: {"spans": [span_of(p, 2)]},
    "get_next_span_sequence_id": lambda p: {"rollout_id": p.rollout_id, "attempt_id": p.attempt_id},
    "query_spans": lambda p: {"rollout_id": p.rollout_id},
    "add_resources": lambda p: {"resources": {}, "parent_id": p.resources_id},
    "get_resources_by_id": lambda p: {"resources_id": p.resources_id},
    "update_run": lambda p: {"run_id": p.run_id, "status": "failed"},
    "delete_run": lambda p: {"run_id": p.ended_run_id},
    "next_policy_version": lambda p: {"run_id": p.run_id},
    "add_metrics": lambda p: {"metrics": metrics_of(p)},
    "query_metrics": lambda p: {"run_id": p.run_id},
    "complete_groups_after": lambda p: {"run_id": p.run_id},
    "create_group": lambda p: {"size": 1, "run_id": p.run_id},
    "get_group": lambda p: {"group_id": p.group_id},
    "issue_attempt_key": lambda p: {"rollout_id": p.rollout_id, "attempt_id": p.attempt_id},
    "dequeue_many_rollouts": lambda p: {},
    "page_rollouts": lambda p: {"with_total": True},
    "page_spans": lambda p: {"with_total": True},
    "query_resources": lambda p: {},
    "get_latest_resources": lambda p: {},
    "start_run": lambda p: {"kind": "train", "manifest": {}},
    "query_runs": lambda p: {},
    "update_worker": lambda p: {"worker_id": p.worker_id},
    "issue_worker_key": lambda p: {"worker_id": p.worker_id},
    "query_workers": lambda p: {},
    "extend_attempts": lambda p: {"attempts": [(p.rollout_id, p.attempt_id)], "seconds": 1.0},
    "statistics": lambda p: {},
    "get_time": lambda p: {},
    "delete_rollouts": lambda p: {"where": Condition("rollout_id", "eq", p.rollout_id)},
    "issue_key": lambda p: {"name": "another", "scopes": ["read"]},
    "revoke_key": lambda p: {"key_id": p.key_id},
    "find_key": lambda p: {"api_key": p.attempt_key},
    "query_keys": lambda p: {},
    "check_store": lambda p: {},
    "import_rollout": lambda p: {
        "rollout": terminal(p),
        "attempts": [last_attempt(p)],
        "spans": [],
    },
}


def call_about(name: str, place: Place) -> StoreCall:
    return CALLS[name](**EVERY[name](place))


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

    async def __call__(self, call: StoreCall) -> tuple[int, str]:
        method, _, path = call.route.partition(" ")
        fields = msgspec.to_builtins(call, enc_hook=plain)
        path = path.format_map({name: fields.pop(name) for name in calls.path_fields(path)})
        given = {name: value for name, value in fields.items() if value is not None}
        sent: dict[str, Any] = (
            {"json": given}
            if method != "GET"
            else {"params": {k: str(v) for k, v in given.items()}}
        )
        return await self.request(method, f"/api/v1{path}", **sent)

    async def request(self, method: str, path: str, **sent: Any) -> tuple[int, str]:
        headers = {} if self.key is None else {"authorization": f"Bearer {self.key}"}
        async with self.http.request(
            method, path, headers={**headers, **sent.pop("headers", {})}, **sent
        ) as answer:
            return answer.status, await answer.text(errors="replace")


async def issue(store: SqlStore, *scopes: str, **more: Any) -> str:
    return (await store.issue_key(name="k", scopes=list(scopes), **more)).api_key


def otlp(*spans: Span) -> dict[str, Any]:
    return {"data": encode_traces(spans), "headers": {"content-type": PROTOBUF}}
