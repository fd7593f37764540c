"""Waiting without polling: signals that wake callers of one event loop after a commit.

This module knows who waits for what. It does not know SQL; the store tells it what changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import Generator, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Signal:
    """Wakes everybody who waits, each time it is raised. A raise between `mark()` and `wait(mark)` is not missed."""

    def __init__(self) -> None:
        self._raised = 0
        self._waiters: set[asyncio.Future[None]] = set()

    def mark(self) -> int:
        """The present state, to be taken before looking whether there is anything to wait for."""
        return self._raised

    def raise_(self) -> None:
        self._raised += 1
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def wait(self, mark: int, timeout: float | None) -> bool:
        """Wait until the signal is raised after `mark`; False after `timeout` seconds (None: no limit)."""
        if self._raised != mark:
            return True
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            async with asyncio.timeout(timeout):
                await waiter
        except TimeoutError:
            return False
        finally:
            self._waiters.discard(waiter)
        return True


class QueueWaiters:
    """Workers waiting for rollouts: as many are woken as there is work for, those first who came first."""

    def __init__(self) -> None:
        self._raised = 0
        self._waiting: dict[asyncio.Future[None], str | None] = {}

    def mark(self) -> int:
        return self._raised

    def queued(self, project: str, count: int) -> None:
        """`count` rollouts of a project wait for a worker now."""
        self._raised += 1
        able = (waiter for waiter, wanted in self._waiting.items() if wanted in (None, project) and not waiter.done())
        for waiter in list(itertools.islice(able, count)):
            waiter.set_result(None)
            del self._waiting[waiter]

    def wake_all(self) -> None:
        """Let everybody look again."""
        self._raised += 1
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        self._waiting.clear()

    async def wait(self, mark: int, project: str | None, timeout: float) -> bool:
        """Wait until there may be work that was queued after `mark`; False after `timeout` seconds. Whoever is woken
        and does not look must say so with `pass_on`."""
        if self._raised != mark:
            return True
        waiter = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = project
        try:
            async with asyncio.timeout(timeout):
                await waiter
        except TimeoutError:
            return waiter.done() and not waiter.cancelled()
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.pass_on(project)
            raise
        finally:
            self._waiting.pop(waiter, None)
        return True

    def pass_on(self, project: str | None) -> None:
        """The work that one of these waiters was woken for is still there."""
        for waiter, wanted in self._waiting.items():
            if (project is None or wanted in (None, project)) and not waiter.done():
                waiter.set_result(None)
                del self._waiting[waiter]
                return


class Subscribers(Generic[T]):
    """Everybody who wants to hear of everything. Who is too slow misses some, and is told so by a None."""

    def __init__(self, backlog: int = 1000) -> None:
        self._backlog = backlog
        self._queues: set[asyncio.Queue[T | None]] = set()

    def publish(self, item: T | None) -> None:
        for waiting in self._queues:
            if waiting.qsize() >= self._backlog:
                while not waiting.empty():
                    waiting.get_nowait()
                waiting.put_nowait(None)
            else:
                waiting.put_nowait(item)

    @contextlib.contextmanager
    def subscribe(self) -> Generator[asyncio.Queue[T | None]]:
        queue: asyncio.Queue[T | None] = asyncio.Queue()
        self._queues.add(queue)
        try:
            yield queue
        finally:
            self._queues.discard(queue)


class FinishWaiters:
    """Wakes a caller when the last of the rollouts it waits for has finished."""

    def __init__(self) -> None:
        self._by_rollout: dict[str, set[Countdown]] = {}

    def expect(self, rollout_ids: Iterable[str]) -> Countdown:
        """Begin to watch rollouts; use the countdown as a context manager so that it is forgotten."""
        countdown = Countdown(self, set(rollout_ids))
        for rollout_id in countdown.open:
            self._by_rollout.setdefault(rollout_id, set()).add(countdown)
        return countdown

    def finished(self, rollout_ids: Iterable[str]) -> None:
        for rollout_id in rollout_ids:
            for countdown in list(self._by_rollout.get(rollout_id, ())):
                countdown.done(rollout_id)

    def removed(self, rollout_ids: Iterable[str]) -> None:
        """Nobody need wait for these any more: let those who do look again, and be told so."""
        for rollout_id in rollout_ids:
            for countdown in self._by_rollout.get(rollout_id, ()):
                countdown.wake()

    def wake_all(self) -> None:
        """Let everybody look again, whatever has finished."""
        for countdowns in self._by_rollout.values():
            for countdown in countdowns:
                countdown.wake()

    def forget(self, countdown: Countdown, rollout_id: str) -> None:
        waiting = self._by_rollout.get(rollout_id, set())
        waiting.discard(countdown)
        if not waiting:
            self._by_rollout.pop(rollout_id, None)


class Countdown:
    """The rollouts that one caller still waits for."""

    def __init__(self, waiters: FinishWaiters, rollout_ids: set[str]) -> None:
        self.open = rollout_ids
        self._waiters = waiters
        self._woken = asyncio.Event()

    def done(self, rollout_id: str) -> None:
        self.open.discard(rollout_id)
        self._waiters.forget(self, rollout_id)
        if not self.open:
            self.wake()

    def wake(self) -> None:
        self._woken.set()

    async def wait(self, timeout: float | None) -> None:
        """Return when nothing is open any more, when woken, or after `timeout` seconds."""
        if not self.open:
            return
        try:
            async with asyncio.timeout(timeout):
                await self._woken.wait()
        except TimeoutError:
            return

    def __enter__(self) -> Countdown:
        return self

    def __exit__(self, *exception: object) -> None:
        for rollout_id in list(self.open):
            self._waiters.forget(self, rollout_id)


class Alarm:
    """The earliest time at which somebody has to look; setting an earlier one wakes the sleeper."""

    def __init__(self) -> None:
        self._when = math.inf
        self._earlier = asyncio.Event()

    def set(self, when: float) -> None:
        if when < self._when:
            self._when = when
            self._earlier.set()

    async def sleep(self, now: float) -> bool:
        """Sleep from `now` until the time that is set, and clear it. False if an earlier time was set meanwhile: then
        nothing is due and the caller sleeps again."""
        self._earlier.clear()
        try:
            async with asyncio.timeout(None if math.isinf(self._when) else max(0.0, self._when - now)):
                await self._earlier.wait()
        except TimeoutError:
            self._when = math.inf
            return True
        return False
