"""The interface of a store, the same in this process (`store.sql`) and over HTTP (`store.client`).

Each method marked with `call` becomes a noun; a store implements `perform` for these. The interface
knows nothing of HTTP, the meaning of tokens, or algorithms. Returned objects are immutable
snapshots."""

# Methods marked as a `call` have no body.
# ruff: noqa: B027
# pyright: reportReturnType=false

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from agentlightning.store import otel
from agentlightning.store.calls import StoreCall, call, calls_of
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
    """Durable rollouts, attempts, spans, resources, runs and groups. When a call returns, its
    changes are committed.

    Calls raise `NotFoundError`, `ConflictError`, `InvalidError` or `UnavailableError`, and then
    change nothing.

    `away_at` is when a call last found the store unavailable, on the monotonic clock."""

    away_at: float = -math.inf

    @abc.abstractmethod
    async def perform(self, call: StoreCall) -> Any:
        """Execute one call. The methods below say what each does and returns."""

    @abc.abstractmethod
    async def close(self) -> None: ...

    @call("POST /rollouts")
    async def enqueue_many_rollouts(
        self, requests: Sequence[EnqueueRolloutRequest]
    ) -> list[Rollout]:
        """Queue all of these rollouts, or none. If a `rollout_id` is stored already, the stored
        rollout is returned; with another input, ConflictError. A `group_id` needs a `group_index`,
        and a group made by `create_group`. A `source` must be an attempt that has ended, of this
        input, whose call `at` was answered and recorded: InvalidError."""

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
        """Create a rollout and lease its first attempt to the caller, bypassing the queue."""

    @call("POST /rollouts/lease", "worker", ids={"lease_id": "at"})
    async def dequeue_many_rollouts(
        self,
        limit: int = 1,
        worker_id: str | None = None,
        timeout: float = 0.0,
        *,
        lease_id: str | None = None,
    ) -> list[AttemptedRollout]:
        """Lease up to `limit` queued rollouts (at most 1,000), by priority and then age. Each comes
        with a new attempt, a lease and an API key.

        If nothing is queued, wait up to `timeout` seconds for work, then return an empty list. A
        repeated call with the same `lease_id` returns the same rollouts."""

    async def dequeue_rollout(
        self, worker_id: str | None = None, timeout: float = 0.0
    ) -> AttemptedRollout | None:
        """Lease one rollout. None if nothing is queued within `timeout` seconds."""
        leased = await self.dequeue_many_rollouts(1, worker_id, timeout)
        return leased[0] if leased else None

    @call("POST /rollouts/{rollout_id}/attempts", "worker", ids={"attempt_id": "at"})
    async def start_attempt(
        self, rollout_id: str, worker_id: str | None = None, *, attempt_id: str | None = None
    ) -> AttemptedRollout:
        """Start another attempt on a rollout that has not ended. Earlier attempts no longer change
        the rollout."""

    @call("POST /rollouts/{rollout_id}/cancel")
    async def cancel_rollout(self, rollout_id: str) -> Rollout:
        """Cancel a rollout. This is final: the next heartbeat of a running attempt says so, and its
        LLM calls get 403."""

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
        """The rollouts that match all given filters, in the order they were queued."""
        any_of = {"rollout_id": rollout_id_in, "status": status_in, "mode": mode_in}
        equal = {"run_id": run_id, "group_id": group_id}
        conditions = [
            Condition(field=name, op="in", value=list(v))
            for name, v in any_of.items()
            if v is not None
        ]
        conditions += [
            Condition(field=name, op="eq", value=v) for name, v in equal.items() if v is not None
        ]
        wanted = And(conditions if where is None else [*conditions, where])
        found: list[Rollout] = []
        cursor: str | None = None
        while True:
            rest = None if limit is None else limit - len(found)
            page = await self.page_rollouts(
                wanted, limit=rest, offset=0 if cursor else offset, cursor=cursor
            )
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
        """One page of the rollouts that match `where`, sorted by `order` and then by queuing. Pass
        its `next_cursor` for the next page. A page ends at `limit`, at 16 MiB, or, from a server,
        at 1,000 rows. `with_total` scans all matching rows."""

    @call("GET /rollouts/{rollout_id}", "read")
    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None: ...

    @call("PATCH /rollouts/{rollout_id}", repeatable=lambda call: call.status != "requeuing")
    async def update_rollout(
        self,
        rollout_id: str,
        *,
        status: RolloutStatus | None = None,
        metadata: Mapping[str, Any] | None = None,
        merge: Mapping[str, Any] | None = None,
    ) -> Rollout:
        """Change status or metadata: `metadata` replaces the whole, `merge` goes into it key by
        key, also in nested objects, and None removes a key. You can end, cancel or requeue a
        rollout, which ends its active attempts. `preparing` and `running` follow from its attempts:
        setting them is a ConflictError."""

    @call("POST /rollouts/wait", "read")
    async def wait_for_rollouts(
        self, rollout_ids: Sequence[str], timeout: float | None = None
    ) -> list[Rollout]:
        """Wait until all of `rollout_ids` have ended, or for `timeout` seconds (None: no limit).
        Returns those that have ended, in the order given."""

    @call("GET /finished-rollouts", "read")
    async def finished_after(
        self, cursor: int = 0, limit: int = 100, timeout: float = 0.0, *, run_id: str | None = None
    ) -> FinishedRollouts:
        """The rollouts that ended after `cursor`, in that order; none ever appears before a cursor
        you have passed. Waits up to `timeout` seconds for the first."""

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
        """Change status or metadata; the rollout's status follows. ConflictError if `lease` is not
        the attempt's newest token. Ending an attempt again with the same status changes nothing."""

    @call("POST /rollouts/{rollout_id}/attempts/{attempt_id}/end", "worker")
    async def end_attempt(
        self,
        rollout_id: str,
        attempt_id: str,
        status: AttemptStatus,
        spans: Sequence[Span] = (),
        *,
        metadata: Mapping[str, Any] | None = None,
        lease: int | None = None,
    ) -> list[int]:
        """Store the last spans of an attempt and end it, or neither: whoever sees the end sees
        every span. See `store_spans`, whose result this is, and `update_attempt`. InvalidError for
        a status that is no end."""

    @call("POST /rollouts/{rollout_id}/attempts/{attempt_id}/heartbeat", "worker")
    async def heartbeat(self, rollout_id: str, attempt_id: str, lease: int) -> Heartbeat:
        """Extend the owner's lease. The answer says whether the attempt has been cancelled or has
        timed out."""

    @call("POST /attempts/extend", "worker")
    async def extend_attempts(self, attempts: Sequence[tuple[str, str]], seconds: float) -> None:
        """Stop the timeout and the unresponsive limit of these attempts, each a (rollout_id,
        attempt_id), for the next `seconds`, because the gateway holds their calls. Their leases go
        on. Overlapping periods count once. Attempts that are unknown or have ended are skipped.
        InvalidError unless `seconds` is positive and finite."""

    async def add_many_spans(self, spans: Sequence[Span]) -> list[Span]:
        """Store all of these spans, or none, and return them with their sequence ids;
        `sequence_id=0` gets the attempt's next. A span whose (attempt_id, span_id) is stored
        already is not stored again. The first span moves an attempt from preparing to running.
        Spans of ended attempts are stored too. InvalidError for an attribute that is not finite."""
        spans = list(spans)
        return [
            span
            if span.sequence_id == sequence_id
            else msgspec.structs.replace(span, sequence_id=sequence_id)
            for span, sequence_id in zip(spans, await self.store_spans(spans), strict=True)
        ]

    @call("POST /spans", "grader")
    async def store_spans(self, spans: Sequence[Span]) -> list[int]:
        """Like `add_many_spans`, but returns only the sequence ids; 0 for a dropped span."""

    async def add_span(self, span: Span) -> Span:
        return (await self.add_many_spans([span]))[0]

    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: Any, sequence_id: int | None = None
    ) -> Span:
        """Store a finished span of OpenTelemetry's SDK (a `ReadableSpan`) as one of this attempt,
        whatever its attributes say. Without a `sequence_id` it gets the attempt's next."""
        return await self.add_span(otel.span_of(rollout_id, attempt_id, sequence_id, readable_span))

    @call("POST /rollouts/{rollout_id}/attempts/{attempt_id}/next-span-sequence-id", "worker")
    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        """The attempt's next sequence id: above all earlier ones, starting at 1."""

    @call("GET /rollouts/{rollout_id}/spans", "read")
    async def query_spans(self, rollout_id: str, attempt_id: str | None = None) -> list[Span]:
        """The spans of one attempt, or of all, by start time and then sequence id.
        `attempt_id="latest"` is the last attempt."""

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
        """One page of the spans that match `where`, from all rollouts; see `page_rollouts`."""

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
        """Store a new version of the resources, which becomes the latest. ConflictError if the
        `resources_id` has other content already."""

    async def update_resources(
        self, resources_id: str, resources: NamedResources
    ) -> ResourcesUpdate:
        """Store resources under an id of your choice; see `add_resources`."""
        return await self.add_resources(resources, resources_id=resources_id)

    @call("GET /resources", "read")
    async def query_resources(self) -> list[ResourcesUpdate]: ...

    @call("GET /resources/{resources_id}", "read")
    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None: ...

    @call("GET /latest-resources", "read")
    async def get_latest_resources(self) -> ResourcesUpdate | None: ...

    @call("POST /runs", ids={"run_id": "run"})
    async def start_run(
        self, kind: str, manifest: Mapping[str, Any], run_id: str | None = None
    ) -> Run:
        """Record a new run. If the id is stored already (a resumed run), set that run to running
        and return it."""

    @call("PATCH /runs/{run_id}")
    async def update_run(
        self,
        run_id: str,
        status: RunStatus | None = None,
        *,
        merge: Mapping[str, Any] | None = None,
    ) -> Run:
        """Change status or manifest: `merge` goes into the manifest key by key, and None removes a
        key. Keys with a meaning: `name`, `tags` (a list), `reason` (why the run ended) and `stop`
        (true asks it to end after its step)."""

    @call("DELETE /runs/{run_id}", "admin", audited=True)
    async def delete_run(self, run_id: str) -> Deleted:
        """Delete a run with its metrics, groups and rollouts. ConflictError while it is running."""

    @call("GET /runs", "read")
    async def query_runs(self) -> list[Run]: ...

    @call("POST /metrics")
    async def add_metrics(self, metrics: Metrics) -> Run:
        """Record or replace a run's metrics at one step; returns the run. InvalidError for a value
        that is not finite."""

    @call("GET /runs/{run_id}/metrics", "read")
    async def query_metrics(self, run_id: str) -> list[Metrics]:
        """All metrics of a run, by step."""

    @call("POST /runs/{run_id}/next-policy-version")
    async def next_policy_version(self, run_id: str) -> int:
        """The version of the next published weights: 1, 2, 3 …. No number is given twice, even
        after a crash."""

    @call("POST /groups", ids={"group_id": "gr"})
    async def create_group(
        self,
        size: int,
        run_id: str | None = None,
        group_id: str | None = None,
        source_id: str | None = None,
    ) -> Group:
        """Create a group of `size` rollouts, which are queued with its id and the indices 0 …
        size−1; of forks, `source_id` is the group of their sources. A stored `group_id` is
        returned; with another size, run or source, ConflictError."""

    @call("GET /groups/{group_id}", "read")
    async def get_group(self, group_id: str) -> Group | None: ...

    @call("GET /runs/{run_id}/complete-groups", "read")
    async def complete_groups_after(
        self, run_id: str, cursor: int = 0, limit: int = 100, timeout: float = 0.0
    ) -> list[Group]:
        """The run's groups whose `finished_index` is above `cursor`, in that order. A group gets
        its number when all of its rollouts have ended. Waits up to `timeout` seconds for the
        first."""

    @call("PUT /workers", "worker")
    async def update_worker(
        self, worker_id: str, heartbeat_stats: Mapping[str, Any] | None = None
    ) -> Worker: ...

    @call("POST /workers/key", "worker")
    async def issue_worker_key(self, worker_id: str) -> str:
        """An API key for the one attempt that this worker holds at the time of a call; with none or
        several, the call is refused (HTTP 409). For agents that create one client for many
        attempts."""

    @call("GET /workers", "read")
    async def query_workers(self) -> list[Worker]: ...

    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        return next(
            (worker for worker in await self.query_workers() if worker.worker_id == worker_id), None
        )

    @call("GET /statistics", "read")
    async def statistics(self) -> dict[str, int]:
        """Counts: rollouts by status, attempts, spans, resources, runs, groups, workers, and those
        alive."""

    @call("GET /time", "read")
    async def get_time(self) -> float:
        """The time of the store's clock, in seconds since the epoch. It stands still while the
        machine sleeps."""

    @call("POST /rollouts/delete", "admin", audited=True)
    async def delete_rollouts(
        self, where: Filter, unfinished: bool = False, scrub: bool = False
    ) -> Deleted:
        """Delete the rollouts that match, with their attempts and spans, and their forks, which
        are nothing without them. Unfinished rollouts stay, and sources of forks in a group that is
        not complete; with `unfinished` they are cancelled first, as forks always are. `scrub`
        rewrites a SQLite file, so that no trace is left; writes wait meanwhile."""

    @call("POST /rollouts/import", "admin", audited=True)
    async def import_rollout(
        self, rollout: Rollout, attempts: Sequence[Attempt], spans: Sequence[Span]
    ) -> bool:
        """Store a rollout of another store unchanged. False if it is stored already."""

    @call("POST /check", "admin", audited=True)
    async def check_store(self) -> list[str]:
        """Check the store: a sentence per problem; empty if there is none."""

    @call("POST /keys", "admin", audited=True, repeatable=lambda call: False)
    async def issue_key(
        self, name: str, scopes: Sequence[KeyScope], lifetime_seconds: float | None = None
    ) -> IssuedKey: ...

    @call("POST /rollouts/{rollout_id}/attempts/{attempt_id}/keys", "admin", audited=True)
    async def issue_attempt_key(
        self, rollout_id: str, attempt_id: str, rewards: bool = False
    ) -> str:
        """Another key for one attempt; with `rewards` it may also write the attempt's rewards."""

    @call("DELETE /keys/{key_id}", "admin", audited=True)
    async def revoke_key(self, key_id: str) -> ApiKey:
        """Revoke a key. This takes effect at once and is final."""

    @call("POST /keys/find", "admin")
    async def find_key(self, api_key: str) -> Credential | None:
        """The rights of the holder of a key; None if the key is not valid. ConflictError for the
        key of a worker that holds no attempt, or several."""

    @call("GET /keys", "admin")
    async def query_keys(self) -> list[ApiKey]: ...


CALLS: Final[Mapping[str, type[StoreCall]]] = calls_of(LightningStore)
"""The calls by method name, in the order above."""
