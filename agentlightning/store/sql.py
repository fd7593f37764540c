"""The store in a SQL database: SQLite in a file or in memory, or PostgreSQL.

One thread writes, in groups that share a commit; others read; the event loop is never blocked.
Waiting callers are woken after the commit. This module handles waiting and clocks; rows are in
`rollouts`, `attempts`, `spans` and `records`, the state machine in `lifecycle`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeVar

import msgspec

from agentlightning.errors import (
    ConfigError,
    ConflictError,
    InvalidError,
    UnavailableError,
    imported,
)
from agentlightning.store import (
    attempts,
    keys,
    pages,
    records,
    retention,
    rollouts,
    spans,
    sqlite,
)
from agentlightning.store.availability import Availability
from agentlightning.store.base import LightningStore
from agentlightning.store.calls import Call, named
from agentlightning.store.database import (
    Changes,
    Connection,
    DatabaseThread,
    Opened,
    Readers,
    Transaction,
)
from agentlightning.store.prompts import Prompts, SpanRow
from agentlightning.store.redaction import Redact, redaction, text_without_secrets
from agentlightning.store.spans import Observer, SpanWriter, Stored, add_spans, prepared_spans
from agentlightning.store.sqlite import Synchronous
from agentlightning.store.waiters import Subscribers, Waiters, give_up, steady, woken_within
from agentlightning.types import (
    UNATTRIBUTED,
    And,
    ApiKey,
    Attempt,
    AttemptedRollout,
    Condition,
    Credential,
    Deleted,
    Filter,
    FinishedRollouts,
    Group,
    Rollout,
    Span,
)

T = TypeVar("T")

LEASE_SECONDS: Final = 30.0
READ_SECONDS: Final = 10.0
_RETRY_SECONDS: Final = 1.0
_FEW: Final = 8  # rows
_KNOWN: Final = 10_000  # attempts
_REMOVE_SECRETS: Final = redaction("full")
_log: Final = logging.getLogger(__name__)


def _by_name(*handlers: Callable[..., Any]) -> Mapping[str, Callable[..., Any]]:
    return {handler.__name__: handler for handler in handlers}


# What carries out the calls of the same name, with a transaction and their fields.
_WRITES: Final = _by_name(
    *(rollouts.enqueue_many_rollouts, rollouts.create_group),
    *(
        attempts.start_rollout,
        attempts.update_rollout,
        attempts.cancel_rollout,
        attempts.start_attempt,
    ),
    *(attempts.heartbeat, attempts.extend_attempts, spans.get_next_span_sequence_id),
    *(records.add_resources, records.start_run, records.update_run, records.next_policy_version),
    *(records.add_metrics, records.update_worker),
    *(records.issue_key, attempts.issue_attempt_key, attempts.issue_worker_key, records.revoke_key),
)
READS: Final = _by_name(
    *(pages.page_rollouts, pages.page_spans, rollouts.get_rollout_by_id, rollouts.get_group),
    *(attempts.query_attempts, attempts.get_latest_attempt, spans.query_spans, records.get_time),
    *(
        records.query_resources,
        records.get_latest_resources,
        records.get_resources_by_id,
        records.query_runs,
    ),
    *(records.query_metrics, records.query_workers, records.statistics),
    *(records.query_keys, rollouts.query_outcomes),
)
_LOOK_UPS: Final = {"get_rollout_by_id", "get_resources_by_id", "get_time"}
_SEARCHES: Final = {"page_rollouts", "page_spans", "statistics"}  # may have to look at every row


class SqlStore(LightningStore):
    """A durable store for this process and, through its server, for others. Create it with `open`,
    end it with `close`."""

    def __init__(
        self,
        address: str,
        opened: Opened,
        secret: bytes,
        clock: Callable[[], float],
        lease_seconds: float,
        redact: Redact,
        observer: Observer | None,
        read_seconds: float,
    ) -> None:
        self._address = address
        self._read_seconds = read_seconds
        self._opened = opened
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._redact = redact
        self._queued: Waiters[None] = Waiters()  # for rollouts
        self._finished: Waiters[None] = Waiters()
        self._complete: Waiters[None] = Waiters()  # for groups
        self._finishes: Waiters[set[str]] = Waiters()  # for all of these rollouts
        self._deadline = math.inf  # of the earliest clock that was set
        self._earlier = asyncio.Event()  # set when another clock runs out before that
        self._clocks = asyncio.Lock()  # held while nobody can be heard
        self._unheard_since: float | None = None  # as nothing could be written
        self._subscribers: Subscribers[Changes] = Subscribers()
        self._keys: dict[str, ApiKey] = {}  # issued keys that were shown to be valid, by secret
        self._latest: dict[str, Attempt] = {}  # by rollout
        self._announced = 0
        self._closed = False
        self._patience = 0.0
        self._secret = secret
        self.availability = Availability(
            text_without_secrets(address), lambda: self._writer.submit(records.try_to_write)
        )
        self._watchdog: asyncio.Task[None] | None = None
        self._others: Mapping[str, Callable[..., Awaitable[Any]]] = {
            "dequeue_many_rollouts": self._dequeue_many_rollouts,
            "wait_for_rollouts": self._wait_for_rollouts,
            "finished_after": self._finished_after,
            "complete_groups_after": self._complete_groups_after,
            "store_spans": SpanWriter(redact, self.store_rows, observer).store,
            "import_rollout": self._import_rollout,
            "update_attempt": self._update_attempt,
            "delete_rollouts": self._delete_rollouts,
            "delete_run": self._delete_run,
            "check_store": lambda: self._read(retention.check_store, "search", math.inf),
            "find_key": self._find_key,
            "get_latest_attempt": self._get_latest_attempt,
        }
        self._writer = DatabaseThread(
            *(opened.writing, "agl-store-writer", self._view),
            begin=opened.begin,
            before_commit=rollouts.number_finished,
            committed=self._announce,
            report=self._report,
        )
        kinds = {"reader": opened.reading, "search": opened.searching}
        self._readers = {
            kind: Readers(several, kind, self._view) for kind, several in kinds.items() if several
        }

    @classmethod
    async def open(
        cls,
        address: str | Path,
        *,
        synchronous: Synchronous = "FULL",
        clock: Callable[[], float] | None = None,
        lease_seconds: float = LEASE_SECONDS,
        redact: Redact = _REMOVE_SECRETS,
        observer: Observer | None = None,
        read_seconds: float = READ_SECONDS,
        patience: float = 0.0,
    ) -> SqlStore:
        """Open the store at `address`: a file, created if missing; `":memory:"`; or a
        `postgresql://` URL.

        `synchronous="FULL"` survives a power cut, `"NORMAL"` only the death of the process.
        Attempts that were active when the store closed get `lease_seconds` of grace. `redact` gets
        every span before it is written; make it with `redaction`. `observer` gets the spans that
        this process adds, in the event loop, perhaps twice. A query longer than `read_seconds` is
        an InvalidError. While the database cannot be written, calls are repeated for `patience`
        seconds, then raise UnavailableError. ConfigError if the file or database is not a store, is
        damaged, is in use by another process, or cannot be written; UnavailableError if the
        database cannot be reached."""
        if synchronous not in ("FULL", "NORMAL"):
            raise ConfigError(f"synchronous is {synchronous!r}; it must be 'FULL' or 'NORMAL'")
        database = database_of(address)
        address = absolute(address)
        opened = await asyncio.to_thread(database.open_store, address, synchronous, read_seconds)
        store = None
        clock = steady(opened.now) if clock is None else clock
        try:
            stored = "SELECT value FROM meta WHERE name = 'secret'"
            (secret,) = await asyncio.to_thread(lambda: opened.writing.execute(stored).fetchone())
            store = cls(
                address, opened, bytes(secret), clock, lease_seconds, redact, observer, read_seconds
            )
            store._patience = patience
            await store._writer.submit(attempts.grant_grace)
            await store.expire_overdue()
        except BaseException:
            await (asyncio.to_thread(opened.release) if store is None else store.close())
            raise
        store._watchdog = asyncio.create_task(store._watch(), name="agl-store-watchdog")
        store._watchdog.add_done_callback(_report_defect)
        return store

    @property
    def address(self) -> str:
        """The path, `:memory:` or URL that it was opened with."""
        return self._address

    async def close(self) -> None:
        """Finish pending writes and close the database. Waiting callers get an UnavailableError."""
        if self._watchdog is not None:
            self._watchdog.cancel()
            await asyncio.wait([self._watchdog])
        self._closed = True
        self.availability.close()
        for readers in self._readers.values():
            await readers.close()
        await self._writer.close()
        # Woken, they look again, and get the error that the store is closed.
        for waiters in (self._finishes, self._queued, self._finished, self._complete):
            waiters.wake()
        await asyncio.to_thread(self._opened.release)

    async def perform(self, call: Call) -> Any:
        give_up = time.monotonic() + self._patience
        if self._patience:
            call = named(call)
        while True:
            try:
                return await self._perform(call)
            except UnavailableError:
                self.away_at = time.monotonic()
                if self._closed or time.monotonic() >= give_up or not call.repeatable():
                    raise
            await asyncio.sleep(_RETRY_SECONDS)

    async def _perform(self, call: Call) -> Any:
        name = call.method
        asked = msgspec.structs.asdict(call)
        if name in self._others:
            return await self._others[name](**asked)
        if name in _WRITES:
            write = _WRITES[name]
            return await self._writer.submit(lambda tx: write(tx, **asked))
        read = READS[name]
        if name in _LOOK_UPS:
            return await self._look_up(lambda tx: read(tx, **asked))
        return await self._read(
            lambda tx: read(tx, **asked), "search" if name in _SEARCHES else "reader"
        )

    def events(self) -> AbstractContextManager[asyncio.Queue[Changes | None]]:
        """The changes of commits, as they happen; None if some were missed. For a `with`
        statement."""
        return self._subscribers.subscribe()

    def _read(
        self,
        operation: Callable[[Transaction], T],
        kind: str = "reader",
        seconds: float | None = None,
    ) -> asyncio.Future[T]:
        readers = self._readers.get(kind) or self._readers.get("reader") or self._writer
        limit = self._read_seconds if seconds is None else seconds
        return readers.submit(operation, seconds=limit)

    async def _look_up(self, operation: Callable[[Transaction], T], rows: int = 1) -> T:
        """Read rows by id: a few at once, without a thread."""
        connection = self._opened.at_hand
        if connection is not None and not self._closed and rows <= _FEW:
            try:
                return operation(self._view(connection))
            except Exception as error:
                if connection.trouble(error) is None:
                    raise
        return await self._read(operation)

    def _view(self, connection: Connection) -> Transaction:
        return Transaction(connection, self._clock(), self._lease_seconds, self._secret)

    def _announce(self, changes: Changes) -> None:
        """Drop cached values that changed, and wake callers that wait for the change."""
        self._announced += 1
        if changes.keys:
            self._keys = {}
        for rollout_id in (*changes.touched, *changes.removed):
            self._latest.pop(rollout_id, None)
        self._queued.wake(most=changes.queued)
        if changes.finished:
            self._finished.wake()
            finished = set(changes.finished)

            def was_last(wants: set[str]) -> bool:
                wants -= finished
                return not wants

            self._finishes.wake(was_last)
        # they cannot finish any more: their waiters look again, and get NotFoundError
        if changes.removed:
            self._finishes.wake(lambda wants: not wants.isdisjoint(changes.removed))
        if changes.runs_with_groups:
            self._complete.wake()
        self._look_again_at(changes.deadline)
        self._subscribers.publish(changes)

    def _report(self, error: Exception | None, seconds: float) -> None:
        self.availability.report(error, seconds)
        if error is None and self._unheard_since is not None:
            self._look_again_at(self._clock())
        elif isinstance(error, UnavailableError) and self._unheard_since is None:
            self._unheard_since = self._clock() - seconds

    async def expire_overdue(self) -> int:
        """End the attempts whose time has run out, and return how many. The store does this itself,
        on time; after a time in which it could not be written, active attempts first get that time
        back, and a lease."""
        async with self._clocks:
            since = self._unheard_since
            ended = await self._writer.submit(lambda tx: attempts.expire(tx, since))
            if since is not None:
                self._unheard_since = None
            return ended

    async def _watch(self) -> None:
        while True:
            self._earlier.clear()
            with contextlib.suppress(TimeoutError):
                limit = (
                    None if math.isinf(self._deadline) else max(0.0, self._deadline - self._clock())
                )
                await asyncio.wait_for(self._earlier.wait(), limit)
                continue
            self._deadline = math.inf
            try:
                await self.expire_overdue()
            except UnavailableError:  # which the log says once
                self._look_again_at(self._clock() + _RETRY_SECONDS)

    def _look_again_at(self, when: float) -> None:
        if when < self._deadline:
            self._deadline = when
            self._earlier.set()

    async def _dequeue_many_rollouts(
        self, limit: int, timeout: float, **asked: Any
    ) -> list[AttemptedRollout]:
        if limit < 1:
            raise InvalidError(f"limit is {limit}; it must be at least 1")
        until = give_up(timeout)
        while True:
            with self._queued.waiting(None) as waiter:
                again = False
                try:
                    leased = await self._lease(limit=limit, **asked)
                    again = not leased and await woken_within(waiter, until - time.monotonic())
                    if not again:
                        return leased
                finally:
                    # what it was woken for is still there, for another
                    if waiter.done() and not again:
                        self._queued.wake(most=1)

    async def _lease(self, **asked: Any) -> list[AttemptedRollout]:
        leasing = self._writer.submit(lambda tx: attempts.lease(tx, **asked))
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
            self._writer.submit(lambda tx: attempts.withdraw(tx, leasing.result()))

    async def _wait_for_rollouts(
        self, rollout_ids: Sequence[str], timeout: float | None
    ) -> list[Rollout]:
        until = give_up(timeout)
        rollout_ids = list(dict.fromkeys(rollout_ids))
        while True:
            wants = set(rollout_ids)
            with self._finishes.waiting(wants) as waiter:
                finished = await self._look_up(
                    lambda tx: rollouts.terminal_among(tx, rollout_ids), len(rollout_ids)
                )
                wants.difference_update(rollout.rollout_id for rollout in finished)
                remaining = until - time.monotonic()
                if len(finished) == len(rollout_ids) or remaining <= 0:
                    return finished
                await woken_within(waiter, remaining)

    async def _finished_after(
        self, cursor: int, limit: int, timeout: float, run_id: str | None
    ) -> FinishedRollouts:
        until = give_up(timeout)
        while True:
            with self._finished.waiting(None) as waiter:
                page = await self._read(
                    lambda tx, cursor=cursor: rollouts.finished_after(tx, cursor, limit, run_id)
                )
                if page.rollouts or not await woken_within(waiter, until - time.monotonic()):
                    return page
                cursor = page.cursor

    async def _complete_groups_after(
        self, run_id: str, cursor: int, limit: int, timeout: float
    ) -> list[Group]:
        until = give_up(timeout)
        while True:
            with self._complete.waiting(None) as waiter:
                groups = await self._read(
                    lambda tx: rollouts.complete_groups_after(tx, run_id, cursor, limit)
                )
                if groups or not await woken_within(waiter, until - time.monotonic()):
                    return groups

    async def store_rows(self, rows: Sequence[SpanRow]) -> list[Stored]:
        """Store spans that a `SpanWriter` has redacted, here or in another process of this
        server."""
        return await self._writer.submit(lambda tx: add_spans(tx, rows))

    async def _import_rollout(
        self, rollout: Rollout, attempts: Sequence[Attempt], spans: Sequence[Span]
    ) -> bool:
        # Beside unattributed spans that are here already, none is the base of another.
        whole = rollout.rollout_id == UNATTRIBUTED
        rows = [
            entry.row for entry in await prepared_spans(spans, Prompts(), self._redact, whole=whole)
        ]
        return await self._writer.submit(
            lambda tx: retention.import_rollout(tx, self._redact, rollout, attempts, rows)
        )

    async def _update_attempt(self, **asked: Any) -> Attempt:
        return await self._writer.submit(
            lambda tx: attempts.update_attempt(tx, self._redact, **asked)
        )

    async def _get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        """Cached, since the gateway asks before every call of an agent."""
        found = None if self._closed else self._latest.get(rollout_id)
        if found is None:
            announced = self._announced
            found = await self._look_up(lambda tx: attempts.get_latest_attempt(tx, rollout_id))
            if found is not None and announced == self._announced:
                if len(self._latest) >= _KNOWN:
                    self._latest.clear()
                self._latest[rollout_id] = found
        return found

    async def _find_key(self, api_key: str) -> Credential | None:
        holder = keys.verify(self._secret, api_key)
        if holder is not None:
            attempt = (holder.rollout_id, holder.attempt_id)
            return Credential(
                name=f"attempt {holder.attempt_id}", attempt=attempt, rewards=holder.rewards
            )
        worker_id = keys.verify_worker(self._secret, api_key)
        if worker_id is not None:
            return await self._find_worker(worker_id)
        if not api_key.startswith(records.KEY_PREFIX):
            return None
        # another dict from the moment a key is revoked, also while this key is being looked up
        valid = self._keys
        key = valid.get(api_key)
        if key is None:
            key = await self._look_up(lambda tx: records.find_key(tx.connection, api_key))
        if key is None or key.revoke_time is not None:
            return None
        if key.expire_time is not None and key.expire_time <= self._clock():
            return None
        valid[api_key] = key
        return Credential(name=key.key_id, scopes=key.scopes)

    async def _find_worker(self, worker_id: str) -> Credential:
        held = await self._read(lambda tx: attempts.held_by(tx.connection, worker_id))
        if len(held) == 1:
            return Credential(name=f"worker {worker_id}", worker_id=worker_id, attempt=held[0])
        hint = (
            "a worker whose key is used leases one rollout at a time"
            if held
            else "call during a rollout only"
        )
        raise ConflictError(
            f"the key is for the attempt of worker {worker_id}, which holds {len(held) or 'none'} "
            f"at present; {hint}"
        )

    async def _delete_rollouts(self, where: Filter, unfinished: bool, scrub: bool) -> Deleted:
        deleted = Deleted()
        after = 0
        while True:
            # Looked for by a reader, as it may take long, and looked at again by the writer.
            search = self._read(
                lambda tx, after=after: retention.find(tx, where, unfinished, after),
                "search",
                math.inf,
            )
            numbers: Sequence[int] = await search
            if not numbers:
                break
            after = numbers[-1]
            matching = where
            if unfinished:
                numbers = await self._writer.submit(
                    lambda tx, some=numbers: retention.cancel_active(tx, where, some)
                )
                matching = And([])  # those that were cancelled for it matched before
            while numbers:
                work = self._writer.submit(
                    lambda tx, of=matching, some=numbers: retention.delete_some(tx, of, some)
                )
                part, numbers = await work
                deleted = retention.summed(deleted, part)
        if scrub:
            await self._scrub()
        return deleted

    async def _delete_run(self, run_id: str) -> Deleted:
        await self._read(lambda tx: records.check_ended(tx, run_id))
        deleted = await self._delete_rollouts(
            Condition("run_id", "eq", run_id), unfinished=True, scrub=False
        )
        await self._writer.submit(lambda tx: records.delete_run(tx, run_id))
        return deleted

    async def _scrub(self) -> None:
        """Leave no trace of deleted rows. While a file is rewritten, calls wait and clocks stand
        still."""
        began = self._clock()
        anew = self._opened.writing.dialect == "sqlite"
        try:
            async with self._clocks if anew else contextlib.nullcontext():
                try:
                    await asyncio.to_thread(self._opened.clean_up)
                finally:  # also where it fails at the end
                    if anew:
                        await self._writer.submit(lambda tx: attempts.go_on_after(tx, began))
        except UnavailableError as error:
            raise UnavailableError(
                "what matched was removed, but traces of it are left in the database's files: "
                f"{error}. Ask again later"
            ) from None


def absolute(address: str | Path) -> str:
    """The address; a file's does not depend on the working directory, which agents may change."""
    text = str(address)
    return text if "://" in text or text == ":memory:" else str(Path(text).absolute())


def database_of(address: str | Path) -> ModuleType:
    """`store.sqlite` or `store.postgres`, by the address. ConfigError for any other."""
    if str(address).startswith(("postgresql://", "postgres://")):
        return imported(
            "agentlightning.store.postgres",
            "a store in PostgreSQL",
            "agent-lightning-next[postgres]",
        )
    if "://" in str(address):  # a path would lose a slash, and become a directory of that name
        raise ConfigError(
            f"{text_without_secrets(str(address))!r} is no store; give a path (SQLite) or a "
            "postgresql:// URL"
        )
    return sqlite


def _report_defect(watchdog: asyncio.Task[None]) -> None:
    if not watchdog.cancelled() and watchdog.exception() is not None:
        _log.critical(
            "the watchdog of the store has died; leases no longer run out",
            exc_info=watchdog.exception(),
        )
