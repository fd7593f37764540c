"""Guards a server against connections on which no whole request comes. ASGI begins behind the head
of a request: who sends none, or half of one, is seen here alone. So it is a protocol of uvicorn's
with guards around its parser, and answers nothing itself."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from agentlightning.shortages import lacking

# bytes of a request's line and headers, give or take what is read at once
_LONGEST_HEAD: Final = 256 * 1024
# bytes that come of a body in the time for which a connection may be idle
_LEAST_BODY: Final = 64 * 1024
_OUT_OF_RESOURCES: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 10\r\n"
    b"connection: close\r\ncontent-length: 0\r\n\r\n"
)


class GuardedProtocol(HttpToolsProtocol):
    """A connection.

    A request whose head does not end is refused: it would be gathered in memory, and copied again
    with each part. A connection on which no whole head comes is closed as an idle connection is,
    and so is one whose body stops coming though it is read. Trailers are no headers. Every request
    that is being answered hears that its client has left, also when another came behind it."""

    _gathered = 0  # bytes since the last head, or part of a body, was complete
    _awaits_body = False
    _body_timer: asyncio.TimerHandle | None = None
    _body_bytes = 0  # since the timer was set

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._unanswered = deque[RequestResponseCycle]()  # perhaps behind some that are answered
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def data_received(self, data: bytes) -> None:
        self._gathered += len(data)
        self._parse(data)
        if self._gathered > _LONGEST_HEAD and not self.transport.is_closing():
            self.send_400_response("The head of the request is too long.")
        elif self._awaits_body and self._body_timer is None:
            self._start_body_timer()

    def _start_body_timer(self) -> None:
        self._body_bytes = 0
        self._body_timer = self.loop.call_later(self.timeout_keep_alive, self._check_body)

    def _check_body(self) -> None:
        if self._body_bytes >= _LEAST_BODY or self.flow.read_paused:
            self._start_body_timer()
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
        if cast(httptools.HttpRequestParser, self.parser).should_upgrade():
            return
        self._gathered = 0
        self._awaits_body = True
        self._unset_keepalive_if_required()
        super().on_headers_complete()
        self.headers = []
        while self._unanswered and self._unanswered[0].response_complete:
            self._unanswered.popleft()
        self._unanswered.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._gathered = 0
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if cast(httptools.HttpRequestParser, self.parser).should_upgrade():
            return
        self._awaits_body = False
        self._stop_body_timer()
        super().on_message_complete()

    def _stop_body_timer(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for cycle in self._unanswered:
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        self._stop_body_timer()
