"""The store as REST: every call of `store.calls` at its route, and the few lines that run any of them.

Bodies are JSON or msgpack, by `Content-Type`; answers by `Accept`. This module does not decide anything: what is
allowed is decided by `access` and by the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from agentlightning.errors import AgentLightningError, InvalidError, NotFoundError, UnavailableError
from agentlightning.server.access import Access
from agentlightning.store import calls
from agentlightning.store.base import LightningStore
from agentlightning.store.calls import Call

_MSGPACK: Final = "application/msgpack"


class TooLargeError(AgentLightningError):
    """The body is longer than this server takes (HTTP 413)."""


class StoreRoutes:
    """The routes of one store. `stop_waiting` answers all long polls at once, so that a server can stop."""

    def __init__(self, store: LightningStore, access: Access, body_limit: int) -> None:
        self._store = store
        self._access = access
        self._body_limit = body_limit
        self._stopping = asyncio.Event()

    def routes(self) -> list[BaseRoute]:
        return [self._route(kind) for kind in calls.all_calls()]

    def stop_waiting(self) -> None:
        self._stopping.set()

    def _route(self, kind: type[Call[Any]]) -> Route:
        method, _, path = kind.route.partition(" ")
        decode = _decoder(kind)
        waits = "timeout" in kind.__struct_fields__

        async def answer(request: Request) -> Response:
            scope = await self._access.scope(request.headers)
            scope.require(kind)
            data = b"" if method == "GET" else await read_body(request, self._body_limit)
            call = await self._access.confine(scope, decode(request, data))
            performing = self._store.perform(call)
            result = await (self._until_gone(request, performing) if waits else performing)
            if result is None and kind.returns() is not None and method == "GET":
                raise NotFoundError(f"there is nothing at {request.url.path}")
            return _answer(request, result)

        endpoint: Callable[[Request], Coroutine[Any, Any, Response]] = answer
        return Route(path, endpoint, methods=[method], name=kind.__name__)

    async def _until_gone(self, request: Request, call: Awaitable[Any]) -> Any:
        """A long poll's result. Given up when its client has gone, who then must not be leased anything, or when the
        server stops: the client asks again."""
        work = asyncio.ensure_future(call)
        gone = asyncio.ensure_future(_disconnected(request))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait([work, gone, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone, stopping):
                task.cancel()
            await asyncio.wait([work, gone, stopping])
        if not work.cancelled():
            return work.result()
        raise UnavailableError("the server is stopping; ask again in a moment")


def _decoder(kind: type[Call[Any]]) -> Callable[[Request, bytes], Any]:
    """What makes the call of a request. InvalidError says where it is malformed."""
    in_path = calls.path_fields(kind.route)
    # Decoded at once where the path names nothing: bodies of many spans come this way.
    from_msgpack = msgspec.msgpack.Decoder(kind).decode if not in_path else msgspec.msgpack.decode
    from_json = msgspec.json.Decoder(kind).decode if not in_path else msgspec.json.decode

    def decode(request: Request, data: bytes) -> Any:
        try:
            if request.method == "GET":
                return msgspec.convert({**request.query_params, **request.path_params}, kind, strict=False)
            if _MSGPACK in request.headers.get("content-type", ""):
                body = from_msgpack(data)
            else:
                # A call whose fields all have defaults may leave its body out.
                body = from_json(data or b"{}")
            if not in_path:
                return body
            if not isinstance(body, dict):
                raise InvalidError(f"{request.method} {request.url.path}: the body must be an object")
            return msgspec.convert({**body, **request.path_params}, kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidError(f"{request.method} {request.url.path}: {error}") from None

    return decode


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body; TooLargeError once it exceeds `limit` bytes."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > limit:
            raise TooLargeError(f"the body is longer than the {limit} bytes this server takes; send it in parts")
    return bytes(data)


def _answer(request: Request, value: Any) -> Response:
    if _MSGPACK in request.headers.get("accept", ""):
        return Response(msgspec.msgpack.encode(value), media_type=_MSGPACK)
    return Response(msgspec.json.encode(value), media_type="application/json")
