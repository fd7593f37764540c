"""Spans of OpenTelemetry's own SDK, added as they are."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanKind, Status, StatusCode

from agentlightning.errors import InvalidError
from agentlightning.semconv import SPAN_SEQUENCE_ID
from agentlightning.store.otel import span_of
from agentlightning.types import SpanStatus

pytestmark = pytest.mark.anyio


def recorded() -> list[ReadableSpan]:
    """A tool call inside an agent, the inner span first."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource({"service.name": "agent"}), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("some.library", "1.2")
    with tracer.start_as_current_span("agent", start_time=1_500_000_000) as agent:
        tool = tracer.start_span(
            "tool",
            kind=SpanKind.CLIENT,
            start_time=2_000_000_000,
            links=[Link(agent.get_span_context(), {"why": "cause"})],
            attributes={
                "text": "é",
                "count": 3,
                "cost": 0.3,
                "yes": True,
                "list": [1, 2],
                "none": float("nan"),
            },
        )
        tool.add_event("retried", {"times": 2}, timestamp=2_100_000_000)
        tool.set_status(Status(StatusCode.ERROR, "no such city"))
        tool.end(2_250_000_000)
    return list(exporter.get_finished_spans())


async def test_a_span_of_the_sdk_is_stored_with_all_it_has(store):
    tool, agent = recorded()
    rollout = await store.start_rollout(1)
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    for _ in range(2):
        assert (await store.add_otel_span(*ids, tool)).sequence_id == 1
    await store.add_otel_span(*ids, agent, sequence_id=9)
    by_name = {span.name: span for span in await store.query_spans(rollout.rollout_id)}
    inner, outer = by_name["tool"], by_name["agent"]
    assert (inner.sequence_id, outer.sequence_id) == (1, 9)
    assert inner.trace_id == outer.trace_id == f"{tool.get_span_context().trace_id:032x}"
    assert (inner.parent_id, outer.parent_id) == (outer.span_id, None)
    assert (inner.start_time, inner.end_time) == (2.0, 2.25)
    assert inner.status == SpanStatus(status_code="ERROR", description="no such city")
    assert inner.attributes == {
        "text": "é",
        "count": 3,
        "cost": 0.3,
        "yes": True,
        "list": [1, 2],
        "none": "NaN",
        "otel.kind": "CLIENT",
        "otel.scope.name": "some.library",
        "otel.scope.version": "1.2",
    }
    assert [(event.name, event.attributes, event.timestamp) for event in inner.events] == [
        ("retried", {"times": 2}, 2.1)
    ]
    assert [(link.span_id, link.attributes) for link in inner.links] == [
        (outer.span_id, {"why": "cause"})
    ]
    assert inner.resource["service.name"] == "agent"


def test_it_becomes_what_an_export_by_otlp_would_make_of_it() -> None:
    encoder = pytest.importorskip("opentelemetry.exporter.otlp.proto.common.trace_encoder")
    from agentlightning.tracing.otlp import PROTOBUF, decode_traces

    for span in recorded():
        (sent,) = decode_traces(encoder.encode_spans([span]).SerializeToString(), PROTOBUF)
        assert span_of(sent.rollout_id, sent.attempt_id, None, span) == sent


def test_a_number_that_the_span_names_is_its_own() -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    span = provider.get_tracer("t").start_span("s", attributes={SPAN_SEQUENCE_ID: 4})
    span.end()
    assert isinstance(span, ReadableSpan)
    made = span_of("r", "a", None, span)
    assert made.sequence_id == 4 and SPAN_SEQUENCE_ID not in made.attributes
    assert span_of("r", "a", 7, span).sequence_id == 7


def test_what_is_no_finished_span_is_refused() -> None:
    unfinished = TracerProvider(shutdown_on_exit=False).get_tracer("t").start_span("s")
    for wrong in (unfinished, "a span", None):
        with pytest.raises(InvalidError, match="is not a finished span"):
            span_of("r", "a", None, wrong)
    unfinished.end()
