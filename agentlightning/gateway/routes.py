"""The gateway over HTTP: bodies in, JSON and server-sent events out, disconnects noticed, errors OpenAI-shaped.

Plain ASGI under Starlette's routing: every call passes here, and a framework's request and response objects would cost
more than the work itself. Knows nothing of models, stores or tokens beyond what `Gateway` offers.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import time
from contextlib import aclosing
from types import TracebackType
from typing import Any

import msgspec
from starlette.routing import BaseRoute, Route
from starlette.types import Message, Receive, Scope, Send

from agentlightning.errors import (
    AgentLightningError,
    BackendError,
    ConfigError,
    InvalidError,
    NotFoundError,
    UnavailableError,
)
from agentlightning.gateway.backend import BackendEvent, Delta, Finished, Started
from agentlightning.gateway.calls import CallOpener, ClientGone, RunningCall
from agentlightning.gateway.models import ModelTable
from agentlightning.gateway.openai import CallRefused, ChunkWriter, completion_body, error_body

_log = logging.getLogger(__name__)
_PREFIX = "/rollout/{rollout_id}/attempt/{attempt_id}"
_NOT_SERVED = ("completions", "responses", "embeddings", "messages")


def gateway_routes(calls: CallOpener, models: ModelTable, *, body_limit: int, attributed: bool) -> list[BaseRoute]:
    """The gateway's routes, at `/v1` and, where calls can be attributed, under each attempt's own prefix."""
    chat, cards, not_served = _ChatCompletions(calls, body_limit), _Models(calls, models), _NotServed()
    routes: list[BaseRoute] = []
    for prefix in ("", _PREFIX) if attributed else ("",):
        routes += [
            Route(f"{prefix}/v1/chat/completions", chat, methods=["POST"]),
            Route(f"{prefix}/v1/models", cards, methods=["GET"]),
            Route(f"{prefix}/v1/models/{{name:path}}", cards, methods=["GET"]),
        ]
        routes += [Route(f"{prefix}/v1/{name}", not_served, methods=["POST"]) for name in _NOT_SERVED]
    return routes


class _Endpoint(abc.ABC):
    """An ASGI application whose every failure becomes an OpenAI-shaped error."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = _Reply(send)
        try:
            try:
                await self.answer(scope, receive, reply)
            except Exception as error:  # the boundary: nothing an agent sends may show it a traceback
                if isinstance(error, ClientGone):
                    raise
                await reply.fail(_as_backend_error(error))
        except ClientGone:
            _log.debug("the client of %s went away", scope["path"])

    @abc.abstractmethod
    async def answer(self, scope: Scope, receive: Receive, reply: _Reply) -> None: ...


class _ChatCompletions(_Endpoint):
    """POST …/chat/completions, streamed or whole."""

    def __init__(self, calls: CallOpener, body_limit: int) -> None:
        self._calls = calls
        self._body_limit = body_limit

    async def answer(self, scope: Scope, receive: Receive, reply: _Reply) -> None:
        headers = _headers(scope)
        body = await _read_body(headers, receive, self._body_limit)
        async with _ClientWatch(receive) as watch:
            call = await self._calls.open(body, headers, _path_ids(scope))
            async with call:
                deliver = _stream if call.request.stream else _whole
                await deliver(call, reply, watch)


class _Models(_Endpoint):
    """GET …/models and …/models/{name}."""

    def __init__(self, calls: CallOpener, models: ModelTable) -> None:
        self._calls = calls
        self._models = models

    async def answer(self, scope: Scope, receive: Receive, reply: _Reply) -> None:
        await self._calls.admit(_headers(scope))
        cards = {
            entry.name: {"id": entry.name, "object": "model", "created": 0, "owned_by": "agentlightning"}
            for entry in self._models
        }
        name = scope["path_params"].get("name")
        if name is None:
            await reply.json(200, msgspec.json.encode({"object": "list", "data": list(cards.values())}))
        elif name in cards:
            await reply.json(200, msgspec.json.encode(cards[name]))
        else:
            known = ", ".join(sorted(cards))
            raise CallRefused(f"no model is called {name!r}; known: {known}", status=404, code="model_not_found")


class _NotServed(_Endpoint):
    """POST to an endpoint of the protocol that is not served here: says so, instead of a bare 404."""

    async def answer(self, scope: Scope, receive: Receive, reply: _Reply) -> None:
        message = f"{scope['path']} is not served here; call chat/completions, with stream or without"
        raise CallRefused(message, status=404, code="endpoint_not_served")


async def _whole(call: RunningCall, reply: _Reply, watch: _ClientWatch) -> None:
    async with aclosing(call.events()) as events:
        async for event in events:
            call.answer.add(event)
    watch.disarm()
    await call.commit()
    body = completion_body(call.request, call.answer, call.response_id, call.model, int(time.time()))
    await reply.json(200, body)


async def _stream(call: RunningCall, reply: _Reply, watch: _ClientWatch) -> None:
    """Events as they come. The ends of the choices wait until the call is committed."""
    writer = ChunkWriter(call.request, call.response_id, call.model, int(time.time()))
    ends: list[Finished] = []
    async with aclosing(call.events()) as events:
        async for event in events:
            call.answer.add(event)
            if isinstance(event, Finished):
                ends.append(event)
            elif chunk := _chunk(writer, event, call.request.n):
                await reply.part(chunk)
    watch.disarm()
    await call.commit()
    await reply.part(b"".join(map(writer.finish, ends)) + writer.end(call.answer), more=False)


def _chunk(writer: ChunkWriter, event: BackendEvent, n: int) -> bytes | None:
    if isinstance(event, Delta):
        return writer.delta(event)
    if isinstance(event, Started):
        return b"".join(writer.role(index, event.prompt_token_ids) for index in range(n))
    return None


# --- ASGI ---------------------------------------------------------------------------------------------------------


class _Reply:
    """What is sent back. An error is a plain HTTP one until the first part of a stream is out, then part of it."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._began = False

    async def json(self, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
        await self._start(status, b"application/json", (b"content-length", str(len(body)).encode()), *headers)
        await self._body(body, more=False)

    async def part(self, chunk: bytes, *, more: bool = True) -> None:
        """One part of an event stream."""
        if not self._began:
            await self._start(200, b"text/event-stream; charset=utf-8", (b"cache-control", b"no-cache"))
        await self._body(chunk, more=more)

    async def fail(self, error: BackendError) -> None:
        if self._began:
            await self._body(ChunkWriter.error(error), more=False)
            return
        # SDKs retry some refusals on their own; an attempt that has ended does not come back.
        headers = ((b"x-should-retry", b"false"),) if error.status in (401, 403) else ()
        await self.json(error.status, error_body(error), *headers)

    async def _start(self, status: int, content_type: bytes, *headers: tuple[bytes, bytes]) -> None:
        self._began = True
        fields = [(b"content-type", content_type), *headers]
        await self._guarded({"type": "http.response.start", "status": status, "headers": fields})

    async def _body(self, body: bytes, *, more: bool) -> None:
        await self._guarded({"type": "http.response.body", "body": body, "more_body": more})

    async def _guarded(self, message: Message) -> None:
        try:
            await self._send(message)
        except OSError as error:  # how an ASGI server says that the client has gone
            raise ClientGone from error


class _ClientWatch:
    """Cancels the surrounding task when its client disconnects, until disarmed.

    The watcher is the only extra task of a call. Cancellation by others (a server shutting down) passes through."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False
        self._answering: asyncio.Task[Any] | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> _ClientWatch:
        self._answering = asyncio.current_task()
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        assert self._answering is not None
        self._answering.cancel()

    def disarm(self) -> None:
        """From here on the call is complete and is committed whether or not its client still listens."""
        assert self._watcher is not None
        self._watcher.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disarm()
        if self._gone and isinstance(error, asyncio.CancelledError):
            assert self._answering is not None
            if self._answering.uncancel() == 0:
                raise ClientGone from None


async def _read_body(headers: dict[str, str], receive: Receive, limit: int) -> bytes:
    if int(headers.get("content-length") or 0) > limit:
        _refuse_size(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            _refuse_size(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _refuse_size(limit: int) -> None:
    raise CallRefused(f"the request body is larger than {limit} bytes; send less", status=413, code="body_too_large")


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def _path_ids(scope: Scope) -> tuple[str, str] | None:
    params = scope["path_params"]
    return (params["rollout_id"], params["attempt_id"]) if "rollout_id" in params else None


def _as_backend_error(error: Exception) -> BackendError:
    """What an agent is told. An error that is not one of ours is logged in full and told in one sentence."""
    if isinstance(error, BackendError):
        return error
    statuses: dict[type[AgentLightningError], int] = {
        ConfigError: 400,
        NotFoundError: 404,
        InvalidError: 422,
        UnavailableError: 503,
    }
    for kind, status in statuses.items():
        if isinstance(error, kind):
            return BackendError(str(error), status=status, code=kind.__name__)
    _log.exception("a call failed unexpectedly", exc_info=error)
    return BackendError("the gateway failed to answer this call; its log has the details", status=500, code="internal")
