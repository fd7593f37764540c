"""What a store is: one async interface, the same in process (`store.sql`) and over HTTP (`store.client`).

Each method makes a noun of `store.calls`; a store is whatever can `perform` those. The interface knows rollouts,
attempts, spans, resources, runs and groups. It does not know HTTP, tokens' meaning or any algorithm. Errors are
`NotFoundError`, `ConflictError`, `InvalidError` and `UnavailableError`; a call that raises has changed nothing. What is
returned is an immutable snapshot.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, Unpack

import msgspec

from agentlightning.store import calls, otel
from agentlightning.store.calls import Call
from agentlightning.types import (
    And,
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    Condition,
    EnqueueRolloutRequest,
    Filter,
    FinishedRollouts,
    Group,
    Heartbeat,
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

T = TypeVar("T")


class LightningStore(abc.ABC):
    """Durable rollouts, attempts, spans, resources, runs and groups. Acknowledged means committed."""

    @abc.abstractmethod
    async def perform(self, call: Call[T]) -> T:
        """Carry out one call; the methods below say what each does."""

    @abc.abstractmethod
    async def close(self) -> None: ...

    # --- rollouts ---

    async def enqueue_many_rollouts(self, requests: Sequence[EnqueueRolloutRequest]) -> list[Rollout]:
        """Queue rollouts, all or none. A request whose `rollout_id` is already stored with the same input returns the
        stored rollout; with another input it is a ConflictError. Requests with a `group_id` need `group_index`; the
        group must have been created by `create_group`."""
        return await self.perform(calls.EnqueueRollouts(requests=list(requests)))

    async def enqueue_rollout(
        self,
        input: Any,
        mode: Mode = "train",
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Rollout:
        """Queue one rollout; see `enqueue_many_rollouts`."""
        return (await self.enqueue_many_rollouts([_request(input, mode, resources_id, config, metadata)]))[0]

    async def start_rollout(
        self,
        input: Any,
        mode: Mode = "train",
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        worker_id: str | None = None,
    ) -> AttemptedRollout:
        """Create a rollout and lease its first attempt to the caller at once, past the queue."""
        request = _request(input, mode, resources_id, config, metadata)
        return await self.perform(calls.StartRollout(request=request, worker_id=worker_id))

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
        return await self.perform(
            calls.LeaseRollouts(limit=limit, worker_id=worker_id, timeout=timeout, lease_id=lease_id)
        )

    async def dequeue_rollout(self, worker_id: str | None = None, timeout: float = 0.0) -> AttemptedRollout | None:
        """Lease one rollout, or None when nothing came within `timeout` seconds."""
        leased = await self.dequeue_many_rollouts(1, worker_id, timeout)
        return leased[0] if leased else None

    async def start_attempt(self, rollout_id: str, worker_id: str | None = None) -> AttemptedRollout:
        """Start a further attempt on a rollout that is not terminal; the earlier attempt no longer moves it."""
        return await self.perform(calls.StartAttempt(rollout_id=rollout_id, worker_id=worker_id))

    async def cancel_rollout(self, rollout_id: str) -> Rollout:
        """Cancel for good. A running attempt learns it from its next heartbeat and its LLM calls get 403."""
        return await self.perform(calls.CancelRollout(rollout_id=rollout_id))

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
        wanted = And(of=tuple(conditions if where is None else [*conditions, where]))
        page = await self.perform(calls.QueryRollouts(where=wanted if wanted.of else None, limit=limit, offset=offset))
        return list(page.items)

    async def page_rollouts(
        self, where: Filter | None = None, order: Sequence[Order] = (), *, limit: int = 100, **page: Unpack[calls.Page]
    ) -> RolloutPage:
        """One page of the rollouts that match `where`, sorted by `order` and then as enqueued; the page's
        `next_cursor` asks for the one after it. Counting the `total` costs a scan of all that match."""
        return await self.perform(calls.QueryRollouts(where=where, order=tuple(order), limit=limit, **page))

    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        return await self.perform(calls.GetRollout(rollout_id=rollout_id))

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
        return await self.perform(calls.UpdateRollout(rollout_id=rollout_id, status=status, metadata=_dict(metadata)))

    async def wait_for_rollouts(self, rollout_ids: Sequence[str], timeout: float | None = None) -> list[Rollout]:
        """The terminal ones among `rollout_ids`, in the order given: all of them, or those finished after `timeout`
        seconds (None: no limit)."""
        return await self.perform(calls.WaitForRollouts(rollout_ids=list(rollout_ids), timeout=timeout))

    async def finished_after(
        self, cursor: int = 0, limit: int = 100, timeout: float = 0.0, *, run_id: str | None = None
    ) -> FinishedRollouts:
        """Rollouts that became terminal after `cursor`, in that order: nothing ever appears behind a cursor that has
        passed it. Waits up to `timeout` seconds for the first."""
        return await self.perform(calls.FinishedAfter(cursor=cursor, limit=limit, timeout=timeout, run_id=run_id))

    # --- attempts ---

    async def query_attempts(self, rollout_id: str) -> list[Attempt]:
        """All attempts of a rollout, first to last."""
        return await self.perform(calls.QueryAttempts(rollout_id=rollout_id))

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        return await self.perform(calls.GetLatestAttempt(rollout_id=rollout_id))

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
        return await self.perform(
            calls.UpdateAttempt(
                rollout_id=rollout_id, attempt_id=attempt_id, status=status, metadata=_dict(metadata), lease=lease
            )
        )

    async def heartbeat(self, rollout_id: str, attempt_id: str, lease: int) -> Heartbeat:
        """Extend the lease of its owner; the answer says whether the attempt was cancelled or timed out meanwhile."""
        return await self.perform(calls.BeatHeart(rollout_id=rollout_id, attempt_id=attempt_id, lease=lease))

    async def extend_attempts(self, attempts: Sequence[tuple[str, str]], seconds: float) -> None:
        """Calls of these attempts, each a (rollout_id, attempt_id), are held back for the next `seconds`: that much
        later their timeout and their silence run out; their leases do not wait. Said again before the `seconds` are
        over, it counts from then, and the seconds that both speak of count once. Attempts that are unknown or have
        ended are passed over. InvalidError unless `seconds` is positive and finite."""
        await self.perform(calls.ExtendAttempts(attempts=list(attempts), seconds=seconds))

    # --- spans ---

    async def add_many_spans(self, spans: Sequence[Span]) -> list[Span]:
        """Store spans, all or none, and return them with the sequence ids they are stored under. A span whose
        (attempt_id, span_id) is stored already is not stored again. One with `sequence_id=0` gets the attempt's next.
        The first span of an attempt moves it from preparing to running. Spans of ended attempts are kept. Numbers must
        be finite: an attribute that is not is an InvalidError."""
        spans = list(spans)
        stored = await self.perform(calls.AddSpans(spans=spans))
        return [
            span if span.sequence_id == sequence_id else msgspec.structs.replace(span, sequence_id=sequence_id)
            for span, sequence_id in zip(spans, stored, strict=True)
        ]

    async def add_span(self, span: Span) -> Span:
        return (await self.add_many_spans([span]))[0]

    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: Any, sequence_id: int | None = None
    ) -> Span:
        """Store a finished span of OpenTelemetry's SDK (a `ReadableSpan`), whatever attempt its attributes name.
        Without a `sequence_id` it gets the attempt's next."""
        return await self.add_span(otel.span_of(rollout_id, attempt_id, sequence_id, readable_span))

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        """A number larger than any given out for this attempt before, starting at 1."""
        return await self.perform(calls.NextSpanSequenceId(rollout_id=rollout_id, attempt_id=attempt_id))

    async def query_spans(self, rollout_id: str, attempt_id: str | None = None) -> list[Span]:
        """Spans of one attempt, or of all, ordered by start time, then sequence id. `attempt_id="latest"` picks the
        last attempt."""
        return await self.perform(calls.GetSpans(rollout_id=rollout_id, attempt_id=attempt_id))

    async def page_spans(
        self, where: Filter | None = None, order: Sequence[Order] = (), *, limit: int = 100, **page: Unpack[calls.Page]
    ) -> SpanPage:
        """One page of the spans, of whatever rollouts, that match `where`; see `page_rollouts`."""
        return await self.perform(calls.QuerySpans(where=where, order=tuple(order), limit=limit, **page))

    # --- resources ---

    async def add_resources(
        self,
        resources: NamedResources,
        metadata: Mapping[str, Any] | None = None,
        *,
        run_id: str | None = None,
        parent_id: str | None = None,
    ) -> ResourcesUpdate:
        """Store a new immutable version; it becomes the latest."""
        return await self.perform(
            calls.AddResources(resources=resources, metadata=_dict(metadata), run_id=run_id, parent_id=parent_id)
        )

    async def update_resources(self, resources_id: str, resources: NamedResources) -> ResourcesUpdate:
        """Store resources under an id of the caller's choice; an id once used with other content is a
        ConflictError, since versions are immutable."""
        return await self.perform(calls.AddResources(resources=resources, resources_id=resources_id))

    async def query_resources(self) -> list[ResourcesUpdate]:
        return await self.perform(calls.QueryResources())

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        return await self.perform(calls.GetResources(resources_id=resources_id))

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        return await self.perform(calls.GetLatestResources())

    # --- runs and groups ---

    async def start_run(self, kind: str, manifest: Mapping[str, Any], run_id: str | None = None) -> Run:
        """Record a new run, or return the stored one of that id (a resumed run) set back to running."""
        return await self.perform(calls.StartRun(kind=kind, manifest=dict(manifest), run_id=run_id))

    async def update_run(self, run_id: str, status: RunStatus) -> Run:
        return await self.perform(calls.UpdateRun(run_id=run_id, status=status))

    async def query_runs(self) -> list[Run]:
        return await self.perform(calls.QueryRuns())

    async def add_metrics(self, metrics: Metrics) -> None:
        """Record (or replace) what a run measured at one step. Values must be finite."""
        await self.perform(calls.AddMetrics(run_id=metrics.run_id, metrics=metrics))

    async def query_metrics(self, run_id: str) -> list[Metrics]:
        """All metrics of a run by step."""
        return await self.perform(calls.QueryMetrics(run_id=run_id))

    async def next_policy_version(self, run_id: str) -> int:
        """Allocate the number of the next publication of weights: 1, 2, 3 …, never given twice, not after a crash."""
        return await self.perform(calls.NextPolicyVersion(run_id=run_id))

    async def create_group(self, size: int, run_id: str | None = None, group_id: str | None = None) -> Group:
        """Declare a group of `size` rollouts, to be enqueued with its id and the indices 0 … size−1. Declaring a
        stored `group_id` again returns it; with another size or run it is a ConflictError."""
        return await self.perform(calls.CreateGroup(size=size, run_id=run_id, group_id=group_id))

    async def get_group(self, group_id: str) -> Group | None:
        return await self.perform(calls.GetGroup(group_id=group_id))

    async def complete_groups_after(
        self, run_id: str, cursor: int, limit: int = 100, timeout: float = 0.0
    ) -> list[Group]:
        """Groups of a run whose `finished_index` is above `cursor`, in that order: groups become complete when all
        their rollouts are terminal and are numbered then. Waits up to `timeout` seconds for the first."""
        return await self.perform(calls.CompleteGroupsAfter(run_id=run_id, cursor=cursor, limit=limit, timeout=timeout))

    # --- workers and the whole ---

    async def update_worker(self, worker_id: str, heartbeat_stats: Mapping[str, Any] | None = None) -> Worker:
        return await self.perform(calls.UpdateWorker(worker_id=worker_id, heartbeat_stats=_dict(heartbeat_stats)))

    async def issue_worker_key(self, worker_id: str) -> str:
        """An API key that stands for whatever attempt this worker holds at present; with none or several it is refused
        (HTTP 409)."""
        return await self.perform(calls.IssueWorkerKey(worker_id=worker_id))

    async def query_workers(self) -> list[Worker]:
        return await self.perform(calls.QueryWorkers())

    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        return next((worker for worker in await self.query_workers() if worker.worker_id == worker_id), None)

    async def statistics(self) -> dict[str, int]:
        """Counts: rollouts by status, attempts, spans, resources, runs, groups, workers."""
        return await self.perform(calls.Statistics())


def _request(
    input: Any,
    mode: Mode,
    resources_id: str | None,
    config: RolloutConfig | None,
    metadata: Mapping[str, Any] | None,
) -> EnqueueRolloutRequest:
    return EnqueueRolloutRequest(
        input=input,
        mode=mode,
        resources_id=resources_id,
        config=config or RolloutConfig(),
        metadata=dict(metadata or {}),
    )


def _dict(mapping: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if mapping is None else dict(mapping)
