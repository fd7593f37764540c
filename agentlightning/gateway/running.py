"""A call under way: its events, what it has answered so far, and the span that is stored when it ends.

Knows backends and recorders. Knows no HTTP, and not how a call came about.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import msgspec

from agentlightning import semconv
from agentlightning.errors import BackendError
from agentlightning.gateway.answer import Answer
from agentlightning.gateway.backend import BackendEvent, Delta, ModelCall, RelayedAnswer, RelayedCall
from agentlightning.gateway.capture import ABORTED, FAILED, CallRecord, call_span, undelivered_span
from agentlightning.gateway.holding import Gate
from agentlightning.gateway.recording import Recorder
from agentlightning.types import Span


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
