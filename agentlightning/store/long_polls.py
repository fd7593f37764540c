"""Calls that wait for a commit: for rollouts to lease, for rollouts and groups to finish.

A caller waits from before it looks until it has found something, so that it misses no commit."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from agentlightning.errors import InvalidError, UnavailableError
from agentlightning.store import attempts, rollouts
from agentlightning.store.database import Changes, Operation
from agentlightning.store.waiters import Waiters, give_up, woken_within
from agentlightning.types import AttemptedRollout, FinishedRollouts, Group, Rollout

T = TypeVar("T")


class Perform(Protocol):
    def __call__(self, operation: Operation[T], /) -> asyncio.Future[T]: ...


class LookUp(Protocol):
    async def __call__(self, operation: Operation[T], rows: int, /) -> T: ...


class LongPolls:
    """The waiting callers of one store, which reads and writes for them. `look_up` reads some
    number of rows by id."""

    def __init__(self, read: Perform, look_up: LookUp, write: Perform) -> None:
        self._read = read
        self._look_up = look_up
        self._write = write
        self._queued: Waiters[None] = Waiters()  # for rollouts
        self._finished: Waiters[None] = Waiters()
        self._complete: Waiters[None] = Waiters()  # for groups
        self._finishes: Waiters[set[str]] = Waiters()  # for all of these rollouts

    def wake(self, changes: Changes) -> None:
        """Wake the callers that wait for these changes."""
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

    def wake_all(self) -> None:
        for waiters in (self._finishes, self._queued, self._finished, self._complete):
            waiters.wake()

    async def dequeue_many_rollouts(
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
        leasing = self._write(lambda tx: attempts.lease(tx, **asked))
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

    async def wait_for_rollouts(
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

    async def finished_after(
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

    async def complete_groups_after(
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
