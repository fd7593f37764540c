"""What an exporter of any language sends becomes spans, and spans become what an OTLP backend
reads."""

from __future__ import annotations

import json
import math

import msgspec
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList

from agentlightning.errors import InvalidError
from agentlightning.semconv import ATTEMPT_ID, ROLLOUT_ID, SPAN_SEQUENCE_ID
from agentlightning.tracing import otlp
from agentlightning.tracing.otlp import (
    JSON,
    KIND,
    PROTOBUF,
    SCOPE_NAME,
    SCOPE_VERSION,
    UnsupportedMediaError,
    decode_traces,
    resolve,
)
from agentlightning.types import UNATTRIBUTED, Span, SpanEvent, SpanLink, SpanStatus

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPAN_ID = "b7ad6b7169203331"


def json_body(*, resource=None, scope=None, **fields) -> bytes:
    span = {
        "traceId": TRACE_ID,
        "spanId": SPAN_ID,
        "name": "search",
        "startTimeUnixNano": "1000000000",
        **fields,
    }
    scope_spans = {"scope": scope or {}, "spans": [span]}
    return json.dumps(
        {"resourceSpans": [{"resource": resource or {}, "scopeSpans": [scope_spans]}]}
    ).encode()


def from_json(**fields) -> Span:
    (span,) = decode_traces(json_body(**fields), JSON)
    return span


def attribute(name: str, **value) -> dict:
    return {"key": name, "value": value}


def of_value(value: AnyValue):
    request = ExportTraceServiceRequest()
    span = request.resource_spans.add().scope_spans.add().spans.add()
    span.trace_id, span.span_id = bytes.fromhex(TRACE_ID), bytes.fromhex(SPAN_ID)
    span.attributes.append(KeyValue(key="it", value=value))
    (decoded,) = decode_traces(request.SerializeToString(), PROTOBUF)
    return decoded.attributes.get("it")


def test_a_span_in_json_with_hex_ids_and_64_bit_numbers_as_text():
    span = from_json(
        parentSpanId="00F067AA0BA902B7",
        kind=3,
        startTimeUnixNano="1760000000123456789",
        endTimeUnixNano="1760000001000000000",
        attributes=[attribute("n", intValue="9007199254740993"), attribute("hit", boolValue=True)],
        events=[
            {"name": "cached", "timeUnixNano": "1760000000500000000", "attributes": []},
            {"name": "untimed"},
        ],
        links=[
            {
                "traceId": TRACE_ID.upper(),
                "spanId": SPAN_ID,
                "attributes": [attribute("why", stringValue="x")],
            }
        ],
        status={"code": 2, "message": "no route"},
        resource={"attributes": [attribute("service.name", stringValue="travel")]},
        scope={"name": "tools", "version": "2"},
    )
    assert span == Span(
        rollout_id=UNATTRIBUTED,
        attempt_id=UNATTRIBUTED,
        sequence_id=0,
        trace_id=TRACE_ID,
        span_id=SPAN_ID,
        parent_id="00f067aa0ba902b7",
        name="search",
        start_time=1760000000.123456789,
        end_time=1760000001.0,
        status=SpanStatus(status_code="ERROR", description="no route"),
        attributes={
            "n": 9007199254740993,
            "hit": True,
            KIND: "CLIENT",
            SCOPE_NAME: "tools",
            SCOPE_VERSION: "2",
        },
        events=(SpanEvent(name="cached", timestamp=1760000000.5), SpanEvent(name="untimed")),
        links=(SpanLink(trace_id=TRACE_ID, span_id=SPAN_ID, attributes={"why": "x"}),),
        resource={"service.name": "travel"},
    )


def test_json_is_read_liberally_and_what_is_not_known_is_ignored():
    span = from_json(
        kind="SPAN_KIND_SERVER", status={"code": "STATUS_CODE_OK"}, startTimeUnixNano=2_000_000_000
    )
    assert (span.attributes[KIND], span.status.status_code, span.start_time) == (
        "SERVER",
        "OK",
        2.0,
    )
    assert span.end_time == 2.0  # a missing end is the start
    span = from_json(
        kind=99,
        status={"code": 7},
        flags=257,
        colour="red",
        attributes=[attribute("a", newValue=1)],
    )
    assert (span.attributes, span.status.status_code) == ({}, "UNSET")
    assert (
        from_json(parentSpanId="").parent_id is from_json(parentSpanId="0" * 16).parent_id is None
    )
    assert (
        decode_traces(b'{"resourceSpans": [], "more": {}}', JSON)
        == decode_traces(b"", PROTOBUF)
        == []
    )


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (AnyValue(double_value=math.nan), "NaN"),
        (AnyValue(double_value=math.inf), "Infinity"),
        (AnyValue(double_value=-math.inf), "-Infinity"),
        (AnyValue(double_value=1.0), 1.0),
        (AnyValue(bytes_value=b"\0\xff"), "AP8="),
        (AnyValue(), None),
        (AnyValue(array_value=ArrayValue()), []),
        (
            AnyValue(
                array_value=ArrayValue(
                    values=[AnyValue(int_value=1), AnyValue(double_value=math.nan)]
                )
            ),
            [1, "NaN"],
        ),
        (AnyValue(array_value=ArrayValue(values=[AnyValue(int_value=1), AnyValue()])), "[1,null]"),
        (
            AnyValue(
                array_value=ArrayValue(
                    values=[AnyValue(array_value=ArrayValue(values=[AnyValue(int_value=1)]))]
                )
            ),
            "[[1]]",
        ),
        (
            AnyValue(
                kvlist_value=KeyValueList(
                    values=[KeyValue(key="city", value=AnyValue(string_value="Köln"))]
                )
            ),
            '{"city":"Köln"}',
        ),
    ],
)
def test_every_kind_of_value_becomes_one_that_a_span_can_hold(value, read):
    found = of_value(value)
    assert (found, type(found)) == (read, type(read))


def test_a_positive_sequence_id_is_taken_from_the_span_before_the_resource():
    resource = {"attributes": [attribute(SPAN_SEQUENCE_ID, intValue="4")]}
    own = from_json(resource=resource, attributes=[attribute(SPAN_SEQUENCE_ID, intValue="9")])
    assert (own.sequence_id, own.attributes) == (9, {})
    assert from_json(resource=resource).sequence_id == 4
    for useless in (
        {"intValue": "0"},
        {"intValue": "-1"},
        {"boolValue": True},
        {"stringValue": "3"},
    ):
        assert from_json(attributes=[attribute(SPAN_SEQUENCE_ID, **useless)]).sequence_id == 0


@pytest.mark.parametrize(
    ("body", "content_type", "complaint"),
    [
        (b"\xff\xff", PROTOBUF, "not an OTLP trace request in application/x-protobuf"),
        (b"{", JSON, "not an OTLP trace request in application/json"),
        (b"[1]", JSON, "it must be an object"),
        (b"null", JSON, "it must be an object"),
        (b'{"resourceSpans": ["\\ud800"]}', JSON, "not an OTLP trace request"),
        (b'{"resourceSpans": 1.5}', JSON, "not an OTLP trace request"),
        (b"[" * 100_000, JSON, "not an OTLP trace request"),
        (b"\xff", JSON, "not an OTLP trace request"),
        (b'{"resourceSpans": "x"}', JSON, "resourceSpans"),
        (json_body(spanId="zz"), JSON, "spanId is 'zz'"),
        (json_body(spanId=5), JSON, "spanId"),
        (json_body(name="\ud800"), JSON, "surrogate"),
        (json_body(startTimeUnixNano="-1"), JSON, "startTimeUnixNano"),
        (json_body(spanId="b7ad"), JSON, "span_id of span 'search' is 'b7ad'; it must be 8 bytes"),
        (json_body(traceId="0" * 32), JSON, "trace_id of span 'search' is .* not all zero"),
    ],
)
def test_a_malformed_body_is_refused_with_what_is_wrong(body, content_type, complaint):
    with pytest.raises(InvalidError, match=complaint):
        decode_traces(body, content_type)


def test_a_small_body_cannot_become_more_than_memory_or_store_hold(monkeypatch):
    monkeypatch.setattr(otlp, "MOST_PARTS", 1000)
    for field in ("attributes", "events", "links"):
        request = ExportTraceServiceRequest()
        span = request.resource_spans.add().scope_spans.add().spans.add()
        span.trace_id, span.span_id = bytes.fromhex(TRACE_ID), bytes.fromhex(SPAN_ID)
        getattr(span, field).extend([getattr(span, field).add()] * 1000)
        with pytest.raises(InvalidError, match="more than 1,000"):
            decode_traces(request.SerializeToString(), PROTOBUF)
    with pytest.raises(InvalidError, match="more than 1,000"):
        decode_traces(b'{"resourceSpans":[' + b"[]," * 4000 + b"[]]}", JSON)
    request = ExportTraceServiceRequest()
    shared = request.resource_spans.add()
    shared.resource.attributes.append(KeyValue(key="a", value=AnyValue(string_value="x" * 6000)))
    span = shared.scope_spans.add().spans.add()
    span.trace_id, span.span_id = bytes.fromhex(TRACE_ID), bytes.fromhex(SPAN_ID)
    assert len(decode_traces(request.SerializeToString(), PROTOBUF)) == 1
    shared.scope_spans[0].spans.extend([span] * 10)
    with pytest.raises(InvalidError, match="more than 1,000"):
        decode_traces(request.SerializeToString(), PROTOBUF)
    shared.resource.Clear()
    shared.scope_spans[0].spans.extend([span] * 90)
    with pytest.raises(InvalidError, match="more than 1,000"):
        decode_traces(request.SerializeToString(), PROTOBUF)


def test_the_content_type_decides_and_may_carry_parameters():
    assert len(decode_traces(json_body(), "Application/JSON; charset=utf-8")) == 1
    with pytest.raises(UnsupportedMediaError, match="text/plain"):
        decode_traces(json_body(), "text/plain")


def ids(rollout_id: str, attempt_id: str) -> dict:
    return {ROLLOUT_ID: rollout_id, ATTEMPT_ID: attempt_id}


@pytest.mark.parametrize(
    ("attributes", "resource", "url", "found"),
    [
        (ids("r1", "a1"), ids("r2", "a2"), ("r3", "a3"), ("r1", "a1")),
        ({}, ids("r2", "a2"), ("r3", "a3"), ("r2", "a2")),
        ({}, {}, ("r3", "a3"), ("r3", "a3")),
        ({}, {}, None, None),
        ({ROLLOUT_ID: "r1"}, ids("r2", ""), ("r3", "a3"), ("r3", "a3")),  # half a name is no name
        ({ROLLOUT_ID: 1, ATTEMPT_ID: 2}, {}, None, None),
    ],
)
def test_a_spans_own_attributes_come_before_its_resources_and_those_before_the_url(
    attributes, resource, url, found
):
    assert (
        resolve(msgspec.structs.replace(from_json(), attributes=attributes, resource=resource), url)
        == found
    )
