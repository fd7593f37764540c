"""A call under way: its events, what it has answered so far, and the span that is stored when it ends: committed before
the end of its answer is sent, or queued where nothing may delay an answer.

Knows backends and the store. Knows no HTTP, and not how a call came about.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, TypeAlias

import msgspec

from agentlightning import semconv
from agentlightning.errors import BackendError, UnavailableError
from agentlightning.gateway.answer import Answer
from agentlightning.gateway.backend import BackendEvent, Delta, ModelCall, RelayedAnswer, RelayedCall
from agentlightning.gateway.capture import ABORTED, FAILED, CallRecord, call_span, undelivered_span
from agentlightning.gateway.holding import Gate
from agentlightning.store.base import LightningStore
from agentlightning.types import Span

_log = logging.getLogger(__name__)
_BATCH: Final = 200  # spans written at once
_PAUSE: Final = 0.2  # seconds until a store that could not be reached is tried again

_Recorded: TypeAlias = tuple[Span, asyncio.Future[None] | None]


class ClientGone(Exception):
    """The agent no longer listens: its call is cancelled and recorded as aborted."""


@dataclass
class CallStatistics:
    """What became of calls since the gateway began, by model and outcome (`answered`, `failed`, `aborted`), and why
    some cannot be trained on. `undelivered` counts answers whose client had left,
    `held` recorded calls that waited while weights were updated, for `held_seconds` in all."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    untrainable: Counter[str] = field(default_factory=Counter[str])
    undelivered: int = 0
    held: int = 0
    held_seconds: float = 0.0

    def captured(self, record: CallRecord, span: Span) -> None:
        flag = span.attributes.get(semconv.CALL_FLAG)
        if flag:
            self.untrainable[str(flag)] += 1
        self.held += record.held_seconds > 0
        self.held_seconds += record.held_seconds


class Recorder:
    """Writes spans; a write costs about as much as a call, and spans that come while one is under way share the next.

    With `commit` a span is durable when `record` returns; where the store is slow, calls are. A store that cannot be
    reached is tried again for `patience` seconds: a call that is not recorded makes its whole attempt untrainable.

    Without, `record` returns at once, and a store that cannot be reached is waited for. Spans that find `limit` others
    waiting, or that the store refuses, are dropped and counted in `shed`."""

    def __init__(self, store: LightningStore, *, commit: bool, patience: float = 5.0, limit: int = 10_000) -> None:
        self.shed = 0
        self._store = store
        self._commit = commit
        self._patience = patience if commit else math.inf
        self._limit = limit
        self._closing = False
        self._waiting: deque[_Recorded] = deque()
        self._writing: asyncio.Task[None] | None = None

    async def record(self, span: Span) -> None:
        if not self._commit and len(self._waiting) >= self._limit:
            self._shed("the queue is full")
            return
        stored = asyncio.get_running_loop().create_future() if self._commit else None
        self._waiting.append((span, stored))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_waiting(), name="gateway recording")
        if stored is not None:
            await stored

    async def close(self) -> None:
        """Return when everything that waits has been written, or cannot be."""
        self._closing = True
        if self._writing is not None:
            await self._writing

    async def _write_waiting(self) -> None:
        try:
            while self._waiting:
                await self._write([self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))])
        finally:
            self._writing = None

    async def _write(self, batch: list[_Recorded]) -> None:
        """Write them at once or, where one of them is refused, each by itself."""
        error = None
        try:
            await self._add([span for span, _ in batch])
        except Exception as raised:  # noqa: BLE001 - each of those who wait gets it
            error = raised
            if len(batch) > 1 and not isinstance(error, UnavailableError):
                await asyncio.gather(*(self._write([one]) for one in batch))
                return
        for _, stored in batch:
            if stored is None:
                if error is not None:
                    self._shed(f"{type(error).__name__}: {error}")
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

    def _shed(self, why: str) -> None:
        self.shed += 1
        if self.shed % 1000 == 1:  # the first, and one of each thousand
            _log.warning("%d calls were answered and not recorded so far: %s", self.shed, why)


class RunningCall:
    """One call under way. Leaving its `async with` block without `commit` records it as failed or aborted.

    Without a `recorder` nothing is captured. A `relayed` call is answered in the agent's own protocol, and if it is
    `refused` in the backend's own words. `remember` is given the answer of a call that was committed."""

    def __init__(
        self, record: CallRecord, call: ModelCall, gate: Gate, recorder: Recorder | None, statistics: CallStatistics
    ) -> None:
        self.request = record.request
        self.head = record.head
        self.answer = Answer(call.sampling.n)
        self.relayed: RelayedCall | None = None
        self.refused: BackendError | None = None
        self.remember: Callable[[Answer], None] | None = None
        self._record = record
        self._call = call
        self._gate = gate
        self._recorder = recorder
        self._recorded = False
        self._statistics = statistics
        self._started = time.monotonic()

    def events(self) -> AsyncGenerator[BackendEvent, None]:
        """The backend's events; closing the iterator cancels the generation."""
        events = self._record.entry.backend.answer(self._call)
        return _with_one_tool_call(events) if self._record.one_tool_call else events

    def relay(self) -> AbstractAsyncContextManager[RelayedAnswer]:
        """The backend's own answer to a call that is passed through."""
        assert self.relayed is not None
        return self._record.entry.backend.relay(self.relayed)

    async def commit(self) -> None:
        """Store the finished call. When this returns the call is durable; only then may its end be sent."""
        self._recorded = True
        if self._recorder is not None:
            await self._store(self._recorder, self._span(self.refused))
        self._statistics.calls[self._record.entry.name, "failed" if self.refused else "answered"] += 1
        if self.remember is not None:
            self.remember(self.answer)

    async def undelivered(self) -> None:
        """The client left between the commit and the end of its answer: note that nobody received it."""
        if self._recorder is not None and self._record.call_index is not None:
            self._statistics.undelivered += 1
            await self._store(self._recorder, undelivered_span(self._record, time=time.time()))

    async def _store(self, recorder: Recorder, span: Span) -> None:
        """Record a span. Where that fails nobody can tell whether it is stored, and nobody gets the answer."""
        try:
            await recorder.record(span)
        except BaseException:
            if self._record.call_index is not None:
                self._record.caller.lost += [*self._record.discards, self._record.call_index]
            raise

    def _span(self, error: BaseException | None) -> Span:
        """What is stored of the call, which has ended."""
        record, first = self._record, self.answer.first_token_time
        span = call_span(
            record,
            self.answer,
            end_time=record.start_time + (time.monotonic() - self._started),
            time_to_first_chunk=None if first is None else first - self._started,
            error=error,
        )
        self._statistics.captured(record, span)
        return span

    async def __aenter__(self) -> RunningCall:
        self._record.caller.running += 1
        self._gate.enter(self._record.caller.attempt)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None and not self._recorded:
                aborted = isinstance(error, ClientGone | asyncio.CancelledError)
                self._statistics.calls[self._record.entry.name, "aborted" if aborted else "failed"] += 1
                self.answer.abort(ABORTED if aborted else FAILED)
                if self._recorder is not None:
                    await self._store(self._recorder, self._span(error))
        finally:
            self._gate.leave(self._record.caller.attempt)
            self._record.caller.running -= 1


async def _with_one_tool_call(events: AsyncGenerator[BackendEvent, None]) -> AsyncGenerator[BackendEvent, None]:
    """Of each choice the first tool call alone; the tokens of the others stay, as they were sampled."""
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Delta) and "tool_calls" in event.delta:
                parts: list[dict[str, Any]] = event.delta["tool_calls"]
                first = [part for place, part in enumerate(parts) if part.get("index", place) == 0]
                event = msgspec.structs.replace(event, delta=event.delta | {"tool_calls": first})
            yield event
