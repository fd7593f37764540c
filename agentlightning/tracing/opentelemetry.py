"""Collects the spans that OpenTelemetry's SDK records in an attempt's code.

A span processor finds the attempt of each span: its parent's, or that of the running code. It works
beside the program's own processors, exports nothing and changes no span. This is the only
agent-side module that imports opentelemetry; `tracing.instrument` imports it if the SDK is
installed. Nothing is patched."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

import msgspec
from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from agentlightning.semconv import UNFINISHED
from agentlightning.store.otel import span_of
from agentlightning.tracing.context import AttemptTracer, current_binding
from agentlightning.tracing.dialects import event_messages

logger = logging.getLogger(__name__)


class OpenTelemetryTracer(AttemptTracer):
    """The tracer of an attempt that also collects the SDK's spans, from the global provider and
    those joined by `join`.

    While bound, OpenTelemetry's current span is a remote parent in the attempt's trace, so that new
    spans and `traceparent` headers are in that trace. Spans that have not ended with the attempt
    are kept with the attribute `agentlightning.unfinished`."""

    def __init__(self, rollout_id: str, attempt_id: str) -> None:
        super().__init__(rollout_id, attempt_id)
        self._open: dict[int, SdkSpan] = {}
        # the parent of spans without one; recorded nowhere, and known by this
        self._root_id = self.trace_id[:16]
        _processor.serve(self)

    @contextmanager
    def entered(self, parent_id: str | None) -> Generator[None]:
        parent = _context_of(self.trace_id, parent_id or self._root_id)
        token = contexts.attach(trace.set_span_in_context(trace.NonRecordingSpan(parent)))
        try:
            yield
        finally:
            contexts.detach(token)

    def enclosing(self, parent_id: str | None) -> str | None:
        # An operation is the current span of OpenTelemetry's context as well, so that spans of the
        # SDK are inside it.
        current = trace.get_current_span().get_span_context().span_id
        return f"{current:016x}" if current in self._open else parent_id

    def started(self, span: SdkSpan) -> None:
        self._open[_id_of(span)] = span

    def ended(self, span: ReadableSpan) -> None:
        self._open.pop(_id_of(span), None)
        self._collect(span)

    def close(self) -> None:
        for span_id in list(self._open):
            span = self._open.pop(span_id, None)
            if span is not None:  # it has ended this very moment
                self._collect(span, {UNFINISHED: True})
        super().close()

    def _collect(self, span: ReadableSpan, about: dict[str, bool] | None = None) -> None:
        try:
            ours = span_of(
                self.rollout_id, self.attempt_id, None, span, still_open_at=time.time_ns()
            )
        except Exception as error:  # noqa: BLE001 - recording must not make the agent fail that ends its span
            logger.warning(
                "span %r of attempt %s cannot be recorded: %s", span.name, self.attempt_id, error
            )
            return
        parent_id = None if ours.parent_id == self._root_id else ours.parent_id
        attributes = {**ours.attributes, **event_messages(ours), **(about or {})}
        self.adopt(msgspec.structs.replace(ours, parent_id=parent_id, attributes=attributes))


class _Attributing(SpanProcessor):
    """Passes each span to the tracer of its attempt, without keeping attempts alive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._providers: list[Any] = []
        self._by_trace: weakref.WeakValueDictionary[int, OpenTelemetryTracer] = (
            weakref.WeakValueDictionary()
        )
        self._by_open_span: weakref.WeakValueDictionary[int, OpenTelemetryTracer] = (
            weakref.WeakValueDictionary()
        )

    def serve(self, tracer: OpenTelemetryTracer) -> None:
        """Attribute spans to `tracer` from now on. The first call makes the SDK's provider the
        global one if there is none."""
        self._by_trace[int(tracer.trace_id, 16)] = tracer
        provider = trace.get_tracer_provider()
        if isinstance(provider, trace.ProxyTracerProvider):  # what stands for none
            # The SDK keeps the last 128 attributes: of a long conversation neither the model nor
            # what the span is.
            limits = SpanLimits(max_span_attributes=SpanLimits.UNSET)
            trace.set_tracer_provider(
                TracerProvider(sampler=ALWAYS_ON, span_limits=limits, shutdown_on_exit=False)
            )
            provider = trace.get_tracer_provider()
        self.join(provider)

    def join(self, provider: Any) -> None:
        with self._lock:
            if any(joined is provider for joined in self._providers):
                return
            self._providers.append(provider)
        if not callable(getattr(provider, "add_span_processor", None)):
            logger.warning(
                "OpenTelemetry's provider of this program is a %s, which takes no span "
                "processors; its spans stay out of rollouts. Use a TracerProvider of "
                "opentelemetry-sdk",
                type(provider).__name__,
            )
            return
        provider.add_span_processor(self)

    def on_start(self, span: SdkSpan, parent_context: contexts.Context | None = None) -> None:
        tracer = self._tracer_of(trace.get_current_span(parent_context).get_span_context())
        if tracer is not None:
            self._by_open_span[_id_of(span)] = tracer
            tracer.started(span)

    def on_end(self, span: ReadableSpan) -> None:
        tracer = self._by_open_span.pop(_id_of(span), None)
        if tracer is not None:
            tracer.ended(span)

    def _tracer_of(self, parent: trace.SpanContext) -> OpenTelemetryTracer | None:
        # The parent first: a thread or task that outlives an attempt may work for another.
        found = self._by_open_span.get(parent.span_id) or self._by_trace.get(parent.trace_id)
        if found is not None:
            return found
        binding = current_binding()
        tracer = None if binding is None else binding.tracer
        return tracer if isinstance(tracer, OpenTelemetryTracer) else None


def join(provider: TracerProvider) -> None:
    """Collect the spans of a provider that is not the global one. Repeating it changes nothing."""
    _processor.join(provider)


def _id_of(span: ReadableSpan) -> int:
    context = span.get_span_context()
    return 0 if context is None else context.span_id


def _context_of(trace_id: str, span_id: str) -> trace.SpanContext:
    sampled = trace.TraceFlags(trace.TraceFlags.SAMPLED)
    return trace.SpanContext(
        int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=sampled
    )


_processor: Final = _Attributing()  # one for the process, as the provider is
