"""Waiting without polling: callers of one event loop are woken after a commit.

It knows who waits for what, and no SQL; the store reports changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

from agentlightning.errors import InvalidError

T = TypeVar("T")


class Waiters(Generic[T]):
    """Waiting callers, each with what it `wants`; first come, first woken."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], T] = {}

    def wake(self, able: Callable[[T], bool] = lambda wants: True, most: int | None = None) -> None:
        """Wake those who are `able` to use what may be there now, up to a number."""
        found = (
            waiter for waiter, wants in self._waiting.items() if not waiter.done() and able(wants)
        )
        for waiter in list(itertools.islice(found, most)):
            waiter.set_result(None)

    @contextlib.contextmanager
    def waiting(self, wants: T) -> Generator[asyncio.Future[None]]:
        """Wait during the block. Entered before looking, it misses nothing in between; the future
        is done when it is time to look again."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = wants
        try:
            yield waiter
        finally:
            del self._waiting[waiter]


async def woken_within(waiter: asyncio.Future[None], seconds: float) -> bool:
    """Whether a waiter is woken within these seconds (0 or less: none left; None: no limit)."""
    if seconds <= 0:
        return False
    await asyncio.wait([waiter], timeout=None if math.isinf(seconds) else seconds)
    return waiter.done()


class Subscribers(Generic[T]):
    """Listeners to all events. A listener that is too slow misses some, and gets a None."""

    def __init__(self, backlog: int = 1000) -> None:
        self._backlog = backlog
        self._queues: set[asyncio.Queue[T | None]] = set()

    def any(self) -> bool:
        return bool(self._queues)

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


def steady(now: float) -> Callable[[], float]:
    """A clock that starts at `now` and then counts elapsed time, however the machine's clock is
    set."""
    begin = time.monotonic()
    return lambda: now + (time.monotonic() - begin)


def give_up(timeout: float | None) -> float:
    """When to stop waiting, on the monotonic clock."""
    if timeout is None:
        return math.inf
    if math.isnan(timeout):
        raise InvalidError("timeout is not a number; give the seconds to wait")
    return time.monotonic() + timeout
