"""Calls over HTTP: each kind at its route below `/api/v1`. They go past the web framework, as most
requests of a server are these. Bodies are JSON or msgpack, by `Content-Type`; answers by
`Accept`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qsl

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from agentlightning.arrays import plain
from agentlightning.errors import AgentLightningError, InvalidError, NotFoundError, UnavailableError
from agentlightning.server.access import Access, Principal
from agentlightning.server.request_log import note_caller, note_route
from agentlightning.server.requests import ClientGoneError, defect, failure, receive_body, refusal
from agentlightning.shortages import lacking
from agentlightning.store import calls
from agentlightning.store.calls import IN_QUERY, StoreCall

PREFIX: Final = "/api/v1"
LONGEST_POLL: Final = 60.0  # seconds
MOST_ROWS: Final = 1000
_MSGPACK: Final = "application/msgpack"
_MSGPACK_HEADERS: Final = ((b"content-type", b"application/msgpack"),)
_JSON_HEADERS: Final = (  # browsers read these
    (b"content-type", b"application/json"),
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
)
# of a body of the least trusted, as decoding it holds up every other request
_ATTEMPT_BYTES: Final = 2 << 20
_OF_A_MODEL: Final = ("hold", "release", "weights")
_log: Final = logging.getLogger(__name__)

Perform: TypeAlias = Callable[[StoreCall, Principal], Coroutine[Any, Any, Any]]


class Endpoint:
    """One kind of call: the segments of its path (None where one is a field), what makes the call
    of a request, and what carries it out."""

    def __init__(self, kind: type[StoreCall], perform: Perform) -> None:
        self.kind = kind
        self.perform = perform
        self.method, _, path = kind.route.partition(" ")
        self.template = PREFIX + path
        self.segments = tuple(
            None if part.startswith("{") else part for part in path.split("/")[1:]
        )
        self.fields = tuple(calls.path_fields(path))
        self.decode = _decoder(kind)
        self.waits = "timeout" in kind.__struct_fields__
        self.none_is_missing = self.method == "GET" and kind.returns is not None

    def match(self, segments: list[str]) -> dict[str, Any] | None:
        """The fields that a path of this form gives, or None if it has another."""
        given: list[str] = []
        for own, other in zip(self.segments, segments, strict=True):
            if own is None:
                given.append(other)
            elif own != other:
                return None
        return dict(zip(self.fields, given, strict=True))


class LongPolls:
    """The calls that wait for something to answer with. `stop` answers them all at once, so that a
    server can stop."""

    def __init__(self) -> None:
        self._stopping = False
        self._waiting: set[asyncio.Future[Any]] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def stop(self) -> None:
        self._stopping = True
        for work in self._waiting:
            work.cancel()

    async def answer(self, receive: Receive, call: Coroutine[Any, Any, Any]) -> Any:
        """A call's result. Given up when its client has gone, who then must not be leased anything,
        or when the server stops: the client asks again."""
        work = asyncio.ensure_future(call)
        gone = asyncio.ensure_future(_disconnected(receive))
        gone.add_done_callback(lambda _: work.cancel())
        self._waiting.add(work)
        if self._stopping:
            work.cancel()
        try:
            await asyncio.wait([work])
        finally:
            self._waiting.discard(work)
            work.cancel()
            left = gone.done()
            gone.cancel()
        if not work.cancelled():
            return work.result()
        if left:
            raise ClientGoneError("the client left before there was an answer")
        raise UnavailableError("the server is stopping; ask again in a moment")


class Rest:
    """ASGI: answers what is under `/api/v1` and one of the calls, and passes the rest on to `app`.
    The kinds of calls come with what performs them; a body above `body_limit` bytes is refused."""

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        polls: LongPolls,
        body_limit: int,
        performed: Iterable[tuple[Iterable[type[StoreCall]], Perform]],
    ) -> None:
        self._app = app
        self._access = access
        self._polls = polls
        self._body_limit = body_limit
        self._by_length: dict[int, list[Endpoint]] = {}
        for kinds, perform in performed:
            for endpoint in (Endpoint(kind, perform) for kind in kinds):
                self._by_length.setdefault(len(endpoint.segments), []).append(endpoint)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http" or not scope["path"].startswith(f"{PREFIX}/"):
            return self._app(scope, receive, send)
        segments = _segments(scope["path"])
        allowed: list[str] = []
        for endpoint in self._by_length.get(len(segments), ()):
            fields = endpoint.match(segments)
            if fields is not None:
                if endpoint.method == scope["method"]:
                    note_route(scope, endpoint.template)
                    return self._answer(endpoint, fields, scope, receive, send)
                allowed.append(endpoint.method)
        if not allowed:
            return self._app(scope, receive, send)
        message = f"{scope['path']} takes {' or '.join(allowed)}, not {scope['method']}"
        return refusal(405, "http", message, {"Allow": ", ".join(allowed)})(scope, receive, send)

    async def _answer(
        self, endpoint: Endpoint, fields: dict[str, Any], scope: Scope, receive: Receive, send: Send
    ) -> None:
        headers = Headers(scope=scope)
        response: Response | None = None
        body = b""
        in_msgpack = _MSGPACK in headers.get("accept", "")
        try:
            result = await self._perform(endpoint, fields, headers, scope, receive)
            encode = msgspec.msgpack.encode if in_msgpack else msgspec.json.encode
            body = encode(result, enc_hook=plain)
        except AgentLightningError as error:
            response = failure(error)
        except Exception as error:  # noqa: BLE001 - shown in the log, not to the caller
            if lacking(error) is None:
                _log.exception("%s failed", endpoint.kind.method)
            response = defect(error)
        if response is not None:
            return await response(scope, receive, send)
        about = _MSGPACK_HEADERS if in_msgpack else _JSON_HEADERS
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": (*about, length)})
        await send({"type": "http.response.body", "body": body})
        return None

    async def _perform(
        self,
        endpoint: Endpoint,
        fields: dict[str, Any],
        headers: Headers,
        scope: Scope,
        receive: Receive,
    ) -> Any:
        caller = await self._access.scope(headers)
        note_caller(scope, caller.name)
        caller.require(endpoint.kind)
        if endpoint.method in IN_QUERY:
            # Of a field that is given twice the last counts, as in JSON.
            fields = {
                **dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)),
                **fields,
            }
            data = b""
        else:
            encoding = headers.get("content-encoding", "identity")
            if encoding != "identity":
                raise InvalidError(
                    f"the body is in the Content-Encoding {encoding!r}; send it unencoded"
                )
            data = await receive_body(receive, caller.body_limit(self._body_limit, _ATTEMPT_BYTES))
            self._access.count_sent(caller, len(data))
        try:
            asked = endpoint.decode(fields, data, _MSGPACK in headers.get("content-type", ""))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidError(f"{scope['method']} {scope['path']}: {error}") from None
        self._access.count_sent(caller, spans=len(getattr(asked, "spans", ())))
        caller.check(asked)
        call = _bounded(asked)
        if endpoint.waits:
            result = await self._polls.answer(receive, endpoint.perform(call, caller))
        else:
            result = await endpoint.perform(call, caller)
        if result is None and endpoint.none_is_missing:
            raise NotFoundError(f"there is nothing at {scope['path']}")
        return result


def _segments(path: str) -> list[str]:
    """The segments of a path below the prefix; a model's name, which may hold slashes, is one of
    them."""
    segments = path[len(PREFIX) + 1 :].split("/")
    if segments[0] == "models" and len(segments) > 2:
        end = len(segments) - (segments[-1] in _OF_A_MODEL)
        segments[1:end] = ["/".join(segments[1:end])]
    return segments


def _bounded(call: StoreCall) -> StoreCall:
    """The call with an answer of no more rows than a server gives at a time, before a proxy would
    cut a wait; who asked for more asks again."""
    for name, most in (("limit", MOST_ROWS), ("timeout", LONGEST_POLL)):
        asked: float | None = getattr(call, name, 0)
        if asked is None or asked > most:
            call = msgspec.structs.replace(call, **{name: most})
    return call


def _decoder(kind: type[StoreCall]) -> Callable[[Mapping[str, Any], bytes, bool], Any]:
    """The function that makes the call of the fields in the path or query, a body, and whether that
    is msgpack."""
    if kind.route.startswith(IN_QUERY):
        return lambda fields, data, in_msgpack: msgspec.convert(fields, kind, strict=False)
    if not calls.path_fields(kind.route):
        # Decoded at once: bodies of many spans come this way. One whose fields all have defaults
        # may be left out.
        from_msgpack = msgspec.msgpack.Decoder(kind)
        from_json = msgspec.json.Decoder(kind)
        return lambda fields, data, in_msgpack: (from_msgpack if in_msgpack else from_json).decode(
            data or b"{}"
        )

    def decode(fields: Mapping[str, Any], data: bytes, in_msgpack: bool) -> Any:
        body = (msgspec.msgpack if in_msgpack else msgspec.json).decode(
            data or b"{}", type=dict[str, Any]
        )
        return msgspec.convert({**body, **fields}, kind)

    return decode


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
