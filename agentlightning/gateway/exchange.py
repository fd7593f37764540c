"""One request and its answer over ASGI: a framework's request and response objects would cost more
than the gateway's own work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

from starlette.types import Receive, Scope, Send

from agentlightning.errors import BackendError
from agentlightning.gateway.request import CallRefused

_JSON: Final = [(b"content-type", b"application/json")]
_EVENTS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Exchange:
    """A request, and what is sent back: parts and an end, or an end alone. Its task is cancelled
    when the client leaves; once it is `shielded`, only `disconnected` is set.

    `headers` have lower-case names; `ids` are the rollout and attempt that the path names, `rest`
    is what its endpoint reads of it. `error_event`, which a stream sets, writes an error that comes
    after the first part. A failure `in_call` is recorded with the call. `status` is 0 until an
    answer begins."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        ids: tuple[str, str] | None,
        rest: str,
    ) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.ids = ids
        self.rest = rest
        self.headers: dict[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        self.error_event: Callable[[BackendError], bytes] | None = None
        self.in_call = False
        self.shielded = False
        self.disconnected = False
        self.status = 0
        self._receive = receive
        self._send = send
        self._task: asyncio.Task[object] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._next = 200
        self._fields = _JSON
        self._parts: list[bytes] = []  # of the body, to be sent in this turn of the event loop
        self._flushing: asyncio.Task[None] | None = None
        self._ended = False
        self._blocked = False  # the client has to read before more is sent

    async def run(self, answer: Coroutine[Any, Any, None]) -> None:
        """Let `answer` see to this exchange, which it must end."""
        self._task = asyncio.current_task()
        try:
            await answer
        except asyncio.CancelledError:
            if not self.disconnected:  # the server stops
                raise
        finally:
            if self._watching is not None and not self._ended:
                self._watching.cancel()
            if self._flushing is not None:
                self._flushing.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self._ended:  # which is told in the same way
            return
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
        """The request's whole body, once; from then on the client is watched. CallRefused (413)
        above `limit` bytes."""
        size = self.announced or 0
        parts = list[bytes]()
        received = 0
        more = True
        while more and size <= limit:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.disconnected = True
                raise asyncio.CancelledError
            parts.append(message["body"])
            received += len(message["body"])
            size = max(size, received)
            more = message["more_body"]
        if size > limit:
            message = f"the request body is larger than {limit} bytes; send less"
            raise CallRefused(message, status=413, code="body_too_large")
        self._watching = asyncio.create_task(self._watch())
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def answers_with_events(self, error_event: Callable[[BackendError], bytes]) -> None:
        """Begin an event stream."""
        self._fields = _EVENTS
        self.error_event = error_event

    def answers_with(self, status: int, headers: dict[str, str]) -> None:
        """The status and headers of what follows."""
        self._next = status
        self._fields = [_field(name, value) for name, value in headers.items()]

    async def part(self, body: bytes) -> None:
        """Send more of the body, when the client has read enough of what was sent before. What one
        turn of the event loop brings goes out together: a write costs more than an event."""
        if self._blocked and self._flushing is not None:
            await asyncio.wait([self._flushing])
        if not self._parts:
            self._flushing = asyncio.create_task(self._flush())
        self._parts.append(body)

    async def _flush(self) -> None:
        """Send the parts that have not been sent, behind the head if it has not been either."""
        body = b"".join(self._parts)
        self._parts = []
        self._blocked = True
        if not self.status:
            await self._begin()
        if body:
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
        self._blocked = False

    async def _begin(self, length: int | None = None) -> None:
        fields = self._fields
        if length is not None:
            fields = [*fields, (b"content-length", b"%d" % length)]
        self.status = self._next
        await self._send({"type": "http.response.start", "status": self.status, "headers": fields})

    async def end(self, body: bytes) -> None:
        """Send the rest, or all, of the body."""
        self._ended = True
        if self._blocked and self._flushing is not None:
            await asyncio.wait([self._flushing])
        length = None if self._parts else len(body)
        body = b"".join([*self._parts, body])
        self._parts = []
        if not self.status:
            await self._begin(length)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def fail(self, error: BackendError, encode: Callable[[BackendError], bytes]) -> None:
        """Send an error: as `encode` writes it, or in the stream that has begun."""
        if self.status or self._parts:
            await self.end(self.error_event(error) if self.error_event else b"")
            return
        self._next = error.status
        self._fields = [*_JSON]
        if error.status in (401, 403, 409):  # SDKs retry some refusals on their own, in vain
            self._fields.append((b"x-should-retry", b"false"))
        if error.retry_after is not None:
            self._fields.append(_field("retry-after", error.retry_after))
        await self.end(encode(error))


def _field(name: str, value: str) -> tuple[bytes, bytes]:
    """A header, whose value may come from another server."""
    shown = "".join(filter(str.isprintable, value))
    return name.encode("latin-1", "replace"), shown.encode("latin-1", "replace")
