"""The store in a SQL database: SQLite in a file or in memory.

One thread writes, in groups that share a commit; another reads; the event loop is never blocked. Callers that wait
are woken after the commit they wait for. This module knows who waits and when clocks run out; rows are the business
of `rollouts` and `records`, and what may follow what that of `lifecycle`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from agentlightning.errors import ConfigError, InvalidError, UnavailableError
from agentlightning.store import attempts, codec, keys, records, rollouts, schema
from agentlightning.store.base import LightningStore
from agentlightning.store.database import DatabaseThread
from agentlightning.store.snapshots import Snapshots
from agentlightning.store.transaction import Changes, Transaction
from agentlightning.store.waiting import Alarm, FinishWaiters, Signal
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

T = TypeVar("T")

LEASE_SECONDS: Final = 30.0
_RETRY_SECONDS: Final = 1.0
_log: Final = logging.getLogger(__name__)


class SqlStore(LightningStore):
    """A durable store for this process and, through its server, for others. Made by `open`, ended by `close`."""

    def __init__(
        self,
        writer: DatabaseThread,
        reader: DatabaseThread,
        secret: bytes,
        clock: Callable[[], float],
        lease_seconds: float,
        owner: sqlite3.Connection | None,
    ) -> None:
        self._writer = writer
        self._reader = reader
        self._secret = secret
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._owner = owner
        self._queued = Signal()
        self._groups: dict[str, Signal] = {}
        self._finishes = FinishWaiters()
        self._alarm = Alarm()
        self._rollout_rows = Snapshots()
        self._attempt_rows = Snapshots()  # the latest attempt of a rollout
        self._watchdog: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        path: str | Path,
        *,
        synchronous: schema.Synchronous = "FULL",
        clock: Callable[[], float] = time.time,
        lease_seconds: float = LEASE_SECONDS,
    ) -> SqlStore:
        """Open the store in the file `path`, creating it where there is none, or one in memory for `":memory:"`.

        `synchronous="FULL"` survives a power cut, `"NORMAL"` only the death of the process. Attempts that were active
        when the store was closed get `lease_seconds` of grace. ConfigError if the file is not a store, is damaged, in
        use by another process, or cannot be written."""
        if synchronous not in ("FULL", "NORMAL"):
            raise ConfigError(f"synchronous is {synchronous!r}; it must be 'FULL' or 'NORMAL'")
        if not lease_seconds > 0:
            raise ConfigError(f"lease_seconds is {lease_seconds}; it must be positive")
        if str(path) == ":memory:":
            owner, connection = None, schema.connect_memory()
            secret = _read_secret(connection)
            writer = reader = DatabaseThread(connection, "agl-store")
        else:
            owner, connection, reading = await asyncio.to_thread(_open_file, Path(path), synchronous)
            secret = _read_secret(connection)
            writer = DatabaseThread(connection, "agl-store-writer")
            reader = DatabaseThread(reading, "agl-store-reader", begin="BEGIN")
        store = cls(writer, reader, secret, clock, lease_seconds, owner)
        await store._write(attempts.grant_grace)
        await store.expire_overdue()
        store._watchdog = asyncio.create_task(store._watch(), name="agl-store-watchdog")
        store._watchdog.add_done_callback(_report_defect)
        return store

    async def close(self) -> None:
        """Finish what was handed over and close the file; whoever waits gets an UnavailableError. Calling it again is
        harmless."""
        if self._watchdog is not None:
            self._watchdog.cancel()
            await asyncio.wait([self._watchdog])
        await self._reader.close()
        await self._writer.close()
        # Woken, they look again, and are told that the store is closed.
        self._finishes.wake_all()
        for signal in (self._queued, *self._groups.values()):
            signal.raise_()
        if self._owner is not None:
            self._owner.close()

    # --- transactions ---

    async def _read(self, operation: Callable[[sqlite3.Connection], T]) -> T:
        return await self._reader.submit(operation)

    def _write(self, operation: Callable[[Transaction], T]) -> asyncio.Future[T]:
        changes = Changes()

        def run(connection: sqlite3.Connection) -> T:
            return operation(Transaction(connection, self._clock(), self._lease_seconds, changes))

        return self._writer.submit(run, lambda: self._announce(changes))

    def _announce(self, changes: Changes) -> None:
        """Forget what has just been changed, and wake whoever waits for it."""
        self._rollout_rows.forget(changes.touched)
        self._attempt_rows.forget(changes.touched)
        if changes.queued:
            self._queued.raise_()
        self._finishes.finished(changes.finished)
        for run_id in changes.runs_with_groups:
            if run_id in self._groups:
                self._groups[run_id].raise_()
        self._alarm.set(changes.deadline)

    # --- the watchdog ---

    async def expire_overdue(self) -> int:
        """End the attempts whose clock has run out and return how many did; the store does this by itself, on time."""
        return await self._write(attempts.expire)

    async def _watch(self) -> None:
        while True:
            if not await self._alarm.sleep(self._clock()):
                continue
            try:
                await self.expire_overdue()
            except UnavailableError as error:
                _log.error("the clocks of attempts could not be looked at, trying again: %s", error)
                self._alarm.set(self._clock() + _RETRY_SECONDS)

    # --- rollouts ---

    async def enqueue_many_rollouts(self, requests: Sequence[EnqueueRolloutRequest]) -> list[Rollout]:
        requests = list(requests)
        return await self._write(lambda tx: rollouts.enqueue(tx, requests))

    async def start_rollout(
        self,
        input: Any,
        mode: Mode = "train",
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        worker_id: str | None = None,
    ) -> AttemptedRollout:
        request = EnqueueRolloutRequest(
            input=input,
            mode=mode,
            resources_id=resources_id,
            config=config or RolloutConfig(),
            metadata=dict(metadata or {}),
        )

        def start(tx: Transaction) -> AttemptedRollout:
            if worker_id is not None:
                records.touch_worker(tx, worker_id, None)
            return attempts.start_rollout(tx, request, worker_id)

        return self._with_key(await self._write(start))

    async def dequeue_many_rollouts(
        self, limit: int = 1, worker_id: str | None = None, timeout: float = 0.0
    ) -> list[AttemptedRollout]:
        if limit < 1:
            raise InvalidError(f"limit is {limit}; it must be at least 1")
        _check_timeout(timeout)
        loop = asyncio.get_running_loop()
        give_up = loop.time() + timeout
        while True:
            mark = self._queued.mark()
            leased = await self._lease(limit, worker_id)
            if leased:
                return [self._with_key(rollout) for rollout in leased]
            remaining = give_up - loop.time()
            if remaining <= 0 or not await self._queued.wait(mark, remaining):
                return []

    async def _lease(self, limit: int, worker_id: str | None) -> list[AttemptedRollout]:
        def lease(tx: Transaction) -> list[AttemptedRollout]:
            if worker_id is not None:
                records.touch_worker(tx, worker_id, None)
            return attempts.lease(tx, limit, worker_id)

        leasing = self._write(lease)
        try:
            return await asyncio.shield(leasing)
        except asyncio.CancelledError:
            # Whoever asked is gone and will never hear of these leases: put the rollouts back.
            leasing.add_done_callback(self._withdraw)
            raise

    def _withdraw(self, leasing: asyncio.Future[list[AttemptedRollout]]) -> None:
        if leasing.cancelled() or leasing.exception() is not None or not leasing.result():
            return
        with contextlib.suppress(UnavailableError):  # closed meanwhile: the leases run out instead
            self._write(lambda tx: attempts.withdraw(tx, leasing.result()))

    def _with_key(self, rollout: AttemptedRollout) -> AttemptedRollout:
        api_key = keys.sign(self._secret, rollout.rollout_id, rollout.attempt.attempt_id)
        return msgspec.structs.replace(rollout, api_key=api_key)

    async def start_attempt(self, rollout_id: str, worker_id: str | None = None) -> AttemptedRollout:
        def start(tx: Transaction) -> AttemptedRollout:
            if worker_id is not None:
                records.touch_worker(tx, worker_id, None)
            return attempts.start_attempt(tx, rollout_id, worker_id)

        return self._with_key(await self._write(start))

    async def cancel_rollout(self, rollout_id: str) -> Rollout:
        return await self._write(lambda tx: attempts.cancel_rollout(tx, rollout_id))

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
        equal = {"run_id": run_id, "group_id": group_id}
        one_of = {"rollout_id": rollout_id_in, "status": status_in, "mode": mode_in}
        return await self._read(lambda connection: rollouts.query(connection, equal, one_of, limit, offset))

    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        row = await self._rollout_rows.get(
            rollout_id, lambda: self._read(lambda connection: rollouts.rollout_row(connection, rollout_id))
        )
        return None if row is None else rollouts.rollout_from_row(row)

    async def update_rollout(
        self,
        rollout_id: str,
        *,
        status: RolloutStatus | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Rollout:
        return await self._write(lambda tx: attempts.update_rollout(tx, rollout_id, status, metadata))

    async def wait_for_rollouts(self, rollout_ids: Sequence[str], timeout: float | None = None) -> list[Rollout]:
        _check_timeout(timeout)
        rollout_ids = list(dict.fromkeys(rollout_ids))
        with self._finishes.expect(rollout_ids) as countdown:
            # Watched before it is looked at: nothing can finish unseen in between.
            terminal = await self._read(lambda connection: rollouts.terminal_among(connection, rollout_ids))
            for rollout in terminal:
                countdown.done(rollout.rollout_id)
            if len(terminal) == len(rollout_ids):
                return terminal
            await countdown.wait(timeout)
        return await self._read(lambda connection: rollouts.terminal_among(connection, rollout_ids))

    # --- attempts ---

    async def query_attempts(self, rollout_id: str) -> list[Attempt]:
        return await self._read(lambda connection: attempts.query_attempts(connection, rollout_id))

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        row = await self._attempt_rows.get(
            rollout_id, lambda: self._read(lambda connection: attempts.latest_attempt_row(connection, rollout_id))
        )
        return None if row is None else attempts.attempt_from_row(row)

    async def update_attempt(
        self,
        rollout_id: str,
        attempt_id: str,
        *,
        status: AttemptStatus | None = None,
        metadata: Mapping[str, Any] | None = None,
        lease: int | None = None,
    ) -> Attempt:
        return await self._write(
            lambda tx: attempts.update_attempt(tx, rollout_id, attempt_id, status, metadata, lease)
        )

    async def heartbeat(self, rollout_id: str, attempt_id: str, lease: int) -> Heartbeat:
        return await self._write(lambda tx: attempts.heartbeat(tx, rollout_id, attempt_id, lease))

    # --- spans ---

    async def add_many_spans(self, spans: Sequence[Span]) -> list[Span]:
        spans = list(spans)
        columns = [codec.span_columns(span) for span in spans]
        return await self._write(lambda tx: records.add_spans(tx, spans, columns))

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        return await self._write(lambda tx: records.next_span_sequence(tx, rollout_id, attempt_id))

    async def query_spans(self, rollout_id: str, attempt_id: str | None = None) -> list[Span]:
        return await self._read(lambda connection: records.query_spans(connection, rollout_id, attempt_id))

    # --- resources ---

    async def add_resources(
        self, resources: NamedResources, metadata: Mapping[str, Any] | None = None
    ) -> ResourcesUpdate:
        return await self._write(lambda tx: records.add_resources(tx, resources, metadata or {}, None))

    async def update_resources(self, resources_id: str, resources: NamedResources) -> ResourcesUpdate:
        return await self._write(lambda tx: records.add_resources(tx, resources, {}, resources_id))

    async def query_resources(self) -> list[ResourcesUpdate]:
        return await self._read(records.query_resources)

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        return await self._read(lambda connection: records.get_resources(connection, resources_id))

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        return await self._read(records.latest_resources)

    # --- runs and groups ---

    async def start_run(self, kind: str, manifest: Mapping[str, Any], run_id: str | None = None) -> Run:
        return await self._write(lambda tx: records.start_run(tx, kind, manifest, run_id))

    async def update_run(self, run_id: str, status: RunStatus) -> Run:
        return await self._write(lambda tx: records.update_run(tx, run_id, status))

    async def query_runs(self) -> list[Run]:
        return await self._read(records.query_runs)

    async def add_metrics(self, metrics: Metrics) -> None:
        await self._write(lambda tx: records.add_metrics(tx, metrics))

    async def query_metrics(self, run_id: str) -> list[Metrics]:
        return await self._read(lambda connection: records.query_metrics(connection, run_id))

    async def next_policy_version(self, run_id: str) -> int:
        return await self._write(lambda tx: records.next_policy_version(tx, run_id))

    async def create_group(self, size: int, run_id: str | None = None, group_id: str | None = None) -> Group:
        return await self._write(lambda tx: rollouts.create_group(tx, size, run_id, group_id))

    async def get_group(self, group_id: str) -> Group | None:
        return await self._read(lambda connection: rollouts.get_group(connection, group_id))

    async def complete_groups_after(
        self, run_id: str, cursor: int, limit: int = 100, timeout: float = 0.0
    ) -> list[Group]:
        _check_timeout(timeout)
        if limit < 1:
            raise InvalidError(f"limit is {limit}; it must be at least 1")
        loop = asyncio.get_running_loop()
        give_up = loop.time() + timeout
        signal = self._groups.setdefault(run_id, Signal())
        while True:
            mark = signal.mark()
            groups = await self._read(lambda connection: rollouts.complete_groups(connection, run_id, cursor, limit))
            remaining = give_up - loop.time()
            if groups or remaining <= 0 or not await signal.wait(mark, remaining):
                return groups

    # --- workers and the whole ---

    async def update_worker(self, worker_id: str, heartbeat_stats: Mapping[str, Any] | None = None) -> Worker:
        def update(tx: Transaction) -> Worker:
            records.touch_worker(tx, worker_id, heartbeat_stats)
            return records.query_workers(tx.connection, tx.now, tx.lease_seconds, worker_id)[0]

        return await self._write(update)

    async def query_workers(self) -> list[Worker]:
        now = self._clock()
        return await self._read(lambda connection: records.query_workers(connection, now, self._lease_seconds))

    async def statistics(self) -> dict[str, int]:
        return await self._read(records.statistics)

    async def verify_api_key(self, api_key: str) -> tuple[str, str] | None:
        return keys.verify(self._secret, api_key)


def _check_timeout(timeout: float | None) -> None:
    if timeout is not None and math.isnan(timeout):
        raise InvalidError("timeout is not a number; give the seconds to wait")


def _report_defect(watchdog: asyncio.Task[None]) -> None:
    if not watchdog.cancelled() and watchdog.exception() is not None:
        _log.critical("the watchdog of the store has died; leases no longer run out", exc_info=watchdog.exception())


def _open_file(
    path: Path, synchronous: schema.Synchronous
) -> tuple[sqlite3.Connection, sqlite3.Connection, sqlite3.Connection]:
    """The claim on the file, a connection to write and one to read."""
    schema.check_file(path)
    owner = schema.own(path)
    try:
        schema.create_file(path)
        writing = schema.connect(path, synchronous)
        return owner, writing, schema.connect(path, synchronous, read_only=True)
    except BaseException:
        owner.close()
        raise


def _read_secret(connection: sqlite3.Connection) -> bytes:
    return connection.execute("SELECT value FROM meta WHERE name = 'secret'").fetchone()[0]
