"""A server's connections: LLM calls are answered past ASGI and the web framework, all other
requests by uvicorn, whose parser, pipelining, timeouts and graceful end hold for both."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, cast
from urllib.parse import unquote

import httptools
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from agentlightning.gateway.exchange import Exchange
from agentlightning.gateway.request import CallRefused
from agentlightning.gateway.serving import Found, Serving
from agentlightning.server.limits import LimitExceededError, Limits
from agentlightning.server.logs import CLIENT_GONE, Finished
from agentlightning.shortages import lacking

# bytes of a request's line and headers, give or take what is read at once
_LONGEST_HEAD: Final = 256 * 1024
# bytes that come of a body in the time for which a connection may be idle
_LEAST_BODY: Final = 64 * 1024
_OUT_OF_RESOURCES: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 10\r\n"
    b"connection: close\r\ncontent-length: 0\r\n\r\n"
)


class LlmCalls:
    """The requests that a gateway answers, within the server's limits; `listeners` get each when it
    is over."""

    def __init__(
        self,
        serving: Serving,
        listeners: Sequence[Callable[[Finished], None]],
        limits: Limits,
    ) -> None:
        self.find = serving.find
        self._serving = serving
        self._listeners = listeners
        self._limits = limits

    async def answer(self, found: Found, client: str, exchange: Exchange) -> None:
        """Answer an exchange with a client at this address."""
        began = time.perf_counter()
        try:
            async with self._limits.within(
                exchange.method, exchange.path, exchange.headers, client
            ):
                await self._serving.answer(found, exchange)
        except LimitExceededError as error:
            refused = CallRefused(str(error), status=error.status, code=error.code)
            refused.retry_after = str(error.seconds)
            exchange.fail(refused, found.route.endpoint.error)
        finally:
            status = CLIENT_GONE if exchange.disconnected else exchange.status
            ms = (time.perf_counter() - began) * 1000
            attempt = None if exchange.ids is None else exchange.ids[1]
            caller = attempt if attempt is not None and attempt.isprintable() else None
            finished = Finished(exchange.method, found.route.template, status, ms, caller)
            for listener in self._listeners:
                listener(finished)


class ServerProtocol(HttpToolsProtocol):
    """A connection. Its first request, and each that follows, is an LLM call or one of the
    application's.

    A request whose head does not end is refused: it would be gathered in memory, and copied again
    with each part. A connection on which no whole head comes is closed as an idle connection is,
    and so is one whose body stops coming though it is read."""

    _gathered = 0  # bytes since the last head, or part of a body, was complete
    answering: Exchange | None = None

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._awaits_body = False
        self._body_timer: asyncio.TimerHandle | None = None
        self._body_bytes = 0  # since the timer was set

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    @property
    def fixed_head(self) -> bytes:
        return b"".join([b"%b: %b\r\n" % header for header in self.server_state.default_headers])

    def data_received(self, data: bytes) -> None:
        self._gathered += len(data)
        self._parse(data)
        if self._gathered > _LONGEST_HEAD and not self.transport.is_closing():
            self.send_400_response("The head of the request is too long.")
        elif self._awaits_body and self._body_timer is None:
            self._await_body()

    def _await_body(self) -> None:
        self._body_bytes = 0
        self._body_timer = self.loop.call_later(self.timeout_keep_alive, self._look_at_body)

    def _look_at_body(self) -> None:
        if self._body_bytes >= _LEAST_BODY or self.flow.read_paused:
            self._await_body()
        else:
            self.transport.close()

    def _parse(self, data: bytes) -> None:
        """Requests to upgrade to HTTP/2 or a websocket are answered as if they had not asked."""
        parser = cast(httptools.HttpRequestParser, self.parser)
        rest = memoryview(data)
        try:
            while rest:
                try:
                    parser.feed_data(rest)
                    return
                except httptools.HttpParserUpgrade as upgrade:
                    # The parser takes the body for another protocol's; here is the head again,
                    # without the wish.
                    rest = rest[upgrade.args[0] :]
                    lines = [
                        b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"
                    ]
                    asked = parser.get_method(), self.url, parser.get_http_version().encode()
                    parser.feed_data(b"\r\n".join([b"%b %b HTTP/%b" % asked, *lines, b"", b""]))
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            # the latter of a CONNECT
            if lacking(error.__context__) is None:
                self.send_400_response("Invalid HTTP request received.")
            else:
                self.transport.write(_OUT_OF_RESOURCES)
                self.transport.close()

    def on_headers_complete(self) -> None:
        parser: Any = self.parser
        if parser.should_upgrade():
            return
        self._gathered = 0
        self._unset_keepalive_if_required()
        method = parser.get_method().decode("ascii")
        path = httptools.parse_url(self.url).path.decode("ascii")
        path = unquote(path) if "%" in path else path
        calls: LlmCalls | None = getattr(cast(Starlette, self.config.app).state, "calls", None)
        found = calls and calls.find(method, path)
        self._awaits_body = True
        # of which trailers, that come after a body, are none
        headers = self.headers
        self.headers = []
        if not (calls and found):
            super().on_headers_complete()
            return
        exchange = Exchange(
            self,
            method,
            path,
            headers,
            ids=found.ids,
            rest=found.rest,
            keep_alive=parser.get_http_version() != "1.0" and parser.should_keep_alive(),
            continues=self.expect_100_continue,
        )
        client = self.client[0] if self.client else ""
        answer = functools.partial(calls.answer, found, client)
        before: Any = self.cycle
        # To uvicorn's protocol the exchange is a cycle of its own, and what answers it an
        # application.
        self.cycle = cycle = cast(RequestResponseCycle, exchange)
        if before is None or before.response_complete:
            self._start_asgi_task(cycle, cast(Any, answer))
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, cast(Any, answer)))

    def on_body(self, body: bytes) -> None:
        self._gathered = 0
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if cast(httptools.HttpRequestParser, self.parser).should_upgrade():
            return
        self._awaits_body = False
        self._forget_body()
        super().on_message_complete()

    def _forget_body(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget_body()
        if self.answering is not None and not self.answering.response_complete:
            self.answering.leave()
