"""Decodes OTLP trace requests, in protobuf and in OTLP's JSON, to spans.

It knows the wire format, but no HTTP, store or keys: a decoded span has the ids `unattributed`
until `resolve` has read whose it is. It needs protobuf, so only the server imports it. Trace state,
flags and the exporter's counts of dropped items are left out, since a span has no field for them.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2 as otlp

from agentlightning.errors import InvalidError
from agentlightning.semconv import (
    ATTEMPT_ID,
    LARGEST_REWARD,
    ROLLOUT_ID,
    SPAN_SEQUENCE_ID,
    is_reward_value,
)
from agentlightning.store.otel import attribute_value
from agentlightning.tracing.dialects import event_messages
from agentlightning.types import (
    UNATTRIBUTED,
    Attributes,
    Span,
    SpanEvent,
    SpanLink,
    SpanStatus,
    StatusCode,
)

T = TypeVar("T")

PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"

KIND: Final = "otel.kind"  # INTERNAL, SERVER, CLIENT, PRODUCER or CONSUMER
SCOPE_NAME: Final = "otel.scope.name"
SCOPE_VERSION: Final = "otel.scope.version"

_TRACE_ID_BYTES: Final = 16
_SPAN_ID_BYTES: Final = 8
_IDS_IN_JSON: Final = ("traceId", "spanId", "parentSpanId", "trace_id", "span_id", "parent_span_id")
_HEX: Final = re.compile(r"([0-9A-Fa-f]{2})*")
_BASE64: Final = re.compile(r"[\w+/-]{22}==|[\w+/-]{11}=")  # of 16 and 8 bytes
_KINDS: Final = ("", "INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER")  # by number
_STATUS: Final[tuple[StatusCode, ...]] = ("UNSET", "OK", "ERROR")  # by number
_SCALARS: Final = ("string_value", "bool_value", "int_value", "double_value", "bytes_value")
_NANOSECONDS: Final = 1_000_000_000
_LARGEST_TIME: Final = 2**64 - 1
_LARGEST_SEQUENCE_ID: Final = 2**53
MOST_PARTS: Final = 1_000_000  # of a request: one of two bytes takes hundreds in memory
_SPAN_PARTS: Final = 16  # that a span counts for
_PART_BYTES: Final = 64  # of a resource or scope count as a part of each span


class UnsupportedMediaError(InvalidError):
    """The body is in an encoding that is not read here (HTTP 415)."""


def decode_traces(body: bytes, content_type: str) -> list[Span]:
    """The spans of an export request, in its order; `content_type` is that of the HTTP header.

    Attributes become what a span can hold: bytes are base64 text; maps and nested lists are JSON
    text; NaN and the infinities are the words `NaN`, `Infinity`, `-Infinity`; an empty value is
    left out. Kind and scope become the attributes `otel.kind`, `otel.scope.name` and
    `otel.scope.version`; messages in events become attributes as well. A body that is no export
    request, has a span without usable ids, or more than MOST_PARTS attributes, events, links and
    values in all, is an InvalidError; a span counts as several of them."""
    read = _Reader()
    spans: list[Span] = []
    for resource_spans in read.counted(parse_request(body, content_type).resource_spans):
        resource = read.attributes(resource_spans.resource.attributes)
        for scope_spans in read.counted(resource_spans.scope_spans):
            # stored with each of its spans
            shared = resource_spans.resource.ByteSize() + scope_spans.scope.ByteSize()
            read.counted(range(len(scope_spans.spans) * (_SPAN_PARTS + shared // _PART_BYTES)))
            spans += [read.span(span, scope_spans.scope, resource) for span in scope_spans.spans]
    return spans


def encode_response(refused: Sequence[str], media_type: str) -> bytes:
    """An ExportTraceServiceResponse in either encoding; spans were `refused` for these reasons.
    OTLP calls that a partial success: clients do not send them again."""
    response = ExportTraceServiceResponse()
    if refused:
        response.partial_success.rejected_spans = len(refused)
        response.partial_success.error_message = refused[0][:1000]
    return (
        response.SerializeToString()
        if media_type == PROTOBUF
        else json_format.MessageToJson(response).encode()
    )


def resolve(span: Span, url_ids: tuple[str, str] | None) -> tuple[str, str] | None:
    """Whom a span names, as (rollout_id, attempt_id): by its own attributes, else its resource's,
    else by the URL it came on. One source names both or does not count: a rollout of one and an
    attempt of another would be neither."""
    for attributes in (span.attributes, span.resource):
        rollout_id = attributes.get(ROLLOUT_ID)
        attempt_id = attributes.get(ATTEMPT_ID)
        if (
            isinstance(rollout_id, str)
            and isinstance(attempt_id, str)
            and rollout_id
            and attempt_id
        ):
            return rollout_id, attempt_id
    return url_ids


def parse_request(body: bytes, content_type: str) -> ExportTraceServiceRequest:
    """The protobuf message of a body in either encoding; InvalidError says where it is
    malformed."""
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type not in (PROTOBUF, JSON):
        raise UnsupportedMediaError(
            f"the content type is {content_type!r}; send {PROTOBUF} or {JSON}"
        )
    request = ExportTraceServiceRequest()
    try:
        if media_type == PROTOBUF:
            request.ParseFromString(body)
        else:
            # decoding holds up every other thread
            if body.count(b"{") + body.count(b"[") > MOST_PARTS:
                raise ValueError(
                    f"it holds more than {MOST_PARTS:,} parts; export fewer spans at once"
                )
            message = _ids_to_base64(msgspec.json.decode(body))
            if not isinstance(message, dict):
                raise ValueError("it must be an object with resourceSpans")
            json_format.ParseDict(message, request, ignore_unknown_fields=True)
    # Where a value has another shape than its field, protobuf raises what Python's operators do.
    except (
        DecodeError,
        json_format.ParseError,
        ValueError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise InvalidError(
            f"the body is not an OTLP trace request in {media_type}: {str(error)[:500]}"
        ) from None
    return request


def _ids_to_base64(message: Any) -> Any:
    """OTLP writes ids in hex where protobuf's own JSON, which some tools write, has base64."""
    if isinstance(message, list):
        return [_ids_to_base64(item) for item in message]
    if not isinstance(message, dict):
        return message
    read = {name: _ids_to_base64(value) for name, value in message.items()}
    for name in _IDS_IN_JSON:
        text = read.get(name)
        if isinstance(text, str):
            if _BASE64.fullmatch(text):
                continue
            if not _HEX.fullmatch(text):
                raise ValueError(f"{name} is {text[:100]!r}; ids are hexadecimal text")
            read[name] = base64.b64encode(bytes.fromhex(text)).decode()
    return read


class _Reader:
    """Reads the spans of one request, and counts their parts as it goes."""

    def __init__(self) -> None:
        self._left = MOST_PARTS

    def counted(self, parts: Sequence[T]) -> Sequence[T]:
        self._left -= len(parts)
        if self._left < 0:
            raise InvalidError(
                f"the request holds more than {MOST_PARTS:,} attributes, events, links and values "
                f"(a span counts as {_SPAN_PARTS}); export fewer spans at once"
            )
        return parts

    def span(self, span: otlp.Span, scope: InstrumentationScope, resource: Attributes) -> Span:
        attributes = self.attributes(span.attributes)
        kind = _KINDS[span.kind] if span.kind in range(len(_KINDS)) else ""
        about = {KIND: kind, SCOPE_NAME: scope.name, SCOPE_VERSION: scope.version}
        attributes.update({name: text for name, text in about.items() if text})
        sequence_id = _sequence_id(attributes)
        if sequence_id:
            del attributes[SPAN_SEQUENCE_ID]  # it is the span's own field from here on
        made = Span(
            rollout_id=UNATTRIBUTED,
            attempt_id=UNATTRIBUTED,
            sequence_id=sequence_id or _sequence_id(resource),
            trace_id=_required_id(span.trace_id, _TRACE_ID_BYTES, "trace_id", span.name),
            span_id=_required_id(span.span_id, _SPAN_ID_BYTES, "span_id", span.name),
            parent_id=span.parent_span_id.hex() if any(span.parent_span_id) else None,
            name=span.name,
            start_time=_seconds(span.start_time_unix_nano),
            end_time=_seconds(span.end_time_unix_nano or span.start_time_unix_nano),
            status=SpanStatus(
                status_code=_STATUS[span.status.code]
                if span.status.code in range(len(_STATUS))
                else "UNSET",
                description=span.status.message or None,
            ),
            attributes=attributes,
            events=tuple(
                SpanEvent(
                    name=event.name,
                    attributes=self.attributes(event.attributes),
                    timestamp=_seconds(event.time_unix_nano) if event.time_unix_nano else None,
                )
                for event in self.counted(span.events)
            ),
            links=tuple(
                SpanLink(
                    trace_id=link.trace_id.hex(),
                    span_id=link.span_id.hex(),
                    attributes=self.attributes(link.attributes),
                )
                for link in self.counted(span.links)
            ),
            resource=resource,
        )
        made.attributes.update(event_messages(made))
        return made

    def attributes(self, pairs: Sequence[KeyValue]) -> Attributes:
        attributes: Attributes = {}
        for pair in self.counted(pairs):
            value = self._python(pair.value)
            if (
                isinstance(value, int | float)
                and abs(value) > LARGEST_REWARD
                and is_reward_value(pair.key)
            ):
                # no reward, as NaN is none: one span must not refuse a batch of others
                value = str(value)
            if value is not None:
                attributes[pair.key] = (
                    value if isinstance(value, str | int) else attribute_value(value)
                )
        return attributes

    def _python(self, value: AnyValue) -> Any:
        """A value as Python's own; None for an empty one."""
        kind = value.WhichOneof("value")
        if kind == "array_value":
            return [self._python(item) for item in self.counted(value.array_value.values)]
        if kind == "kvlist_value":
            return {
                pair.key: self._python(pair.value)
                for pair in self.counted(value.kvlist_value.values)
            }
        return getattr(value, kind) if kind in _SCALARS else None


def _sequence_id(attributes: Attributes) -> int:
    value = attributes.get(SPAN_SEQUENCE_ID)
    return value if type(value) is int and 0 < value <= _LARGEST_SEQUENCE_ID else 0


def _required_id(value: bytes, size: int, what: str, span_name: str) -> str:
    if len(value) != size or not any(value):
        raise InvalidError(
            f"the {what} of span {span_name[:100]!r} is {value[:32].hex()!r}; it must be {size} "
            "bytes, not all zero"
        )
    return value.hex()


def _seconds(nanoseconds: int) -> float:
    return nanoseconds / _NANOSECONDS  # of two ints: the float nearest to the true quotient
