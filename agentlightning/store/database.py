"""One SQLite connection behind one thread, with group commit.

Operations handed over while a transaction is being written share the next one, and so one fsync; each runs in a
savepoint, so that one that fails is undone alone. A caller gets its answer only after the commit. This module does
not know what the operations do.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from agentlightning.errors import ConfigError, InvalidError, UnavailableError

T = TypeVar("T")
Operation = Callable[[sqlite3.Connection], T]

_LARGEST_BATCH: Final = 256


@dataclass(frozen=True)
class _Job:
    operation: Operation[Any]
    future: asyncio.Future[Any]
    committed: Callable[[], None] | None


@dataclass(frozen=True)
class _Outcome:
    """What became of a job: its result, or the error it failed with."""

    job: _Job
    result: Any = None
    error: Exception | None = None

    def deliver(self) -> None:
        if self.error is None and self.job.committed is not None:
            self.job.committed()
        if self.job.future.done():
            return  # the caller was cancelled and no longer waits
        if self.error is None:
            self.job.future.set_result(self.result)
        else:
            self.job.future.set_exception(self.error)


class DatabaseThread:
    """Runs operations on one connection, in the order they were handed over, away from the event loop."""

    def __init__(self, connection: sqlite3.Connection, name: str, *, begin: str = "BEGIN IMMEDIATE") -> None:
        self._connection = connection
        self._begin = begin
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, operation: Operation[T], committed: Callable[[], None] | None = None) -> asyncio.Future[T]:
        """Hand an operation over; the future is resolved after its transaction is committed. `committed` is called on
        the event loop just before, also when the caller no longer waits."""
        if self._closed:
            raise UnavailableError("the store is closed")
        if asyncio.get_running_loop() is not self._loop:
            raise ConfigError(
                "this store belongs to the event loop that opened it; from another loop or thread use a "
                "LightningStoreClient on its server"
            )
        future: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put(_Job(operation, future, committed))
        return future

    async def close(self) -> None:
        """Finish what was handed over, then close the connection."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def _work(self) -> None:
        open_for_work = True
        while open_for_work:
            batch: list[_Job] = []
            job = self._jobs.get()
            while job is not None:
                batch.append(job)
                if len(batch) == _LARGEST_BATCH:
                    break
                try:
                    job = self._jobs.get_nowait()
                except queue.Empty:
                    break
            else:
                open_for_work = False
            if batch:
                outcomes = self._transact(batch)
                self._loop.call_soon_threadsafe(_deliver, outcomes)
        self._connection.close()

    def _transact(self, batch: list[_Job]) -> list[_Outcome]:
        """Run a batch as one transaction. If the database loses the transaction, the whole batch fails."""
        outcomes: list[_Outcome] = []
        try:
            self._connection.execute(self._begin)
            for job in batch:
                outcomes.append(self._run(job))
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            return [_Outcome(job, error=_unavailable(error)) for job in batch]
        return outcomes

    def _run(self, job: _Job) -> _Outcome:
        execute = self._connection.execute
        execute("SAVEPOINT operation")
        try:
            outcome = _Outcome(job, job.operation(self._connection))
            execute("RELEASE operation")
            return outcome
        except sqlite3.Error as error:
            if not self._connection.in_transaction:
                raise
            outcome = _Outcome(job, error=_unavailable(error))
        except OverflowError as error:
            outcome = _Outcome(job, error=InvalidError(f"a number does not fit 64 bits: {error}"))
        except Exception as error:  # noqa: BLE001 - delivered to the caller, who raises it
            outcome = _Outcome(job, error=error)
        execute("ROLLBACK TO operation")
        execute("RELEASE operation")
        return outcome


def _unavailable(error: sqlite3.Error) -> UnavailableError:
    return UnavailableError(f"the store could not be written: {error}; nothing of this call was stored")


def _deliver(outcomes: list[_Outcome]) -> None:
    for outcome in outcomes:
        outcome.deliver()
