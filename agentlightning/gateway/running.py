"""A call under way: its events, what it has answered so far, and the span that is stored when it ends.

Knows backends and recorders. Knows no HTTP, and not how a call came about.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType

from agentlightning.errors import BackendError
from agentlightning.gateway.answer import Answer
from agentlightning.gateway.backend import BackendEvent, ModelCall, RelayedAnswer, RelayedCall
from agentlightning.gateway.capture import ABORTED, FAILED, CallRecord, call_span, undelivered_span
from agentlightning.gateway.endpoints.base import Head
from agentlightning.gateway.holding import Gate
from agentlightning.gateway.models import ModelEntry
from agentlightning.gateway.recording import Recorder
from agentlightning.gateway.request import CallRequest
from agentlightning.gateway.statistics import CallStatistics


class ClientGone(Exception):
    """The agent no longer listens: its call is cancelled and recorded as aborted."""


class Recording:
    """Turns one call into its spans."""

    def __init__(self, record: CallRecord, body_hash: int, recorder: Recorder, statistics: CallStatistics) -> None:
        self.record = record
        self._body_hash = body_hash
        self._recorder = recorder
        self._statistics = statistics
        self._started = time.monotonic()
        record.caller.running += 1

    async def store(self, answer: Answer, error: BaseException | None) -> None:
        record, first = self.record, answer.first_token_time
        if record.call_index is not None:
            record.caller.note_ended(self._body_hash, record.call_index, answered=error is None)
        span = call_span(
            record,
            answer,
            end_time=record.start_time + (time.monotonic() - self._started),
            time_to_first_chunk=None if first is None else first - self._started,
            error=error,
        )
        self._statistics.captured(span)
        try:
            await self._recorder.record(span)
        finally:
            record.caller.running -= 1

    async def store_undelivered(self) -> None:
        if self.record.call_index is not None:
            self._statistics.undelivered += 1
            await self._recorder.record(undelivered_span(self.record, time=time.time()))


class RunningCall:
    """One call under way. Leaving its `async with` block without `commit` records it as failed or aborted."""

    def __init__(
        self,
        request: CallRequest,
        head: Head,
        call: ModelCall,
        entry: ModelEntry,
        gate: Gate,
        recording: Recording | None,
        statistics: CallStatistics,
    ) -> None:
        self.request = request
        self.answer = Answer(request.n)
        self.head = head
        self.relayed: RelayedCall | None = None
        self.refused: BackendError | None = None
        self.remember: Callable[[Answer], None] | None = None
        self._call = call
        self._entry = entry
        self._gate = gate
        self._recording = recording
        self._ids = None if recording is None else recording.record.caller.attempt
        self._recorded = False
        self._statistics = statistics

    def events(self) -> AsyncGenerator[BackendEvent, None]:
        """The backend's events; closing the iterator cancels the generation."""
        return self._entry.backend.answer(self._call)

    def relay(self) -> AbstractAsyncContextManager[RelayedAnswer]:
        """The backend's own answer to a call that is passed through."""
        assert self.relayed is not None
        return self._entry.backend.relay(self.relayed)

    async def commit(self) -> None:
        """Store the finished call, or one that was `refused` in the backend's own words. When this returns the call is
        durable; only then may its end be sent."""
        self._recorded = True
        if self._recording is not None:
            await self._recording.store(self.answer, self.refused)
        self._statistics.count(self._entry.name, "failed" if self.refused else "answered")
        if self.remember is not None:
            self.remember(self.answer)

    async def undelivered(self) -> None:
        """The client left between the commit and the end of its answer: note that nobody received it."""
        if self._recording is not None:
            await self._recording.store_undelivered()

    async def __aenter__(self) -> RunningCall:
        self._gate.enter(self._ids)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None and not self._recorded:
                aborted = isinstance(error, ClientGone | asyncio.CancelledError)
                self._statistics.count(self._entry.name, "aborted" if aborted else "failed")
                self.answer.abort(ABORTED if aborted else FAILED)
                if self._recording is not None:
                    await self._recording.store(self.answer, error)
        finally:
            self._gate.leave(self._ids)
