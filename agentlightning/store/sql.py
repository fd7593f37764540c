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
    UnavailableError,
    imported,
)
from agentlightning.store import (
    attempts,
    keys,
    records,
    retention,
    rollouts,
    sqlite,
    workers,
)
from agentlightning.store.availability import Availability
from agentlightning.store.base import LightningStore
from agentlightning.store.calls import StoreCall, named
from agentlightning.store.database import (
    Changes,
    Connection,
    DatabaseThread,
    Opened,
    Readers,
    Transaction,
)
from agentlightning.store.long_polls import WaitingCalls
from agentlightning.store.operations import LOOK_UPS, READS, SEARCHES, WRITES
from agentlightning.store.prompts import Prompts, SpanRow
from agentlightning.store.redaction import Redact, redaction, text_without_secrets
from agentlightning.store.spans import (
    Observer,
    SpanWriter,
    Stored,
    add_spans,
    end_attempt,
    prepared_spans,
)
from agentlightning.store.sqlite import Synchronous
from agentlightning.store.waiters import Subscribers, steady
from agentlightning.types import (
    UNATTRIBUTED,
    And,
    ApiKey,
    Attempt,
    Condition,
    Credential,
    Deleted,
    Filter,
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
        self._span_writer = SpanWriter(redact, self.store_rows, observer)
        self._writer = DatabaseThread(
            *(opened.writing, "agl-store-writer", self._view),
            begin=opened.begin,
            before_commit=rollouts.number_finished,
            committed=self._announce,
            report=self._report,
        )
        self._waiting = WaitingCalls(self._read, self._look_up, self._writer.submit)
        self._others: Mapping[str, Callable[..., Awaitable[Any]]] = {
            "dequeue_many_rollouts": self._waiting.dequeue_many_rollouts,
            "wait_for_rollouts": self._waiting.wait_for_rollouts,
            "finished_after": self._waiting.finished_after,
            "complete_groups_after": self._waiting.complete_groups_after,
            "store_spans": self._span_writer.store,
            "end_attempt": self._end_attempt,
            "import_rollout": self._import_rollout,
            "update_attempt": self._update_attempt,
            "delete_rollouts": self._delete_rollouts,
            "delete_run": self._delete_run,
            "check_store": lambda: self._read(retention.check_store, "search", math.inf),
            "find_key": self._find_key,
            "get_latest_attempt": self._get_latest_attempt,
        }
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
        self._waiting.wake_all()  # they look again, and get the error that the store is closed
        await asyncio.to_thread(self._opened.release)

    async def perform(self, call: StoreCall) -> Any:
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

    async def _perform(self, call: StoreCall) -> Any:
        name = call.method
        asked = msgspec.structs.asdict(call)
        if name in self._others:
            return await self._others[name](**asked)
        if name in WRITES:
            write = WRITES[name]
            return await self._writer.submit(lambda tx: write(tx, **asked))
        read = READS[name]
        if name in LOOK_UPS:
            return await self._look_up(lambda tx: read(tx, **asked))
        return await self._read(
            lambda tx: read(tx, **asked), "search" if name in SEARCHES else "reader"
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
        self._waiting.wake(changes)
        self._expire_by(changes.deadline)
        self._subscribers.publish(changes)

    def _report(self, error: Exception | None, seconds: float) -> None:
        self.availability.report(error, seconds)
        if error is None and self._unheard_since is not None:
            self._expire_by(self._clock())
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
                self._expire_by(self._clock() + _RETRY_SECONDS)

    def _expire_by(self, when: float) -> None:
        if when < self._deadline:
            self._deadline = when
            self._earlier.set()

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

    async def _end_attempt(self, spans: Sequence[Span], **asked: Any) -> list[int]:
        async def end(rows: Sequence[SpanRow]) -> list[Stored]:
            return await self._writer.submit(
                lambda tx: end_attempt(tx, self._redact, rows, **asked)
            )

        return await self._span_writer.store(spans, end)

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
            return await self._read(lambda tx: workers.find_worker(tx, worker_id))
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
