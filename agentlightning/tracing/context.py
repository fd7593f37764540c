"""The attempt that the running code belongs to, and its spans.

The binding is a contextvar. Asyncio tasks and `asyncio.to_thread` calls of an agent inherit it, so
hundreds of attempts share one process. A bare `threading.Thread` does not: run its target with
`contextvars.copy_context().run`. Spans stay in memory until they are drained. This module knows
neither the store nor OpenTelemetry (see `tracing.opentelemetry`)."""

from __future__ import annotations

import hashlib
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from types import TracebackType
from typing import NamedTuple

import msgspec

from agentlightning.errors import ConfigError
from agentlightning.semconv import ATTEMPT_ID, OPERATION_ONCE, ROLLOUT_ID
from agentlightning.tracing.recorded import RecordedOperations
from agentlightning.types import Attributes, Span, SpanStatus

logger = logging.getLogger(__name__)

_NOTHING = nullcontext()


class AttemptTracer:
    """Collects the spans of one attempt, from any thread.

    `trace_id` is derived from the attempt, so that all processes that take part in it write one
    trace."""

    def __init__(self, rollout_id: str, attempt_id: str) -> None:
        self.rollout_id = rollout_id
        self.attempt_id = attempt_id
        self.trace_id = hashlib.sha256(f"{rollout_id}/{attempt_id}".encode()).hexdigest()[:32]
        self._resource: Attributes = {ROLLOUT_ID: rollout_id, ATTEMPT_ID: attempt_id}
        self._spans: list[Span] = []
        # appended by agents' threads, popped by the runner's: both are atomic
        self._pending: deque[Span] = deque()
        self._deliver: Callable[[Span], None] = self._pending.append
        self.closed = False
        self.recorded: RecordedOperations | None = None
        self.hurry: Callable[[], object] | None = None  # have what is kept sent at once

    def record(
        self,
        name: str,
        attributes: Attributes,
        *,
        start_time: float | None = None,
        end_time: float | None = None,
        status: SpanStatus | None = None,
        span_id: str | None = None,
        parent_id: str | None = None,
    ) -> Span:
        """Make a span of this attempt and keep it until it is drained. Times are seconds since the
        epoch; default: now."""
        now = time.time()
        span = Span(
            rollout_id=self.rollout_id,
            attempt_id=self.attempt_id,
            sequence_id=0,  # the store numbers it, among those of the gateway
            trace_id=self.trace_id,
            span_id=span_id or new_span_id(),
            parent_id=parent_id,
            name=name,
            start_time=now if start_time is None else start_time,
            end_time=now if end_time is None else end_time,
            status=status or SpanStatus(),
            attributes=attributes,
            resource=self._resource,
        )
        self._keep(span)
        return span

    def adopt(self, span: Span) -> Span:
        """Keep a finished span, such as one returned by an agent, as this attempt's, whatever its
        ids."""
        adopted = msgspec.structs.replace(
            span,
            rollout_id=self.rollout_id,
            attempt_id=self.attempt_id,
            sequence_id=0,
            resource={**span.resource, **self._resource},
        )
        self._keep(adopted)
        return adopted

    def get_last_trace(self) -> list[Span]:
        """All spans of this attempt recorded in this process so far, in order."""
        return list(self._spans)

    def get_langchain_handler(self) -> None:
        """None: LangChain needs no handler, since the gateway records its calls."""

    def drain(self) -> list[Span]:
        """Return the spans recorded since the last call, and forget them."""
        return [self._pending.popleft() for _ in range(len(self._pending))]

    def entered(self, parent_id: str | None) -> AbstractContextManager[None]:
        """A block whose spans are children of `parent_id`, or have no parent."""
        return _NOTHING

    def enclosing(self, parent_id: str | None) -> str | None:
        """The span around the running code; `parent_id` is the innermost operation around it."""
        return parent_id

    def forward(self, to: Callable[[Span], None]) -> None:
        """Pass each span to `to` when it is recorded, in the recording thread, instead of keeping
        it for `drain`."""
        self._deliver = to

    def close(self) -> None:
        """End the attempt: spans recorded from now on are dropped with a warning."""
        self.closed = True

    def _keep(self, span: Span) -> None:
        if self.closed:
            logger.warning(
                "span %r of attempt %s came after the attempt had ended; it is dropped",
                span.name,
                self.attempt_id,
            )
            return
        self._spans.append(span)
        self._deliver(span)
        if self.hurry is not None and OPERATION_ONCE in span.attributes:
            self.hurry()


class Binding(NamedTuple):
    """An attempt's tracer, and the span around the running code."""

    tracer: AttemptTracer
    parent_id: str | None = None


_current: ContextVar[Binding | None] = ContextVar("agentlightning_attempt", default=None)


def current_binding() -> Binding | None:
    """The binding of the running code, or None outside a rollout."""
    binding = _current.get()
    if binding is None:
        return None
    parent_id = binding.tracer.enclosing(binding.parent_id)
    return binding if parent_id == binding.parent_id else Binding(binding.tracer, parent_id)


def require_binding(what: str) -> Binding:
    """The binding of the running code. Outside a rollout, ConfigError names `what`."""
    binding = current_binding()
    if binding is None:
        raise ConfigError(
            f"{what} was called outside a rollout, so its span would belong to nothing. Call it "
            "from code that a runner runs; in a thread of your own, start the target by "
            "contextvars.copy_context().run; in a test, use `with "
            "agentlightning.tracing.context.recording() as tracer:`"
        )
    return binding


class Bound:
    """In the block, and in tasks and `to_thread` calls started there, spans go to `tracer`."""

    def __init__(self, tracer: AttemptTracer, parent_id: str | None) -> None:
        self._binding = Binding(tracer, parent_id)

    def __enter__(self) -> AttemptTracer:
        tracer, parent_id = self._binding
        self._token = _current.set(self._binding)
        self._entered = tracer.entered(parent_id)
        self._entered.__enter__()
        return tracer

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._entered.__exit__(kind, error, trace)
        finally:
            # a generator begun here is ended in another task, as abandoned ones are
            with suppress(ValueError):
                _current.reset(self._token)


def bind(tracer: AttemptTracer, parent_id: str | None = None) -> Bound:
    return Bound(tracer, parent_id)


@contextmanager
def recording(
    rollout_id: str = "recording", attempt_id: str = "recording-1"
) -> Generator[AttemptTracer]:
    """Run an agent's code without a runner and look at its spans: `tracer.get_last_trace()`."""
    with bind(AttemptTracer(rollout_id, attempt_id)) as tracer:
        yield tracer


def new_span_id() -> str:
    """16 hexadecimal digits, not all zero, as in OpenTelemetry."""
    return f"{_span_ids.getrandbits(64) or 1:016x}"


# Not the global generator: agents seed that one, and equal seeds would give equal span ids within
# an attempt.
_span_ids = random.Random()
