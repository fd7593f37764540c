"""One request over HTTP/1.1 and its answer, as bytes on a connection: a framework's request and
response objects would cost more than the gateway's own work. How a request is read,
`server.protocol` knows."""

from __future__ import annotations

import asyncio
import http
import logging
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from agentlightning.errors import BackendError
from agentlightning.gateway.request import CallRefused

_STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode()
    for status in http.HTTPStatus
}
_JSON: Final = b"content-type: application/json\r\n"
_EVENTS: Final = (
    b"content-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\nx-accel-buffering: no\r\n"
)
_log = logging.getLogger(__name__)


class Flow(Protocol):
    """How much a connection takes. `drain` returns when its client has read enough, or has gone."""

    @property
    def write_paused(self) -> bool: ...
    async def drain(self) -> None: ...
    def resume_reading(self) -> None: ...


class Connection(Protocol):
    """What exchanges happen on, one at a time. `fixed_head` holds the headers of every answer."""

    answering: Exchange | None

    @property
    def transport(self) -> asyncio.Transport: ...
    @property
    def flow(self) -> Flow: ...
    @property
    def fixed_head(self) -> bytes: ...
    def on_response_complete(self) -> None: ...


class Exchange:
    """A request, and what is sent back: parts and an end, or an end alone. It ends with its task,
    which is cancelled when the client leaves; once it is `shielded`, only `disconnected` is set.

    `headers` have lower-case names; `ids` are the rollout and attempt that the path names, `rest`
    is what its endpoint reads of it. `error_event`, which a stream sets, writes an error that comes
    after the first part. A failure `in_call` is recorded with the call. `status` is 0 until an
    answer begins."""

    def __init__(
        self,
        connection: Connection,
        method: str,
        path: str,
        headers: list[tuple[bytes, bytes]],
        *,
        ids: tuple[str, str] | None,
        rest: str,
        keep_alive: bool,
        continues: bool,
    ) -> None:
        self.method = method
        self.path = path
        self.ids = ids
        self.rest = rest
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
        self.error_event: Callable[[BackendError], bytes] | None = None
        self.in_call = self.shielded = False
        self.status = 0
        self._connection = connection
        self._transport = connection.transport
        self._continues = continues  # the client waits for "100 Continue" before it sends the body
        self._task: asyncio.Task[object] | None = None
        self._next = 200
        self._fields = _JSON
        self._parts: list[bytes] = []  # of the body, to be sent in this turn of the event loop
        # What uvicorn's protocol, which reads the request, knows of a request that is being
        # answered.
        self.keep_alive = keep_alive
        self.body = bytearray()
        self.more_body = True
        self.message_event = asyncio.Event()
        self.disconnected = self.response_complete = False

    async def run_asgi(self, answer: Callable[[Exchange], Awaitable[None]]) -> None:
        """Let `answer` see to this exchange, which it must end."""
        if self.disconnected:
            return
        self._task = asyncio.current_task()
        self._connection.answering = self
        try:
            await answer(self)
        except asyncio.CancelledError:
            if not self.disconnected:  # the server stops
                self._transport.close()
                raise
        except Exception:  # noqa: BLE001 - a defect ends its own connection alone
            _log.exception("an answer could not be sent")
            self._transport.close()

    def leave(self) -> None:
        """The client has gone."""
        self.disconnected = True
        if self._task is not None and not self.shielded:
            self._task.cancel()

    @property
    def announced(self) -> int | None:
        """The body's length by its header. CallRefused (400) if that is not a number of bytes."""
        length = self.headers.get("content-length")
        if length is not None and not (length.isascii() and length.isdigit() and len(length) < 20):
            raise CallRefused("content-length is no number of bytes", code="invalid_request")
        return None if length is None else int(length)

    async def read(self, limit: int) -> bytes:
        """The request's whole body, once. CallRefused (413) above `limit` bytes."""
        announced = self.announced or 0
        while max(announced, len(self.body)) <= limit and self.more_body:
            if self._continues:
                self._continues = False
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._connection.flow.resume_reading()
            self.message_event.clear()
            await self.message_event.wait()
        if max(announced, len(self.body)) > limit:
            message = f"the request body is larger than {limit} bytes; send less"
            raise CallRefused(message, status=413, code="body_too_large")
        body = bytes(self.body)
        self.body = bytearray()  # it may be large, and the call may be long
        return body

    def answers_with_events(self, error_event: Callable[[BackendError], bytes]) -> None:
        """What follows is an event stream."""
        self._fields = _EVENTS
        self.error_event = error_event

    def answers_with(self, status: int, headers: dict[str, str]) -> None:
        """The status and headers of what follows."""
        self._next = status
        self._fields = b"".join(_field(name, value) for name, value in headers.items())

    async def part(self, body: bytes) -> None:
        """Send more of the body, when the client has read enough of what was sent before. What one
        turn of the event loop brings goes out together: a write costs more than an event."""
        if self._connection.flow.write_paused:
            await self._connection.flow.drain()
        if not self._parts:
            asyncio.get_running_loop().call_soon(self._flush)
        self._parts.append(body)

    def _flush(self) -> None:
        if self._parts and not self.disconnected:
            self._transport.write(self._chunk())

    def _chunk(self) -> bytes:
        """The parts that have not been sent, behind the head if it has not been either."""
        head = b"" if self.status else self._head(b"transfer-encoding: chunked\r\n")
        body = b"".join(self._parts)
        self._parts = []
        return b"%b%x\r\n%b\r\n" % (head, len(body), body) if body else head

    def end(self, body: bytes) -> None:
        """Send the rest, or all, of the body."""
        if self.method == "HEAD":
            data = self._head(b"content-length: %d\r\n" % len(body))
        elif self.status or self._parts:
            self._parts.append(body)
            data = self._chunk() + b"0\r\n\r\n"
        else:
            data = self._head(b"content-length: %d\r\n" % len(body)) + body
        self._transport.write(data)
        self.response_complete = True
        if not self.keep_alive:
            self._transport.close()
        self._connection.on_response_complete()

    def fail(self, error: BackendError, encode: Callable[[BackendError], bytes]) -> None:
        """Send an error: as `encode` writes it, or in the stream that has begun."""
        if self.status or self._parts:
            self.end(self.error_event(error) if self.error_event else b"")
            return
        self._next = error.status
        self._fields = _JSON
        if error.status in (401, 403, 409):  # SDKs retry some refusals on their own, in vain
            self._fields += b"x-should-retry: false\r\n"
        if error.retry_after is not None:
            self._fields += _field("retry-after", error.retry_after)
        self.end(encode(error))

    def _head(self, length: bytes) -> bytes:
        self.status = self._next
        line = _STATUS_LINES.get(self.status) or b"HTTP/1.1 %d \r\n" % self.status
        closing = b"" if self.keep_alive else b"connection: close\r\n"
        return b"%b%b%b%b%b\r\n" % (
            line,
            self._connection.fixed_head,
            self._fields,
            length,
            closing,
        )


def _field(name: str, value: str) -> bytes:
    """A header, whose value may come from another server."""
    return f"{name}: {''.join(filter(str.isprintable, value))}\r\n".encode("latin-1", "replace")
