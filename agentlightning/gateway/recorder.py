"""Writes the spans of calls to the store: committed before the end of an answer is sent, or queued
where answers must not be delayed. Counts outcomes of calls."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from agentlightning import semconv
from agentlightning.errors import UnavailableError
from agentlightning.store.base import LightningStore
from agentlightning.store.client import PATIENCE_SECONDS
from agentlightning.types import Span

_log = logging.getLogger(__name__)
_BATCH: Final = 200  # spans written at once
_BATCH_CHARACTERS: Final = 16 << 20  # of text in them: each is copied several times on its way
_PAUSE: Final = 0.2  # seconds until a store that could not be reached is tried again

_Recorded: TypeAlias = tuple[Span, asyncio.Future[None] | None]


@dataclass
class CallStatistics:
    """Calls since the gateway began, by model and outcome (`answered`, `failed`, `aborted`), and
    why some cannot be trained on. `undelivered` counts answers whose client had left, `held` calls
    that waited for new weights, for `held_seconds` in all. `versions` are the newest weights that
    answered, by model."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    untrainable: Counter[str] = field(default_factory=Counter[str])
    undelivered: int = 0
    held: int = 0
    held_seconds: float = 0.0
    versions: dict[str, int] = field(default_factory=dict[str, int])

    def captured(self, span: Span, model: str, held_seconds: float) -> None:
        version = span.attributes.get(semconv.CALL_LAST_VERSION)
        if isinstance(version, int) and version >= self.versions.get(model, 0):
            self.versions[model] = version
        flag = span.attributes.get(semconv.CALL_FLAG)
        if flag:
            self.untrainable[str(flag)] += 1
        self.held += held_seconds > 0
        self.held_seconds += held_seconds


class Recorder:
    """Writes spans. A write costs about as much as a call; spans that arrive during one share the
    next.

    With `commit`, a span is durable when `record` returns, and a slow store slows calls. A store
    that cannot be reached is retried for `patience` seconds, since a missing call makes its whole
    attempt untrainable.

    Without, `record` returns at once, and a store that cannot be reached is waited for. Spans
    beyond `limit` waiting ones, or refused by the store, are dropped and counted in `shed`."""

    def __init__(
        self,
        store: LightningStore,
        *,
        commit: bool,
        patience: float = PATIENCE_SECONDS,
        limit: int = 10_000,
    ) -> None:
        self.shed = 0
        self._store = store
        self._commit = commit
        self._patience = patience if commit else math.inf
        self._limit = limit
        self._closing = False
        self._waiting: deque[_Recorded] = deque()
        self._writing: asyncio.Task[None] | None = None

    async def record(self, span: Span, *, reference: bool = False) -> None:
        """Write a span. A `reference` to what is stored already is not waited for: it is written
        with the spans that follow it."""
        if not self._commit and len(self._waiting) >= self._limit:
            self._count_unrecorded("the queue is full")
            return
        waits = self._commit and not reference
        stored = asyncio.get_running_loop().create_future() if waits else None
        self._waiting.append((span, stored))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_waiting(), name="gateway recording")
        if stored is not None:
            await stored

    async def close(self) -> None:
        """Return when all waiting spans are written, or cannot be."""
        self._closing = True
        if self._writing is not None:
            await self._writing

    async def _write_waiting(self) -> None:
        try:
            while self._waiting:
                await self._write(self._next_batch())
        finally:
            self._writing = None

    def _next_batch(self) -> list[_Recorded]:
        batch: list[_Recorded] = []
        characters = 0
        while self._waiting and len(batch) < _BATCH and characters < _BATCH_CHARACTERS:
            batch.append(self._waiting.popleft())
            messages = batch[-1][0].attributes.get(semconv.GEN_AI_INPUT_MESSAGES)
            characters += len(messages) if isinstance(messages, str) else 0
        return batch

    async def _write(self, batch: list[_Recorded]) -> None:
        """Write them together or, if one is refused, one by one."""
        error = None
        try:
            await self._add([span for span, _ in batch])
        except Exception as raised:  # noqa: BLE001 - each of those who wait gets it
            error = raised
            if len(batch) > 1 and not isinstance(error, UnavailableError):
                await asyncio.gather(*(self._write([recorded]) for recorded in batch))
                return
        for _, stored in batch:
            if stored is None:
                if error is not None:
                    self._count_unrecorded(f"{type(error).__name__}: {error}")
            elif stored.done():
                pass  # its caller was cancelled
            elif error is None:
                stored.set_result(None)
            else:
                stored.set_exception(error)

    async def _add(self, spans: list[Span]) -> None:
        give_up = time.monotonic() + self._patience
        while True:
            try:
                await self._store.add_many_spans(spans)  # their ids make a repeated write harmless
                return
            except UnavailableError:
                if self._closing or time.monotonic() >= give_up:
                    raise
                await asyncio.sleep(_PAUSE)

    def _count_unrecorded(self, why: str) -> None:
        self.shed += 1
        if self.shed % 1000 == 1:  # the first, and one of each thousand
            _log.warning("%d calls were answered and not recorded so far: %s", self.shed, why)
