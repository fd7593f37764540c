"""A traced program as others write it: OpenTelemetry's SDK and exporters, nothing of ours."""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter

from agentlightning.semconv import ATTEMPT_ID, ROLLOUT_ID
from agentlightning.server.forwarder import readable
from agentlightning.types import AttemptedRollout, Span


def export(exporter: SpanExporter, resource: dict[str, str]) -> None:
    """A tool call within a plan, each sent as it ends. Blocks."""
    provider = TracerProvider(resource=Resource(resource), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("travel", "2")
    with (
        tracer.start_as_current_span("plan"),
        tracer.start_as_current_span("search", attributes={"city": "Köln"}),
    ):
        pass
    provider.shutdown()


def ids(attempted: AttemptedRollout) -> dict[str, str]:
    """The resource attributes that name an attempt."""
    return {ROLLOUT_ID: attempted.rollout_id, ATTEMPT_ID: attempted.attempt.attempt_id}


def key_of(attempted: AttemptedRollout) -> dict[str, str]:
    return {"authorization": f"Bearer {attempted.api_key}"}


def encode_traces(spans: Iterable[Span]) -> bytes:
    """An export request of these spans."""
    return encode_spans([readable(span) for span in spans]).SerializeToString()
