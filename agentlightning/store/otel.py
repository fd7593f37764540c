"""Converts a finished span of the OpenTelemetry SDK to ours.

OpenTelemetry is not imported: any object with a span's attributes will do. Values are converted as
OTLP would: bytes become base64 text; maps and nested lists JSON text; NaN, infinities and integers
beyond 64 bits text; invalid Unicode question marks. Only None is omitted."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from agentlightning.errors import InvalidError
from agentlightning.semconv import SPAN_SEQUENCE_ID
from agentlightning.types import Attributes, AttributeValue, Span, SpanEvent, SpanLink, SpanStatus

_NANOSECONDS: Final = 1_000_000_000
_LIMIT: Final = 2**63
_STATUS: Final = ("UNSET", "OK", "ERROR")


def span_of(
    rollout_id: str,
    attempt_id: str,
    sequence_id: int | None,
    span: Any,
    still_open_at: int | None = None,
) -> Span:
    """The span, as a span of that attempt. Without a `sequence_id` it keeps the id in its
    attributes, or gets the attempt's next when stored. A span that has not ended ends at
    `still_open_at` (nanoseconds since the epoch). InvalidError without that, or for another
    object."""
    try:
        return _span_of(rollout_id, attempt_id, sequence_id, span, span.end_time or still_open_at)
    except (AttributeError, TypeError) as error:
        raise InvalidError(
            f"a {type(span).__name__} is not a finished span of OpenTelemetry's SDK: {error}"
        ) from None


def _span_of(
    rollout_id: str, attempt_id: str, sequence_id: int | None, span: Any, end_time: Any
) -> Span:
    context = span.get_span_context()
    scope = span.instrumentation_scope
    attributes = _attributes(span.attributes)
    given = attributes.pop(SPAN_SEQUENCE_ID, 0)
    if type(given) is not int:
        given = 0
    about = {
        "otel.kind": span.kind.name,
        "otel.scope.name": scope.name if scope is not None else None,
        "otel.scope.version": scope.version if scope is not None else None,
    }
    attributes.update({name: text for name, text in about.items() if text})
    status = span.status.status_code.name
    return Span(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        sequence_id=given if sequence_id is None else sequence_id,
        trace_id=f"{context.trace_id:032x}",
        span_id=f"{context.span_id:016x}",
        parent_id=None if span.parent is None else f"{span.parent.span_id:016x}",
        name=_text(span.name),
        start_time=span.start_time / _NANOSECONDS,
        end_time=end_time / _NANOSECONDS,
        status=SpanStatus(
            status_code=status if status in _STATUS else "UNSET",
            description=_text(span.status.description or "") or None,
        ),
        attributes=attributes,
        events=tuple(
            SpanEvent(
                name=_text(event.name),
                attributes=_attributes(event.attributes),
                timestamp=event.timestamp / _NANOSECONDS,
            )
            for event in span.events
        ),
        links=tuple(
            SpanLink(
                trace_id=f"{link.context.trace_id:032x}",
                span_id=f"{link.context.span_id:016x}",
                attributes=_attributes(link.attributes),
            )
            for link in span.links
        ),
        resource=_attributes(span.resource.attributes),
    )


def _attributes(given: Mapping[str, Any] | None) -> Attributes:
    return {
        _text(name): attribute_value(value)
        for name, value in (given or {}).items()
        if value is not None
    }


def attribute_value(value: Any) -> AttributeValue:
    """The value as an attribute; any value but None."""
    value = _plain(value)
    nested = isinstance(value, list) and any(
        item is None or isinstance(item, list | dict) for item in value
    )
    return msgspec.json.encode(value).decode() if nested or isinstance(value, dict) else value


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):
        return value if -_LIMIT <= value < _LIMIT else str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value).replace("nan", "NaN").replace("inf", "Infinity")
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return {_text(str(name)): _plain(item) for name, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    return value


def _text(value: str) -> str:
    # A framework's own kind of text (smolagents' AgentText) becomes plain text.
    return (
        value
        if type(value) is str and value.isascii()
        else str.encode(value, errors="replace").decode()
    )
