"""Forwards what is stored to a collector of the user's own, as OTLP over HTTP: OpenTelemetry's
batch processor and exporter queue, send and retry in a thread of their own."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, Final

import requests
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from yarl import URL

from agentlightning.errors import ConfigError
from agentlightning.semconv import (
    ATTEMPT_ID,
    GEN_AI_INPUT_TOKENS,
    GEN_AI_OUTPUT_TOKENS,
    ROLLOUT_ID,
    SPAN_SEQUENCE_ID,
)
from agentlightning.server.health import Reading
from agentlightning.tracing.otlp import KIND, SCOPE_NAME, SCOPE_VERSION
from agentlightning.types import Attributes, Span

QUEUE_SPANS: Final = 8192
# a call in a long conversation has 100 kB, and collectors refuse large requests
BATCH_SPANS: Final = 128
CLOSE_SECONDS: Final = 5.0
_RETRY_SECONDS: Final = 30.0
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_log: Final = logging.getLogger(__name__)


class Forwarder(SpanExporter):
    """Sends spans to the collector at `url` until `close`. `/v1/traces` is appended unless it is
    there.

    A batch waits `linger` seconds for more spans. A full queue drops its oldest spans, which
    nothing counts; a batch that the collector does not take within 30 s is `dropped`. Token ids
    stay here; how many there are goes along."""

    def __init__(
        self, url: URL, headers: Mapping[str, str] | None = None, *, linger: float = 1.0
    ) -> None:
        self.url = url
        self.taken = self.sent = self.dropped = 0
        session = requests.Session()
        session.max_redirects = 0  # the headers hold keys, which are for this address alone
        self._exporter = OTLPSpanExporter(
            str(url),
            headers=dict(headers or {}),
            timeout=_RETRY_SECONDS,
            compression=Compression.Gzip,
            session=session,
        )
        self._processor = BatchSpanProcessor(self, QUEUE_SPANS, 1000 * linger, BATCH_SPANS)

    def take(self, spans: Sequence[Span]) -> None:
        """Forward spans some time later. Returns at once."""
        self.taken += len(spans)
        for span in spans:
            self._processor.on_end(readable(span))

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Called by the processor, in its thread."""
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        except requests.RequestException as error:  # such as a redirect
            _log.warning("spans did not reach the collector: %s", error)
        if result is SpanExportResult.SUCCESS:
            self.sent += len(spans)
        else:
            self.dropped += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    async def close(self) -> None:
        """Send what waits, for `CLOSE_SECONDS` at most; the rest is dropped."""
        ending = threading.Thread(
            target=self._processor.shutdown, name="otlp forwarding ends", daemon=True
        )
        ending.start()
        await asyncio.to_thread(ending.join, CLOSE_SECONDS)
        if self.sent < self.taken:
            shown = self.url.with_user(None).with_query(None)  # where keys may be
            _log.warning(
                "%d of %d spans did not reach the collector at %s",
                self.taken - self.sent,
                self.taken,
                shown,
            )

    def readings(self) -> list[Reading]:
        """For `/metrics`."""
        meanings = {
            "taken": "Spans for the collector.",
            "sent": "Spans that the collector took.",
            "dropped": "Spans that it did not take.",
        }
        return [
            Reading(f"agl_forward_{name}_spans_total", meaning, partial(getattr, self, name))
            for name, meaning in meanings.items()
        ]


def traces_url(text: str) -> URL:
    try:
        url = URL(text)
        valid = (
            url.scheme in ("http", "https")
            and bool((url.host or "").encode("idna"))
            and url.port != 0
        )
    except ValueError:
        valid = False
        url = URL()
    if not valid:
        raise ConfigError(
            f"the address to forward spans to is {text!r}; give a URL such as http://localhost:4318"
        )
    path = url.path.rstrip("/")
    return (
        url if path.endswith("/v1/traces") else url.with_path(f"{path}/v1/traces", keep_query=True)
    )


def readable(span: Span) -> ReadableSpan:
    """OpenTelemetry's form of a span, whose resource names the rollout and the attempt.

    An id that is not hexadecimal of the right length is replaced by its hash."""
    attributes = dict(span.attributes)
    kind = SpanKind.__members__.get(str(attributes.pop(KIND, "")), SpanKind.INTERNAL)
    scope = InstrumentationScope(
        str(attributes.pop(SCOPE_NAME, "")), str(attributes.pop(SCOPE_VERSION, ""))
    )
    if span.tokens is not None:
        counts: Attributes = {
            GEN_AI_INPUT_TOKENS: len(span.tokens.prompt_token_ids),
            GEN_AI_OUTPUT_TOKENS: sum(len(choice.token_ids) for choice in span.tokens.choices),
        }
        attributes = {**counts, **attributes}
    attributes[SPAN_SEQUENCE_ID] = span.sequence_id
    # Collectors file spans under the name of a service.
    origin = {ROLLOUT_ID: span.rollout_id, ATTEMPT_ID: span.attempt_id}
    resource: dict[str, Any] = {"service.name": "agentlightning", **span.resource, **origin}
    return ReadableSpan(
        name=span.name,
        context=_context(span.trace_id, span.span_id),
        parent=None if span.parent_id is None else _context(span.trace_id, span.parent_id),
        resource=Resource(resource),
        attributes=attributes,
        events=[
            Event(event.name, event.attributes, _nanoseconds(event.timestamp or span.start_time))
            for event in span.events
        ],
        links=[Link(_context(link.trace_id, link.span_id), link.attributes) for link in span.links],
        kind=kind,
        status=Status(StatusCode[span.status.status_code], span.status.description),
        start_time=_nanoseconds(span.start_time),
        end_time=_nanoseconds(span.end_time),
        instrumentation_scope=scope,
    )


def _context(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(
        _number(trace_id, 32), _number(span_id, 16), is_remote=False, trace_flags=_SAMPLED
    )


def _number(text: str, digits: int) -> int:
    try:
        number = int(text, 16) if len(text) == digits else 0
    except ValueError:
        number = 0
    return number or int(hashlib.sha256(text.encode()).hexdigest()[:digits], 16)


def _nanoseconds(seconds: float) -> int:
    # the product of floats is off by up to 128 ns
    return min(max(round(Fraction(seconds) * 10**9), 0), 2**64 - 1)
