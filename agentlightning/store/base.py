"""What a store is: one async interface, the same in process (`store.sql`) and over HTTP (`store.client`).

Each method marked as a `call` becomes a noun, and a store is whatever can `perform` those. The interface knows
rollouts, attempts, spans, resources, runs and groups. It does not know HTTP, tokens' meaning or any algorithm. Errors
are `NotFoundError`, `ConflictError`, `InvalidError` and `UnavailableError`; a call that raises has changed nothing.
What is returned is an immutable snapshot.
"""

# Methods marked as a `call` have no body.
# ruff: noqa: B027
# pyright: reportReturnType=false

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from agentlightning.store import otel
from agentlightning.store.calls import Call, call, calls_of
from agentlightning.types import (
    And,
    ApiKey,
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    Condition,
    Credential,
    Deleted,
    EnqueueRolloutRequest,
    Filter,
    FinishedRollouts,
    Group,
    Heartbeat,
    IssuedKey,
    KeyScope,
    Metrics,
    Mode,
    NamedResources,
    Order,
    Outcome,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    RolloutPage,
    RolloutStatus,
    Run,
    RunStatus,
    Span,
    SpanPage,
    Worker,
)


class LightningStore(abc.ABC):
    """Durable rollouts, attempts, spans, resources, runs and groups. Acknowledged means committed."""

    @abc.abstractmethod
    async def perform(self, call: Call) -> Any:
        """Carry out one call; the methods below say what each does and returns."""

    @abc.abstractmethod
    async def close(self) -> None: ...

    # --- rollouts ---

    @call("POST /rollouts")
    async def enqueue_many_rollouts(self, requests: Sequence[EnqueueRolloutRequest]) -> list[Rollout]:
        """Queue rollouts, all or none. A request whose `rollout_id` is already stored with the same input returns the
        stored rollout; with another input it is a ConflictError. Requests with a `group_id` need `group_index`; the
        group must have been created by `create_group`."""

    async def enqueue_rollout(
        self,
        input: Any,
        mode: Mode = "train",
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Rollout:
        """Queue one rollout; see `enqueue_many_rollouts`."""
        request = EnqueueRolloutRequest(
            input=input,
            mode=mode,
            resources_id=resources_id,
            config=config or RolloutConfig(),
            metadata=dict(metadata or {}),
        )
        return (await self.enqueue_many_rollouts([request]))[0]

    @call("POST /rollouts/start", "worker", ids={"rollout_id": "ro", "attempt_id": "at"})
    async def start_rollout(
        self,
        input: Any,
        mode: Mode = "train",
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        worker_id: str | None = None,
        *,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
    ) -> AttemptedRollout:
        """Create a rollout and lease its first attempt to the caller at once, past the queue."""

    @call("POST /rollouts/lease", "worker", ids={"lease_id": "at"})
    async def dequeue_many_rollouts(
        self,
        limit: int = 1,
        worker_id: str | None = None,
        timeout: float = 0.0,
        *,
        lease_id: str | None = None,
    ) -> list[AttemptedRollout]:
        """Lease up to `limit` queued rollouts, at most 1,000, of the highest priority and then the oldest first, each
        with a new attempt, a lease and an API key.

        With nothing queued, wait up to `timeout` seconds for work (a long poll), then return an empty list. Asked again
        with the same `lease_id`, the store answers with what it leased the first time."""

    async def dequeue_rollout(self, worker_id: str | None = None, timeout: float = 0.0) -> AttemptedRollout | None:
        """Lease one rollout, or None when nothing came within `timeout` seconds."""
        leased = await self.dequeue_many_rollouts(1, worker_id, timeout)
        return leased[0] if leased else None

    @call("POST /rollouts/{rollout_id}/attempts", "worker", ids={"attempt_id": "at"})
    async def start_attempt(
        self, rollout_id: str, worker_id: str | None = None, *, attempt_id: str | None = None
    ) -> AttemptedRollout:
        """Start a further attempt on a rollout that is not terminal; the earlier attempt no longer moves it."""

    @call("POST /rollouts/{rollout_id}/cancel")
    async def cancel_rollout(self, rollout_id: str) -> Rollout:
        """Cancel for good. A running attempt learns it from its next heartbeat and its LLM calls get 403."""

    async def query_rollouts(
        self,
        *,
        rollout_id_in: Sequence[str] | None = None,
        status_in: Sequence[RolloutStatus] | None = None,
        mode_in: Sequence[Mode] | None = None,
        run_id: str | None = None,
        group_id: str | None = None,
        where: Filter | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[Rollout]:
        """Rollouts that match every given filter, in the order they were enqueued."""
        one_of = {"rollout_id": rollout_id_in, "status": status_in, "mode": mode_in}
        equal = {"run_id": run_id, "group_id": group_id}
        conditions = [Condition(field=name, op="in", value=list(v)) for name, v in one_of.items() if v is not None]
        conditions += [Condition(field=name, op="eq", value=v) for name, v in equal.items() if v is not None]
        wanted = And(conditions if where is None else [*conditions, where])
        found: list[Rollout] = []
        cursor: str | None = None
        while True:
            rest = None if limit is None else limit - len(found)
            page = await self.page_rollouts(wanted, limit=rest, offset=0 if cursor else offset, cursor=cursor)
            found += page.items
            cursor = page.next_cursor
            if cursor is None or len(found) == limit:
                return found

    @call("POST /rollouts/query", "read")
    async def page_rollouts(
        self,
        where: Filter | None = None,
        order: Sequence[Order] = (),
        *,
        limit: int | None = 100,
        offset: int = 0,
        cursor: str | None = None,
        with_total: bool = False,
    ) -> RolloutPage:
        """One page of the rollouts that match `where`, sorted by `order` and then as enqueued; the page's
        `next_cursor` asks for the one after it. A page has at most 16 MiB, and from a server 1,000 rows, so that it may
        end before the `limit`. Counting the `total` costs a scan of all that match."""

    @call("POST /rollouts/outcomes", "read")
    async def query_outcomes(self, rollout_ids: Sequence[str]) -> list[Outcome]:
        """The outcomes of those rollouts that are stored, in any order."""

    @call("GET /rollouts/{rollout_id}", "read")
    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None: ...

    @call("PATCH /rollouts/{rollout_id}", repeatable=lambda call: call.status != "requeuing")
    async def update_rollout(
        self,
        rollout_id: str,
        *,
        status: RolloutStatus | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Rollout:
        """Change what is given; metadata is replaced. An illegal status transition is a ConflictError: by hand a
        rollout can be ended, cancelled or requeued, which ends its active attempts, while `preparing` and `running` are
        reached by its attempts."""

    @call("POST /rollouts/wait", "read")
    async def wait_for_rollouts(self, rollout_ids: Sequence[str], timeout: float | None = None) -> list[Rollout]:
        """The terminal ones among `rollout_ids`, in the order given: all of them, or those finished after `timeout`
        seconds (None: no limit)."""

    @call("GET /finished-rollouts", "read")
    async def finished_after(
        self, cursor: int = 0, limit: int = 100, timeout: float = 0.0, *, run_id: str | None = None
    ) -> FinishedRollouts:
        """Rollouts that became terminal after `cursor`, in that order: nothing ever appears behind a cursor that has
        passed it. Waits up to `timeout` seconds for the first."""

    # --- attempts ---

    @call("GET /rollouts/{rollout_id}/attempts", "read")
    async def query_attempts(self, rollout_id: str) -> list[Attempt]:
        """All attempts of a rollout, first to last."""

    @call("GET /rollouts/{rollout_id}/attempts/latest", "read")
    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None: ...

    @call("PATCH /rollouts/{rollout_id}/attempts/{attempt_id}", "worker")
    async def update_attempt(
        self,
        rollout_id: str,
        attempt_id: str,
        *,
        status: AttemptStatus | None = None,
        metadata: Mapping[str, Any] | None = None,
        lease: int | None = None,
    ) -> Attempt:
        """Change what is given; the rollout follows by the lifecycle. A `lease` token that is no longer the attempt's
        newest is a ConflictError. Ending an attempt twice with the same status changes nothing."""

    @call("POST /rollouts/{rollout_id}/attempts/{attempt_id}/heartbeat", "worker")
    async def heartbeat(self, rollout_id: str, attempt_id: str, lease: int) -> Heartbeat:
        """Extend the lease of its owner; the answer says whether the attempt was cancelled or timed out meanwhile."""

    @call("POST /attempts/extend", "worker")
    async def extend_attempts(self, attempts: Sequence[tuple[str, str]], seconds: float) -> None:
        """Calls of these attempts, each a (rollout_id, attempt_id), are held back for the next `seconds`: that much
        later their timeout and their silence run out; their leases do not wait. Said again before the `seconds` are
        over, it counts from then, and the seconds that both speak of count once. Attempts that are unknown or have
        ended are passed over. InvalidError unless `seconds` is positive and finite."""

    # --- spans ---

    async def add_many_spans(self, spans: Sequence[Span]) -> list[Span]:
        """Store spans, all or none, and return them with the sequence ids they are stored under. A span whose
        (attempt_id, span_id) is stored already is not stored again. One with `sequence_id=0` gets the attempt's next.
        The first span of an attempt moves it from preparing to running. Spans of ended attempts are kept. Numbers must
        be finite: an attribute that is not is an InvalidError."""
        spans = list(spans)
        return [
            span if span.sequence_id == sequence_id else msgspec.structs.replace(span, sequence_id=sequence_id)
            for span, sequence_id in zip(spans, await self.store_spans(spans), strict=True)
        ]

    @call("POST /spans", "grader")
    async def store_spans(self, spans: Sequence[Span]) -> list[int]:
        """What `add_many_spans` does, returning only the sequence ids; 0 for a span that was dropped."""

    async def add_span(self, span: Span) -> Span:
        return (await self.add_many_spans([span]))[0]

    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: Any, sequence_id: int | None = None
    ) -> Span:
        """Store a finished span of OpenTelemetry's SDK (a `ReadableSpan`), whatever attempt its attributes name.
        Without a `sequence_id` it gets the attempt's next."""
        return await self.add_span(otel.span_of(rollout_id, attempt_id, sequence_id, readable_span))

    @call("POST /rollouts/{rollout_id}/attempts/{attempt_id}/next-span-sequence-id", "worker")
    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        """A number larger than any given out for this attempt before, starting at 1."""

    @call("GET /rollouts/{rollout_id}/spans", "read")
    async def query_spans(self, rollout_id: str, attempt_id: str | None = None) -> list[Span]:
        """Spans of one attempt, or of all, ordered by start time, then sequence id. `attempt_id="latest"` picks the
        last attempt."""

    @call("POST /spans/query", "read")
    async def page_spans(
        self,
        where: Filter | None = None,
        order: Sequence[Order] = (),
        *,
        limit: int | None = 100,
        offset: int = 0,
        cursor: str | None = None,
        with_total: bool = False,
    ) -> SpanPage:
        """One page of the spans, of whatever rollouts, that match `where`; see `page_rollouts`."""

    # --- resources ---

    @call("POST /resources", ids={"resources_id": "rs"})
    async def add_resources(
        self,
        resources: NamedResources,
        metadata: Mapping[str, Any] | None = None,
        *,
        run_id: str | None = None,
        parent_id: str | None = None,
        resources_id: str | None = None,
    ) -> ResourcesUpdate:
        """Store a new immutable version; it becomes the latest. A `resources_id` once used with other content is a
        ConflictError."""

    async def update_resources(self, resources_id: str, resources: NamedResources) -> ResourcesUpdate:
        """Store resources under an id of the caller's choice."""
        return await self.add_resources(resources, resources_id=resources_id)

    @call("GET /resources", "read")
    async def query_resources(self) -> list[ResourcesUpdate]: ...

    @call("GET /resources/{resources_id}", "read")
    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None: ...

    @call("GET /latest-resources", "read")
    async def get_latest_resources(self) -> ResourcesUpdate | None: ...

    # --- runs and groups ---

    @call("POST /runs", ids={"run_id": "run"})
    async def start_run(self, kind: str, manifest: Mapping[str, Any], run_id: str | None = None) -> Run:
        """Record a new run, or return the stored one of that id (a resumed run) set back to running."""

    @call("PATCH /runs/{run_id}")
    async def update_run(self, run_id: str, status: RunStatus) -> Run: ...

    @call("GET /runs", "read")
    async def query_runs(self) -> list[Run]: ...

    @call("POST /metrics")
    async def add_metrics(self, metrics: Metrics) -> None:
        """Record (or replace) what a run measured at one step. Values must be finite."""

    @call("GET /runs/{run_id}/metrics", "read")
    async def query_metrics(self, run_id: str) -> list[Metrics]:
        """All metrics of a run by step."""

    @call("POST /runs/{run_id}/next-policy-version")
    async def next_policy_version(self, run_id: str) -> int:
        """Allocate the number of the next publication of weights: 1, 2, 3 …, never given twice, not after a crash."""

    @call("POST /groups", ids={"group_id": "gr"})
    async def create_group(self, size: int, run_id: str | None = None, group_id: str | None = None) -> Group:
        """Declare a group of `size` rollouts, to be enqueued with its id and the indices 0 … size−1. Declaring a
        stored `group_id` again returns it; with another size or run it is a ConflictError."""

    @call("GET /groups/{group_id}", "read")
    async def get_group(self, group_id: str) -> Group | None: ...

    @call("GET /runs/{run_id}/complete-groups", "read")
    async def complete_groups_after(
        self, run_id: str, cursor: int = 0, limit: int = 100, timeout: float = 0.0
    ) -> list[Group]:
        """Groups of a run whose `finished_index` is above `cursor`, in that order: groups become complete when all
        their rollouts are terminal and are numbered then. Waits up to `timeout` seconds for the first."""

    # --- workers and the whole ---

    @call("PUT /workers", "worker")
    async def update_worker(self, worker_id: str, heartbeat_stats: Mapping[str, Any] | None = None) -> Worker: ...

    @call("POST /workers/key", "worker")
    async def issue_worker_key(self, worker_id: str) -> str:
        """An API key that stands for whatever attempt this worker holds at present; with none or several it is refused
        (HTTP 409). It is for agents whose client is made once for many attempts."""

    @call("GET /workers", "read")
    async def query_workers(self) -> list[Worker]: ...

    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        return next((worker for worker in await self.query_workers() if worker.worker_id == worker_id), None)

    @call("GET /statistics", "read")
    async def statistics(self) -> dict[str, int]:
        """Counts: rollouts by status, attempts, spans, resources, runs, groups, workers."""

    @call("GET /time", "read")
    async def get_time(self) -> float:
        """The time by the store's own clock, which stamps all that is stored, in seconds since the epoch. It stands
        still while the machine sleeps."""

    # --- administration ---

    @call("POST /rollouts/delete", "admin", audited=True)
    async def delete_rollouts(self, where: Filter, unfinished: bool = False, scrub: bool = False) -> Deleted:
        """Remove what belongs to the rollouts that match; those not yet terminal are left, or cancelled first if
        `unfinished`. `scrub` leaves no trace of what was removed in a SQLite file, which is written anew while writes
        wait."""

    @call("POST /rollouts/import", "admin", audited=True)
    async def import_rollout(self, rollout: Rollout, attempts: Sequence[Attempt], spans: Sequence[Span]) -> bool:
        """Store a rollout as it was elsewhere; False if it is stored already."""

    @call("POST /check", "admin", audited=True)
    async def check_store(self) -> list[str]:
        """Everything that is wrong with what is stored, in words; empty if nothing is."""

    @call("POST /keys", "admin", audited=True, repeatable=lambda call: False)
    async def issue_key(
        self, name: str, scopes: Sequence[KeyScope], lifetime_seconds: float | None = None
    ) -> IssuedKey: ...

    @call("POST /rollouts/{rollout_id}/attempts/{attempt_id}/keys", "admin", audited=True)
    async def issue_attempt_key(self, rollout_id: str, attempt_id: str, rewards: bool = False) -> str:
        """A further key of one attempt; with `rewards` it may also write the attempt's rewards."""

    @call("DELETE /keys/{key_id}", "admin", audited=True)
    async def revoke_key(self, key_id: str) -> ApiKey:
        """End a key at once and for good."""

    @call("POST /keys/find", "admin")
    async def find_key(self, api_key: str) -> Credential | None:
        """What the holder of a key may do; None for a key that is not valid, or no longer. ConflictError for the key of
        a worker that holds no attempt, or several."""

    @call("GET /keys", "admin")
    async def query_keys(self) -> list[ApiKey]: ...


CALLS: Final[Mapping[str, type[Call]]] = calls_of(LightningStore)
"""The calls by the names of their methods, in the order of this page."""
