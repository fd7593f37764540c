"""One request over HTTP and its answer, in plain ASGI: a framework's request and response objects would cost more than
the gateway's own work.

Knows no protocol of a model's, and no calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Final

from starlette.types import Message, Receive, Scope, Send

from agentlightning.errors import BackendError
from agentlightning.gateway.request import CallRefused

_JSON: Final = [(b"content-type", b"application/json")]
_EVENTS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientGone(Exception):
    """The agent no longer listens: its call is cancelled and recorded as aborted."""


class Exchange:
    """A request, and what is sent back: parts and an end, or an end alone.

    `headers` have lower-case names; `ids` are the rollout and attempt that the path names. `error_event`, which a
    stream sets, writes an error that comes after its first part. A failure `in_call` is recorded with the call."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.params: dict[str, str] = scope["path_params"]
        self.ids = (self.params["rollout_id"], self.params["attempt_id"]) if "rollout_id" in self.params else None
        self.query: bytes = scope["query_string"]
        self.receive = receive
        self.error_event: Callable[[BackendError], bytes] | None = None
        self.in_call = False
        self._send = send
        self._status, self._headers = 200, _JSON
        self._began = False

    async def body(self, limit: int) -> bytes:
        """The request's whole body. CallRefused (413) above `limit` bytes, ClientGone if it never comes whole."""
        parts: list[bytes] = []
        announced, size = int(self.headers.get("content-length") or 0), 0
        more = announced <= limit
        while more and size <= limit:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            more = message.get("more_body", False)
        if max(announced, size) > limit:
            message = f"the request body is larger than {limit} bytes; send less"
            raise CallRefused(message, status=413, code="body_too_large")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def answers_with_events(self, error_event: Callable[[BackendError], bytes]) -> None:
        """What follows is an event stream."""
        self._headers, self.error_event = _EVENTS, error_event

    def answers_with(self, status: int, headers: dict[str, str]) -> None:
        """The status and headers of what follows."""
        self._status = status
        self._headers = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]

    async def part(self, body: bytes) -> None:
        await self._sent(body, more=True)

    async def end(self, body: bytes) -> None:
        if not self._began:
            self._headers = [*self._headers, (b"content-length", str(len(body)).encode())]
        await self._sent(body, more=False)

    async def fail(self, error: BackendError, encode: Callable[[BackendError], bytes]) -> None:
        """Send an error: as `encode` writes it, or in the stream that has begun."""
        if self._began:
            await self.end(self.error_event(error) if self.error_event else b"")
            return
        # SDKs retry some refusals on their own; an attempt that has ended does not come back.
        more = [(b"x-should-retry", b"false")] if error.status in (401, 403, 409) else []
        if error.retry_after is not None:
            more.append((b"retry-after", error.retry_after.encode("latin-1", "ignore")))
        self._status, self._headers = error.status, [*_JSON, *more]
        await self.end(encode(error))

    async def _sent(self, body: bytes, *, more: bool) -> None:
        try:
            if not self._began:
                self._began = True
                await self._send({"type": "http.response.start", "status": self._status, "headers": self._headers})
            await self._send({"type": "http.response.body", "body": body, "more_body": more})
        except OSError as error:  # how an ASGI server says that the client has gone
            raise ClientGone from error


class ClientWatch:
    """Cancels the surrounding task when its client disconnects, until disarmed; `gone` tells of it ever after.

    It takes the steps of `receive` itself: a task for them would cost a tenth of a call. Cancellation by others (a
    server shutting down) passes through."""

    def __init__(self, receive: Receive) -> None:
        self.gone = False
        self._receive = receive
        self._armed = True
        self._answering: asyncio.Task[Any] | None = None
        self._listening: Coroutine[Any, Any, Message] | None = None

    def __enter__(self) -> ClientWatch:
        self._answering = asyncio.current_task()
        self._listen()
        return self

    def _listen(self) -> None:
        """Ask for the next message, which for a request that has been read is its client's disconnect."""
        self._listening = self._receive()  # pyright: ignore[reportAttributeAccessIssue]  # all servers' are coroutines
        self._step()

    def _step(self, _: object = None) -> None:
        """Go on up to where the message has come, or to what it waits for, as a task would."""
        if self._listening is None:
            return  # the call is over
        try:
            awaited: asyncio.Future[Any] | None = self._listening.send(None)
        except StopIteration as received:
            self._heard(received.value)
            return
        if awaited is None:
            asyncio.get_running_loop().call_soon(self._step)
        else:
            awaited._asyncio_future_blocking = False  # how a task tells the future that it was seen
            awaited.add_done_callback(self._step)

    def _heard(self, message: Message) -> None:
        if message["type"] != "http.disconnect":
            self._listen()
            return
        self.gone, self._listening = True, None
        if self._armed and self._answering is not None:
            self._answering.cancel()

    def disarm(self) -> None:
        """From here on the call is complete and is committed whether or not its client still listens."""
        self._armed = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        listening, self._listening = self._listening, None
        if listening is not None:
            listening.close()
        if self.gone and self._armed and isinstance(error, asyncio.CancelledError):
            assert self._answering is not None
            if self._answering.uncancel() == 0:
                raise ClientGone from None
