"""An answer that is asked for at most once in a while, however many want it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Remembered(Generic[T]):
    """What `ask` last returned, for `seconds`; whoever comes while it is asked waits for the same answer. An error goes
    to those who wait, and is not remembered."""

    def __init__(self, ask: Callable[[], Awaitable[T]], seconds: float) -> None:
        self._ask = ask
        self._seconds = seconds
        self._answered = -math.inf
        self._asking: asyncio.Future[T] | None = None

    async def get(self) -> T:
        asking = self._asking
        if asking is None or (asking.done() and time.monotonic() - self._answered >= self._seconds):
            self._asking = asking = asyncio.ensure_future(self._ask())
            asking.add_done_callback(self._note)
        return await asyncio.shield(asking)

    def _note(self, asked: asyncio.Future[T]) -> None:
        failed = asked.cancelled() or asked.exception() is not None
        self._answered = -math.inf if failed else time.monotonic()
