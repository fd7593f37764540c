"""One database connection behind one thread, with group commit.

`submit` notes an operation and a future on the event loop. At the end of the loop's turn all noted
operations go to the thread together; those that arrive while a transaction is written share the
next one, and its fsync. The thread begins, runs each operation in a savepoint, so that a failed one
is undone alone, calls `before_commit` with their changes (the store numbers finished rollouts), and
commits. Back on the event loop, `committed` wakes the callers that wait for these changes, and each
caller gets its answer. If the connection is lost before the commit, all of it runs again.

This module does not know what operations do, nor which database it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, TypeAlias, TypeVar

import msgspec

from agentlightning.errors import ConfigError, ConflictError, InvalidError, UnavailableError

T = TypeVar("T")
Dialect: TypeAlias = Literal["sqlite", "postgres"]
FIND: Final[Mapping[Dialect, str]] = {"sqlite": "instr", "postgres": "strpos"}
Trouble: TypeAlias = Literal["conflict", "lost", "invalid", "overdue", "unavailable"]
"""What an error of a database means: something of that name is stored already; the connection is
gone, and with it the transaction; the values cannot be stored; the time for the query was over; the
database cannot be written."""

_TRIES: Final = 5
READERS: Final = 2
"""Connections of each kind to read with."""


class Cursor(Protocol):
    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...
    def __iter__(self) -> Iterator[Any]: ...


class Connection(Protocol):
    """A connection as operations see it. SQL has `?` for parameters in every dialect, and no other
    `?` or `%`."""

    dialect: Dialect

    @property
    def in_transaction(self) -> bool: ...
    def execute(self, sql: str, parameters: Sequence[Any] = ..., /) -> Cursor: ...
    def stream(self, sql: str, parameters: Sequence[Any] = ..., /) -> Iterator[Any]:
        """The rows of a SELECT, a few at a time in memory."""
        ...

    def limited(self, seconds: float) -> AbstractContextManager[None]:
        """Interrupt statements in the block after so many seconds; `math.inf`: never."""
        ...

    def commit(self) -> None:
        """Returns only if the transaction is stored; UnavailableError if that cannot be found
        out."""
        ...

    def close(self) -> None: ...
    def trouble(self, error: Exception) -> Trouble | None:
        """The meaning of `error` if it came from the database, else None."""
        ...

    def revive(self) -> None:
        """Connect again if the connection was lost; UnavailableError if that does not succeed for a
        while."""
        ...


class Changes(msgspec.Struct):
    """Changes that callers may be waiting for."""

    queued: int = 0  # rollouts
    finished: list[str] = []  # rollout ids
    groups: list[str] = []  # groups of which a member finished
    runs_with_groups: list[str] = []  # runs of which a group became complete
    touched: list[str] = []  # rollout ids that look different now
    spans: list[str] = []  # rollout ids that got spans
    removed: list[str] = []  # rollout ids that are no longer stored
    runs: list[str] = []  # runs that began, ended or measured something
    keys: bool = False  # a key was revoked
    deadline: float = math.inf  # the earliest clock that was set

    def set_deadline(self, when: float) -> None:
        self.deadline = min(self.deadline, when)

    @classmethod
    def merged(cls, several: Iterable[Changes]) -> Changes:
        whole = cls()
        for changes in several:
            whole.queued += changes.queued
            for name in (
                "finished",
                "groups",
                "runs_with_groups",
                "touched",
                "spans",
                "removed",
                "runs",
            ):
                getattr(whole, name).extend(getattr(changes, name))
            whole.keys = whole.keys or changes.keys
            whole.set_deadline(changes.deadline)
        return whole


@dataclass
class Transaction:
    """A transaction on the database at the time `now`."""

    connection: Connection
    now: float
    lease_seconds: float
    secret: bytes
    changes: Changes = field(default_factory=Changes)


Operation: TypeAlias = Callable[[Transaction], T]


@dataclass(frozen=True)
class _Job:
    operation: Operation[Any]
    future: asyncio.Future[Any]
    seconds: float | None


@dataclass(frozen=True)
class _JobResult:
    """The end of a job: its result and its changes, or the error it failed with."""

    job: _Job
    result: Any = None
    changes: Changes | None = None
    error: Exception | None = None


class DatabaseThread:
    """Runs operations on one connection, in the order they were handed over, away from the event
    loop.

    `view` makes the transaction that an operation gets. Threads that are given the same `jobs`
    share the work. `before_commit` is called at the end of each transaction, inside it, with the
    changes of the operations that succeeded; `committed` on the event loop after the commit, before
    anybody gets an answer; `report` with the error of each operation, None for all that were
    committed, and the seconds of the transaction."""

    def __init__(
        self,
        connection: Connection,
        name: str,
        view: Callable[[Connection], Transaction],
        *,
        begin: str = "BEGIN",
        largest_batch: int = 256,
        jobs: queue.SimpleQueue[list[_Job] | None] | None = None,
        before_commit: Callable[[Connection, Changes], None] = lambda connection, changes: None,
        committed: Callable[[Changes], None] = lambda changes: None,
        report: Callable[[Exception | None, float], None] = lambda error, seconds: None,
    ) -> None:
        self._connection = connection
        self._view = view
        self._begin = begin
        self._before_commit = before_commit
        self._committed = committed
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._largest_batch = largest_batch
        self._jobs = queue.SimpleQueue[list[_Job] | None]() if jobs is None else jobs
        self._gathering: list[_Job] = []
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, operation: Operation[T], seconds: float | None = None) -> asyncio.Future[T]:
        """Hand an operation over; the future is resolved after its transaction is committed. An
        operation that only reads may be limited to some `seconds`."""
        if self._closed:
            raise UnavailableError("the store is closed")
        if asyncio.get_running_loop() is not self._loop:
            raise ConfigError(
                "this store belongs to the event loop that opened it; from another loop or thread "
                "use a LightningStoreClient on its server"
            )
        future: asyncio.Future[T] = self._loop.create_future()
        if not self._gathering:
            # What one turn of the event loop brings is handed over together: waking a thread costs
            # more than most jobs.
            self._loop.call_soon(self._hand_over)
        self._gathering.append(_Job(operation, future, seconds))
        return future

    def _hand_over(self) -> None:
        gathered = self._gathering
        self._gathering = []
        for first in range(0, len(gathered), self._largest_batch):
            self._jobs.put(gathered[first : first + self._largest_batch])

    async def close(self) -> None:
        """Finish what was handed over, then close the connection."""
        if not self._closed:
            self._closed = True
            self._hand_over()
            self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def _work(self) -> None:
        open_for_work = True
        while open_for_work:
            batch: list[_Job] = []
            jobs = self._jobs.get()
            while jobs is not None:
                batch += jobs
                if len(batch) >= self._largest_batch:
                    break
                try:
                    jobs = self._jobs.get_nowait()
                except queue.Empty:
                    break
            else:
                open_for_work = False
            if batch:
                self._transact(batch, _TRIES)
        self._connection.close()

    def _transact(self, batch: list[_Job], tries: int) -> None:
        """Run a batch as one transaction and deliver its outcomes. If the connection was lost
        before the commit, the batch is tried again; for any other reason the whole batch fails."""
        outcomes: list[_JobResult] = []
        changes = Changes()
        began = time.monotonic()
        try:
            self._connection.revive()
            self._connection.execute(self._begin)
            if len(batch) == 1:
                outcomes.append(self._run(batch[0]))
            else:
                for job in batch:
                    outcomes.append(self._run_apart(job))
            changes = Changes.merged(
                outcome.changes for outcome in outcomes if outcome.changes is not None
            )
            self._before_commit(self._connection, changes)
            self._connection.commit()
        except Exception as error:  # noqa: BLE001 - every caller of the batch gets it
            trouble = self._connection.trouble(error)
            self._roll_back()
            if trouble == "lost" and tries > 1:
                self._transact(batch, tries - 1)
                return
            outcomes = [_JobResult(job, error=_typed(trouble, error, job.seconds)) for job in batch]
            changes = Changes()
        self._loop.call_soon_threadsafe(self._deliver, outcomes, changes, time.monotonic() - began)

    def _roll_back(self) -> None:
        # also MemoryError: the next BEGIN fails too, and is rolled back
        with contextlib.suppress(Exception):
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    def _run(self, job: _Job) -> _JobResult:
        tx = self._view(self._connection)
        limit = (
            contextlib.nullcontext()
            if job.seconds is None
            else self._connection.limited(job.seconds)
        )
        with limit:
            return _JobResult(job, job.operation(tx), tx.changes)

    def _run_apart(self, job: _Job) -> _JobResult:
        """Run a job so that it can fail without the others of its batch."""
        execute = self._connection.execute
        execute("SAVEPOINT operation")
        try:
            outcome = self._run(job)
            execute("RELEASE SAVEPOINT operation")
            return outcome
        except Exception as error:
            trouble = self._connection.trouble(error)
            if trouble == "lost" or (trouble is not None and not self._connection.in_transaction):
                raise
            outcome = _JobResult(job, error=_typed(trouble, error, job.seconds))
        execute("ROLLBACK TO SAVEPOINT operation")
        execute("RELEASE SAVEPOINT operation")
        return outcome

    def _deliver(self, outcomes: list[_JobResult], changes: Changes, seconds: float) -> None:
        self._committed(changes)
        if any(outcome.error is None for outcome in outcomes):
            self._report(None, seconds)
        for outcome in outcomes:
            if outcome.error is not None:
                self._report(outcome.error, seconds)
            if outcome.job.future.done():
                continue  # the caller was cancelled and no longer waits
            if outcome.error is None:
                outcome.job.future.set_result(outcome.result)
            else:
                outcome.job.future.set_exception(outcome.error)


def _typed(trouble: Trouble | None, error: Exception, seconds: float | None) -> Exception:
    if isinstance(error, OverflowError):
        return InvalidError(f"a number does not fit 64 bits: {error}")
    if trouble is None:
        return error
    if trouble == "invalid":
        return InvalidError(f"the database cannot hold this: {error}")
    if trouble == "overdue":
        return InvalidError(
            f"this query takes longer than {seconds} s and was ended; narrow it by a run, ids or "
            "times, ask for columns instead of JSON paths, or do without the total"
        )
    if trouble == "conflict":
        return ConflictError(f"something of this name is stored already: {error}")
    return UnavailableError(
        f"the store could not be written: {error}; nothing of this call was stored"
    )


@dataclass(frozen=True)
class Opened:
    """An open database, which this process owns. Connections to search with are apart from those to
    read with, so that slow queries hold up nobody else; without any, the one to write with does
    everything. Rows are looked up by their id with `at_hand`, on the event loop, which takes less
    time than to ask a thread. `clean_up`, called by any thread, leaves no trace of what was
    removed. `release` is for when all is closed."""

    writing: Connection
    reading: Sequence[Connection]
    searching: Sequence[Connection]
    begin: str
    now: float
    clean_up: Callable[[], None]
    release: Callable[[], None] = lambda: None
    at_hand: Connection | None = None


class Readers:
    """Several threads that read, each on a connection of its own."""

    def __init__(
        self,
        connections: Sequence[Connection],
        name: str,
        view: Callable[[Connection], Transaction],
    ) -> None:
        jobs = queue.SimpleQueue[Any]()
        self._threads = [
            DatabaseThread(
                connection, f"agl-store-{name}-{number}", view, largest_batch=1, jobs=jobs
            )
            for number, connection in enumerate(connections)
        ]

    def submit(self, operation: Operation[T], seconds: float) -> asyncio.Future[T]:
        return self._threads[0].submit(operation, seconds=seconds)

    async def close(self) -> None:
        await asyncio.gather(*(thread.close() for thread in self._threads))


def take_rows(
    rows: Iterator[Any], most_bytes: float, further: Callable[[Any], int] = lambda row: 0
) -> tuple[list[Any], bool]:
    """The first rows, up to so many bytes of text and binary, and `further` ones that a row stands
    for, but at least one; whether these are all."""
    taken: list[Any] = []
    size = 0
    with contextlib.closing(rows):  # pyright: ignore[reportArgumentType] - both databases' can be closed
        for row in rows:
            taken.append(row)
            size += further(row) + sum(
                len(value) for value in row if isinstance(value, str | bytes)
            )
            if size >= most_bytes:
                return taken, False
    return taken, True
