"""What the gateway's routes need of ASGI: bodies read, answers sent, disconnects noticed, errors in the right shape.

Plain ASGI under Starlette's routing: every call passes here, and a framework's request and response objects would cost
more than the work itself. Knows no models, stores or tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any, Final

from starlette.types import Message, Receive, Scope, Send

from agentlightning.errors import (
    AgentLightningError,
    BackendError,
    ConfigError,
    InvalidError,
    NotFoundError,
    UnavailableError,
)
from agentlightning.gateway.request import CallRefused
from agentlightning.gateway.running import ClientGone

_log = logging.getLogger(__name__)

_TOLD_AS: Final[Mapping[type[AgentLightningError], tuple[int, str]]] = {
    ConfigError: (400, "invalid_request"),
    NotFoundError: (404, "not_found"),
    InvalidError: (422, "invalid_request"),
    UnavailableError: (503, "service_unavailable"),
}
"""HTTP status and OpenAI error code."""


class Reply:
    """What is sent back. `encode` writes an error as the protocol does; `in_stream`, which a stream sets, writes one
    that comes after its first part."""

    def __init__(self, send: Send, encode: Callable[[BackendError], bytes]) -> None:
        self.in_stream: Callable[[BackendError], bytes] | None = None
        self._send = send
        self.encode = encode
        self._began = False

    async def json(self, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
        self._began = True
        length = (b"content-length", str(len(body)).encode())
        about = [(b"content-type", b"application/json"), length, *headers]
        try:
            await self._send({"type": "http.response.start", "status": status, "headers": about})
            await self._send({"type": "http.response.body", "body": body})
        except OSError as error:
            raise ClientGone from error

    async def part(self, chunk: bytes, *, more: bool = True) -> None:
        """One part of an event stream."""
        if not self._began:
            kind = (b"content-type", b"text/event-stream; charset=utf-8")
            await self.start(200, kind, (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
        await self.body(chunk, more=more)

    async def fail(self, error: BackendError) -> None:
        if self._began:
            await self.body(self.in_stream(error) if self.in_stream else b"", more=False)
            return
        # SDKs retry some refusals on their own; an attempt that has ended does not come back.
        headers = [(b"x-should-retry", b"false")] if error.status in (401, 403, 409) else []
        if error.retry_after is not None:
            headers.append((b"retry-after", error.retry_after.encode("latin-1", "ignore")))
        await self.json(error.status, self.encode(error), *headers)

    async def start(self, status: int, *headers: tuple[bytes, bytes]) -> None:
        self._began = True
        await self._guarded({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def body(self, body: bytes, *, more: bool) -> None:
        await self._guarded({"type": "http.response.body", "body": body, "more_body": more})

    async def _guarded(self, message: Message) -> None:
        try:
            await self._send(message)
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


async def read_body(headers: dict[str, str], receive: Receive, limit: int) -> bytes:
    """The request's whole body. CallRefused (413) above `limit` bytes, ClientGone if it never comes whole."""
    parts: list[bytes] = []
    announced, size = int(headers.get("content-length") or 0), 0
    more = announced <= limit
    while more and size <= limit:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        more = message.get("more_body", False)
    if max(announced, size) > limit:
        message = f"the request body is larger than {limit} bytes; send less"
        raise CallRefused(message, status=413, code="body_too_large")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def headers_of(scope: Scope) -> dict[str, str]:
    """The request's headers, with lower-case names."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def path_ids_of(scope: Scope) -> tuple[str, str] | None:
    """The rollout and attempt that the path names."""
    params = scope["path_params"]
    return (params["rollout_id"], params["attempt_id"]) if "rollout_id" in params else None


def as_backend_error(error: Exception) -> BackendError:
    """What an agent is told. An error that is not one of ours is logged in full and told in one sentence."""
    if isinstance(error, BackendError):
        return error
    for kind, (status, code) in _TOLD_AS.items():
        if isinstance(error, kind):
            return BackendError(str(error), status=status, code=code)
    _log.exception("a call failed unexpectedly", exc_info=error)
    return BackendError("the gateway failed to answer this call; its log has the details", status=500, code="internal")
