"""Where the spans of calls go: committed before an answer's end is sent, or queued where nothing may delay an answer.

Knows spans and the store, no calls.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import Final, Protocol

from agentlightning.errors import UnavailableError
from agentlightning.store.base import LightningStore
from agentlightning.types import Span

_log = logging.getLogger(__name__)
_BATCH: Final = 200  # spans written at once
_PAUSE: Final = 0.2  # seconds until a store that could not be reached is tried again


class Recorder(Protocol):
    async def record(self, span: Span) -> None: ...

    async def close(self) -> None:
        """Write what is still to be written."""
        ...


class CommittingRecorder:
    """When `record` returns the span is durable; where the store is slow, calls are. A store that cannot be reached is
    tried again for `patience` seconds: a call that is not recorded makes its whole attempt untrainable.

    A write costs about as much as a call: calls that end while one is under way wait for it and share the next."""

    def __init__(self, store: LightningStore, patience: float = 5.0) -> None:
        self._store = store
        self._patience = patience
        self._gathered: list[tuple[Span, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def record(self, span: Span) -> None:
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._gathered.append((span, stored))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_gathered(), name="gateway recording")
        await stored

    async def close(self) -> None:
        """Nothing is ever left to be written: whoever records waits for it."""

    async def _write_gathered(self) -> None:
        try:
            while self._gathered:
                gathered, self._gathered = self._gathered[:_BATCH], self._gathered[_BATCH:]
                await self._write_together(gathered)
        finally:
            self._writing = None

    async def _write_together(self, gathered: list[tuple[Span, asyncio.Future[None]]]) -> None:
        """Write them at once or, where one of them is refused, each by itself."""
        try:
            await self._write([span for span, _ in gathered])
            error = None
        except Exception as raised:  # noqa: BLE001 - each of those who wait gets it
            error = raised
            if len(gathered) > 1 and not isinstance(error, UnavailableError):
                await asyncio.gather(*(self._write_together([one]) for one in gathered))
                return
        for _, stored in gathered:
            if stored.done():
                continue  # its caller was cancelled
            if error is None:
                stored.set_result(None)
            else:
                stored.set_exception(error)

    async def _write(self, spans: list[Span]) -> None:
        give_up = time.monotonic() + self._patience
        while True:
            try:
                await self._store.add_many_spans(spans)  # their ids make a repeated write harmless
                return
            except UnavailableError:
                if time.monotonic() >= give_up:
                    raise
                await asyncio.sleep(_PAUSE)


class QueueingRecorder:
    """`record` returns at once and spans are written behind it, also after a store that could not be reached is back.
    Those that find `limit` others waiting, or that the store refuses, are dropped and counted in `shed`."""

    def __init__(self, store: LightningStore, limit: int = 10_000) -> None:
        self.shed = 0
        self._store = store
        self._limit = limit
        self._closing = False
        self._waiting: deque[Span] = deque()
        self._writing: asyncio.Task[None] | None = None

    async def record(self, span: Span) -> None:
        if len(self._waiting) >= self._limit:
            self._shed(1, "the queue is full")
            return
        self._waiting.append(span)
        if self._writing is None:
            self._writing = asyncio.create_task(self._write(), name="gateway recording")

    async def close(self) -> None:
        """Return when everything that waits has been written, or cannot be."""
        self._closing = True
        if self._writing is not None:
            await self._writing

    async def _write(self) -> None:
        try:
            while self._waiting:
                await self._add([self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))])
        finally:
            self._writing = None

    async def _add(self, spans: list[Span]) -> None:
        """Write them at once or, where one of them is refused, each by itself."""
        try:
            while True:
                try:
                    await self._store.add_many_spans(spans)
                    return
                except UnavailableError as error:
                    if self._closing:
                        self._shed(len(spans), str(error))
                        return
                    await asyncio.sleep(_PAUSE)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one span, the others are written
            if len(spans) == 1:
                self._shed(1, f"{type(error).__name__}: {error}")
                return
            for span in spans:
                await self._add([span])

    def _shed(self, count: int, why: str) -> None:
        if self.shed == 0 or (self.shed + count) // 1000 > self.shed // 1000:  # the first, and each thousand
            _log.warning("%d calls were answered and not recorded so far: %s", self.shed + count, why)
        self.shed += count
