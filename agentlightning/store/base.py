"""What a store is: one async interface, the same in process (`store.sql`) and over HTTP (`store.client`).

The interface knows rollouts, attempts, spans, resources, runs and groups. It does not know HTTP, tokens' meaning or
any algorithm. Errors are `NotFoundError`, `ConflictError`, `InvalidError` and `UnavailableError`; a call that raises
has changed nothing. What is returned is an immutable snapshot.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

from agentlightning.types import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    EnqueueRolloutRequest,
    Group,
    Heartbeat,
    Metrics,
    Mode,
    NamedResources,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    RolloutStatus,
    Run,
    RunStatus,
    Span,
    Worker,
)


class LightningStore(abc.ABC):
    """Durable rollouts, attempts, spans, resources, runs and groups. Acknowledged means committed."""

    # --- rollouts ---

    @abc.abstractmethod
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

    @abc.abstractmethod
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

    @abc.abstractmethod
    async def dequeue_many_rollouts(
        self, limit: int = 1, worker_id: str | None = None, timeout: float = 0.0
    ) -> list[AttemptedRollout]:
        """Lease up to `limit` queued rollouts, oldest first, each with a new attempt, a lease and an API key.

        With nothing queued, wait up to `timeout` seconds for work (a long poll), then return an empty list."""

    async def dequeue_rollout(self, worker_id: str | None = None, timeout: float = 0.0) -> AttemptedRollout | None:
        """Lease one rollout, or None when nothing came within `timeout` seconds."""
        leased = await self.dequeue_many_rollouts(1, worker_id, timeout)
        return leased[0] if leased else None

    @abc.abstractmethod
    async def start_attempt(self, rollout_id: str, worker_id: str | None = None) -> AttemptedRollout:
        """Start a further attempt on a rollout that is not terminal; the earlier attempt no longer moves it."""

    @abc.abstractmethod
    async def cancel_rollout(self, rollout_id: str) -> Rollout:
        """Cancel for good. A running attempt learns it from its next heartbeat and its LLM calls get 403."""

    @abc.abstractmethod
    async def query_rollouts(
        self,
        *,
        rollout_id_in: Sequence[str] | None = None,
        status_in: Sequence[RolloutStatus] | None = None,
        mode_in: Sequence[Mode] | None = None,
        run_id: str | None = None,
        group_id: str | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[Rollout]:
        """Rollouts that match every given filter, in the order they were enqueued."""

    @abc.abstractmethod
    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None: ...

    @abc.abstractmethod
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

    @abc.abstractmethod
    async def wait_for_rollouts(self, rollout_ids: Sequence[str], timeout: float | None = None) -> list[Rollout]:
        """The terminal ones among `rollout_ids`, in the order given: all of them, or those finished after `timeout`
        seconds (None: no limit)."""

    # --- attempts ---

    @abc.abstractmethod
    async def query_attempts(self, rollout_id: str) -> list[Attempt]:
        """All attempts of a rollout, first to last."""

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        attempts = await self.query_attempts(rollout_id)
        return attempts[-1] if attempts else None

    @abc.abstractmethod
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

    @abc.abstractmethod
    async def heartbeat(self, rollout_id: str, attempt_id: str, lease: int) -> Heartbeat:
        """Extend the lease of its owner; the answer says whether the attempt was cancelled or timed out meanwhile."""

    # --- spans ---

    @abc.abstractmethod
    async def add_many_spans(self, spans: Sequence[Span]) -> list[Span]:
        """Store spans, all or none, and return them as they are stored. A span whose (attempt_id, span_id) is stored
        already is not stored again. One with `sequence_id=0` gets the attempt's next. The first span of an attempt
        moves it from preparing to running. Spans of ended attempts are kept. Numbers must be finite: an attribute
        that is not is an InvalidError."""

    async def add_span(self, span: Span) -> Span:
        return (await self.add_many_spans([span]))[0]

    @abc.abstractmethod
    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        """A number larger than any given out for this attempt before, starting at 1."""

    @abc.abstractmethod
    async def query_spans(self, rollout_id: str, attempt_id: str | None = None) -> list[Span]:
        """Spans of one attempt, or of all, ordered by start time, then sequence id. `attempt_id="latest"` picks the
        last attempt."""

    # --- resources ---

    @abc.abstractmethod
    async def add_resources(
        self, resources: NamedResources, metadata: Mapping[str, Any] | None = None
    ) -> ResourcesUpdate:
        """Store a new immutable version; it becomes the latest."""

    @abc.abstractmethod
    async def update_resources(self, resources_id: str, resources: NamedResources) -> ResourcesUpdate:
        """Store resources under an id of the caller's choice; an id once used with other content is a
        ConflictError, since versions are immutable."""

    @abc.abstractmethod
    async def query_resources(self) -> list[ResourcesUpdate]: ...

    @abc.abstractmethod
    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None: ...

    @abc.abstractmethod
    async def get_latest_resources(self) -> ResourcesUpdate | None: ...

    # --- runs and groups ---

    @abc.abstractmethod
    async def start_run(self, kind: str, manifest: Mapping[str, Any], run_id: str | None = None) -> Run:
        """Record a new run, or return the stored one of that id (a resumed run) set back to running."""

    @abc.abstractmethod
    async def update_run(self, run_id: str, status: RunStatus) -> Run: ...

    @abc.abstractmethod
    async def query_runs(self) -> list[Run]: ...

    @abc.abstractmethod
    async def add_metrics(self, metrics: Metrics) -> None:
        """Record (or replace) what a run measured at one step. Values must be finite."""

    @abc.abstractmethod
    async def query_metrics(self, run_id: str) -> list[Metrics]:
        """All metrics of a run by step."""

    @abc.abstractmethod
    async def next_policy_version(self, run_id: str) -> int:
        """Allocate the number of the next publication of weights: 1, 2, 3 …, never given twice, not after a crash."""

    @abc.abstractmethod
    async def create_group(self, size: int, run_id: str | None = None, group_id: str | None = None) -> Group:
        """Declare a group of `size` rollouts, to be enqueued with its id and the indices 0 … size−1. Declaring a
        stored `group_id` again returns it; with another size or run it is a ConflictError."""

    @abc.abstractmethod
    async def get_group(self, group_id: str) -> Group | None: ...

    @abc.abstractmethod
    async def complete_groups_after(
        self, run_id: str, cursor: int, limit: int = 100, timeout: float = 0.0
    ) -> list[Group]:
        """Groups of a run whose `finished_index` is above `cursor`, in that order: groups become complete when all
        their rollouts are terminal and are numbered then. Waits up to `timeout` seconds for the first."""

    # --- workers and the whole ---

    @abc.abstractmethod
    async def update_worker(self, worker_id: str, heartbeat_stats: Mapping[str, Any] | None = None) -> Worker: ...

    @abc.abstractmethod
    async def query_workers(self) -> list[Worker]: ...

    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        return next((worker for worker in await self.query_workers() if worker.worker_id == worker_id), None)

    @abc.abstractmethod
    async def statistics(self) -> dict[str, int]:
        """Counts: rollouts by status, attempts, spans, resources, runs, workers."""

    @abc.abstractmethod
    async def verify_api_key(self, api_key: str) -> tuple[str, str] | None:
        """(rollout_id, attempt_id) that a signed attempt key names, or None if it was not signed by this store."""

    @abc.abstractmethod
    async def close(self) -> None: ...
