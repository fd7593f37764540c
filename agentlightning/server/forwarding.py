"""What is stored goes on to a collector of the user's own, as OTLP over HTTP.

A bounded queue between the store and the network: nothing here delays a write, and what cannot be delivered is counted
and said. This module knows the protocol's rules for trying again; encoding is `tracing.otlp`'s. Requests go to the one
address that was given, and follow no redirect.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import aiohttp
import msgspec
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from yarl import URL

from agentlightning.errors import ConfigError
from agentlightning.semconv import GEN_AI_INPUT_TOKENS, GEN_AI_OUTPUT_TOKENS
from agentlightning.tracing.otlp import PROTOBUF, encode_traces
from agentlightning.types import Attributes, Span

QUEUE_BYTES: Final = 64 * 1024 * 1024  # of spans that wait
BATCH_BYTES: Final = 4 * 1024 * 1024  # below what collectors take in one request
BATCH_SPANS: Final = 512
CLOSE_SECONDS: Final = 5.0
_ANSWER_SECONDS: Final = 10.0
_FIRST_PAUSE, _LAST_PAUSE = 0.2, 30.0  # seconds between tries
_WARN_EVERY: Final = 60.0  # seconds
_TRY_AGAIN: Final = (429, 502, 503, 504)  # as OTLP has it; any other refusal is final
_log: Final = logging.getLogger(__name__)


class Forwarder(Collector):
    """Sends spans to the collector at `url` between `start` and `close`. `/v1/traces` is appended unless it is there.

    Batches wait `linger` seconds for company. While the collector cannot take them, spans are kept up to `QUEUE_BYTES`
    and later ones dropped. Token ids stay here; how many there are goes along. ConfigError for a `url` that is none."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, *, linger: float = 1.0) -> None:
        self.url = _traces_url(url)
        self.sent = self.dropped = 0
        self._headers = {**(headers or {}), "content-type": PROTOBUF, "content-encoding": "gzip"}
        self._linger = linger
        self._waiting: deque[tuple[Span, int]] = deque()
        self._bytes = 0
        self._arrived = asyncio.Event()
        self._closing = asyncio.Event()
        self._warned = -_WARN_EVERY
        self._sending: asyncio.Task[None] | None = None

    @property
    def pending(self) -> int:
        """How many spans wait, those on their way included."""
        return len(self._waiting)

    def start(self) -> None:
        self._sending = asyncio.create_task(self._send_all(), name="otlp forwarding")

    def take(self, spans: Sequence[Span]) -> None:
        """Forward spans some time later. Returns at once."""
        for span in map(_without_token_ids, spans):
            size = len(msgspec.msgpack.encode(span))
            if self._bytes + size > QUEUE_BYTES:
                self._drop(1, "the queue is full")
                continue
            self._waiting.append((span, size))
            self._bytes += size
        self._arrived.set()

    async def close(self) -> None:
        """Send what waits, for `CLOSE_SECONDS` at most and without second tries; the rest is dropped."""
        if self._sending is None:
            return
        self._closing.set()
        self._arrived.set()
        done, _ = await asyncio.wait({self._sending}, timeout=CLOSE_SECONDS)
        if not done:
            self._sending.cancel()
            await asyncio.wait({self._sending})
        if self._waiting:
            self._warned = -_WARN_EVERY
            self._drop(len(self._waiting), "the server stops")
            self._waiting.clear()

    def collect(self) -> Iterable[Metric]:
        """For `/metrics`."""
        yield GaugeMetricFamily("agl_forward_pending_spans", "Spans that wait for the collector.", value=self.pending)
        yield CounterMetricFamily("agl_forward_sent_spans", "Spans that the collector took.", value=self.sent)
        yield CounterMetricFamily("agl_forward_dropped_spans", "Spans that it did not get.", value=self.dropped)

    async def _send_all(self) -> None:
        timeout = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
        async with aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session:
            while True:
                await self._arrived.wait()
                await self._pause(self._linger)
                self._arrived.clear()
                while self._waiting:
                    if not await self._deliver(session, self._batch()):
                        return
                if self._closing.is_set():
                    return

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not while the server stops."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)

    def _batch(self) -> list[Span]:
        """The foremost spans, at least one; they stay in the queue until they are delivered."""
        batch: list[Span] = []
        size = 0
        for span, bytes_ in self._waiting:
            size += bytes_
            if batch and (len(batch) == BATCH_SPANS or size > BATCH_BYTES):
                break
            batch.append(span)
        return batch

    async def _deliver(self, session: aiohttp.ClientSession, batch: list[Span]) -> bool:
        """Send a batch until the collector has taken or refused it; False where the server stops before that."""
        # In a thread: a large batch takes long to encode, and LLM calls go on meanwhile.
        try:
            body = await asyncio.to_thread(lambda: gzip.compress(encode_traces(batch), 1))
        except Exception as error:  # noqa: BLE001 - an odd span must not hold up those behind it
            self._remove(batch)
            self._drop(len(batch), f"they cannot be encoded: {error}")
            return True
        pause = _FIRST_PAUSE
        while True:
            try:
                async with session.post(self.url, data=body, allow_redirects=False) as answer:
                    if answer.status not in _TRY_AGAIN:
                        self._settle(batch, answer.status, await answer.read())
                        return True
                    why, after = f"it answered {answer.status}", answer.headers.get("retry-after", "")
                    asked = float(after) if after.isdecimal() else 0.0  # it may give a date
            except (aiohttp.ClientError, TimeoutError) as error:
                why, asked = str(error) or f"no answer within {_ANSWER_SECONDS:g} s", 0.0
            self._warn(f"spans wait for the collector at {self._shown}, tried again soon: {why}")
            if self._closing.is_set():
                return False
            await self._pause(max(pause, min(asked, _LAST_PAUSE)))
            pause = min(2 * pause, _LAST_PAUSE)

    def _settle(self, batch: list[Span], status: int, body: bytes) -> None:
        self._remove(batch)
        if status // 100 != 2:
            self._drop(len(batch), f"it answered {status}: {body[:200].decode(errors='replace')}")
            return
        answer = ExportTraceServiceResponse()
        with contextlib.suppress(DecodeError):  # some collectors answer in JSON, whatever they were sent
            answer.ParseFromString(body)
        refused = min(max(answer.partial_success.rejected_spans, 0), len(batch))
        self.sent += len(batch) - refused
        if refused:
            self._drop(refused, f"it refused them: {answer.partial_success.error_message[:200]}")

    def _remove(self, batch: list[Span]) -> None:
        for _ in batch:
            self._bytes -= self._waiting.popleft()[1]

    def _drop(self, count: int, why: str) -> None:
        self.dropped += count
        self._warn(f"{self.dropped} spans did not reach the collector at {self._shown} so far: {why}")

    def _warn(self, message: str) -> None:
        if time.monotonic() - self._warned >= _WARN_EVERY:
            self._warned = time.monotonic()
            _log.warning("%s", message)

    @property
    def _shown(self) -> URL:
        return self.url.with_user(None).with_query(None)  # where keys may be


def _traces_url(text: str) -> URL:
    try:
        url = URL(text)
        valid = url.scheme in ("http", "https") and bool((url.host or "").encode("idna")) and url.port != 0
    except ValueError:
        valid, url = False, URL()
    if not valid:
        raise ConfigError(f"the address to forward spans to is {text!r}; give a URL such as http://localhost:4318")
    path = url.path.rstrip("/")
    return url if path.endswith("/v1/traces") else url.with_path(f"{path}/v1/traces", keep_query=True)


def _without_token_ids(span: Span) -> Span:
    resource = {"service.name": "agentlightning", **span.resource}  # collectors file spans under it
    if span.tokens is None:
        return msgspec.structs.replace(span, resource=resource)
    counts: Attributes = {
        GEN_AI_INPUT_TOKENS: len(span.tokens.prompt_token_ids),
        GEN_AI_OUTPUT_TOKENS: sum(len(choice.token_ids) for choice in span.tokens.choices),
    }
    return msgspec.structs.replace(span, resource=resource, attributes={**counts, **span.attributes}, tokens=None)
