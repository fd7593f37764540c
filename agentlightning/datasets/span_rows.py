"""Converts rows of a table to spans: such as DataFrames of Phoenix and lines of OpenTelemetry's
console exporter.

A row has a trace id, a span id and attributes, in columns of their own or in one; times are texts
of ISO 8601, or numbers of seconds, milliseconds, microseconds or nanoseconds since 1970."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any, Final, cast

from agentlightning.datasets.record_files import plain
from agentlightning.errors import InvalidError
from agentlightning.store.otel import attribute_value
from agentlightning.tracing.attributes import flatten
from agentlightning.tracing.dialects import event_messages
from agentlightning.tracing.message_forms import decoded, items, mapping
from agentlightning.types import UNATTRIBUTED, Attributes, Span, SpanEvent, SpanStatus, StatusCode

_TRACE: Final = ("trace_id", "traceId", "context.trace_id")
_SPAN: Final = ("span_id", "spanId", "context.span_id")
_PARENT: Final = ("parent_id", "parent_span_id", "parentSpanId", "parentId")
_START: Final = ("start_time", "startTime", "start_time_unix_nano", "startTimeUnixNano")
_END: Final = ("end_time", "endTime", "end_time_unix_nano", "endTimeUnixNano")
_STATUS: Final = ("status_code", "statusCode", "status.status_code", "status.code")
_WHY: Final = ("status_message", "statusMessage", "status.description", "status.message")
_OF_COLUMNS: Final = "attributes."
# above it, a time is in so many parts of a second
_LARGEST: Final = {1e17: 1e9, 1e14: 1e6, 1e11: 1e3}


def is_span_row(row: object) -> bool:
    """Whether a record has the ids of a span."""
    flat = _flat(mapping(row))
    return _first(flat, _TRACE) is not None and _first(flat, _SPAN) is not None


def span_of_row(row: Mapping[str, Any], place: str) -> Span:
    """The span of a row. InvalidError names the place of one without times that can be read."""
    flat = _flat(plain(row))
    start = _seconds(_first(flat, _START), place)
    end = _first(flat, _END)
    code = str(_first(flat, _STATUS) or "").rpartition(".")[2].removeprefix("STATUS_CODE_").upper()
    parent = _id(_first(flat, _PARENT))
    span = Span(
        rollout_id=UNATTRIBUTED,
        attempt_id=UNATTRIBUTED,
        sequence_id=0,
        trace_id=_id(_first(flat, _TRACE)),
        span_id=_id(_first(flat, _SPAN)),
        parent_id=parent if parent.strip("0") else None,
        name=str(flat.get("name") or flat.get("span_name") or "span"),
        start_time=start,
        end_time=start if end is None else _seconds(end, place),
        status=SpanStatus(
            status_code=cast(StatusCode, code) if code in ("OK", "ERROR") else "UNSET",
            description=str(_first(flat, _WHY) or "") or None,
        ),
        attributes=_attributes(flat),
        events=tuple(_event(mapping(event)) for event in items(decoded(flat.get("events")))),
    )
    span.attributes.update(event_messages(span))
    return span


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row whose `context` and `status` are spread like columns."""
    flat = dict(row)
    for name in ("context", "status"):
        flat |= {f"{name}.{key}": value for key, value in mapping(decoded(row.get(name))).items()}
    return flat


def _attributes(flat: Mapping[str, Any]) -> Attributes:
    given = dict(mapping(decoded(flat.get("attributes"))))
    for name, value in flat.items():
        if name.startswith(_OF_COLUMNS) and value not in (None, ""):
            found = decoded(value)  # CSV has lists as texts
            given[name.removeprefix(_OF_COLUMNS)] = found if isinstance(found, list) else value
    return {name: attribute_value(value) for name, value in flatten(given).items()}


def _event(event: Mapping[str, Any]) -> SpanEvent:
    given = mapping(event.get("attributes"))
    return SpanEvent(name=str(event.get("name") or "event"), attributes=flatten(given))


def _id(value: Any) -> str:
    return str(value or "").removeprefix("0x").lower()


def _seconds(value: Any, place: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        try:
            time = datetime.datetime.fromisoformat(str(value))
        except ValueError:
            raise InvalidError(
                f"{place}: the time {value!r:.100} of a span cannot be read; nothing was stored"
            ) from None
        zone = time.tzinfo or datetime.UTC
        return time.replace(tzinfo=zone).timestamp()
    return number / next((parts for least, parts in _LARGEST.items() if number >= least), 1.0)


def _first(flat: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((value for name in names if (value := flat.get(name)) not in (None, "")), None)
