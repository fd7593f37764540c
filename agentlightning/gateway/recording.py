"""Where the spans of calls go: committed before an answer's end is sent, or queued where nothing may delay an answer.

Knows spans and the store, no calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Protocol

from agentlightning.errors import AgentLightningError, UnavailableError
from agentlightning.store.base import LightningStore
from agentlightning.types import Span

_log = logging.getLogger(__name__)
_BATCH = 200  # spans written at once


class Recorder(Protocol):
    async def record(self, span: Span) -> None: ...

    async def close(self) -> None:
        """Write what is still to be written."""
        ...


class CommittingRecorder:
    """When `record` returns the span is durable; where the store is slow, calls are."""

    def __init__(self, store: LightningStore) -> None:
        self._store = store

    async def record(self, span: Span) -> None:
        await self._store.add_many_spans([span])

    async def close(self) -> None:
        """Nothing is ever left to be written."""


class QueueingRecorder:
    """`record` returns at once and spans are written behind it. Those that find `limit` others waiting, or that the
    store refuses, are dropped and counted in `shed`."""

    def __init__(self, store: LightningStore, limit: int = 10_000) -> None:
        self.shed = 0
        self._store = store
        self._limit = limit
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
        """Return when everything that waits has been written."""
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
            await self._store.add_many_spans(spans)
        except AgentLightningError as error:
            if len(spans) == 1 or isinstance(error, UnavailableError):
                self._shed(len(spans), str(error))
                return
            for span in spans:
                await self._add([span])

    def _shed(self, count: int, why: str) -> None:
        if self.shed == 0 or (self.shed + count) // 1000 > self.shed // 1000:  # the first, and each thousand
            _log.warning("%d calls were answered and not recorded so far: %s", self.shed + count, why)
        self.shed += count
