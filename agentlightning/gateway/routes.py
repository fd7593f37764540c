"""The gateway over HTTP: the protocols' endpoints, and the list of models, at `/v1` and under each attempt's prefix.

Plain ASGI under Starlette's routing: every call passes here, and a framework's request and response objects would cost
more than the work itself. Knows nothing of models, stores or tokens beyond what calls and endpoints offer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Final, TypeAlias
from urllib.parse import quote

import msgspec
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentlightning.errors import (
    AgentLightningError,
    BackendError,
    ConfigError,
    InvalidError,
    NotFoundError,
    UnavailableError,
)
from agentlightning.gateway.backend import Delta, Finished, RelayedCall, Started
from agentlightning.gateway.calls import CallOpener
from agentlightning.gateway.capture import FAILED
from agentlightning.gateway.endpoints.base import Endpoint, openai_error
from agentlightning.gateway.endpoints.completions import ChatCompletions, Completions
from agentlightning.gateway.endpoints.gemini import GenerateContent
from agentlightning.gateway.endpoints.gemini_answer import google_error
from agentlightning.gateway.endpoints.messages import CountTokens, Messages
from agentlightning.gateway.endpoints.messages_answer import anthropic_error, model_card, model_list
from agentlightning.gateway.endpoints.passed_through import HEADERS, AnswerCopy, Embeddings
from agentlightning.gateway.endpoints.responses import Responses
from agentlightning.gateway.models import ANY, ModelEntry, ModelTable
from agentlightning.gateway.request import CallRefused
from agentlightning.gateway.running import ClientGone, RunningCall

_PREFIX: Final = "/rollout/{rollout_id}/attempt/{attempt_id}"
_ENDPOINTS: Final = (ChatCompletions(), Completions(), Responses(), Messages(), Embeddings())
_COUNT: Final = CountTokens()
_LARGE: Final = 1 << 20  # bytes
_log = logging.getLogger(__name__)

_TOLD_AS: Final[Mapping[type[AgentLightningError], tuple[int, str]]] = {
    ConfigError: (400, "invalid_request"),
    NotFoundError: (404, "not_found"),
    InvalidError: (422, "invalid_request"),
    UnavailableError: (503, "service_unavailable"),
}
"""HTTP status and OpenAI error code."""

_Answer: TypeAlias = "Callable[[Scope, Receive, Reply], Awaitable[None]]"


def gateway_routes(calls: CallOpener, models: ModelTable, *, body_limit: int, attributed: bool) -> list[BaseRoute]:
    """The gateway's routes, at `/v1` and, where calls can be attributed, under each attempt's own prefix."""
    shown = _App(partial(_models, calls, models))
    routes: list[BaseRoute] = []
    for prefix in ("", _PREFIX) if attributed else ("",):
        for endpoint in _ENDPOINTS:
            app = _App(partial(_answer, endpoint, calls, body_limit), endpoint.error, calls)
            routes.append(Route(f"{prefix}/v1/{endpoint.path}", app, methods=["POST"]))
        count = _App(partial(_count, _COUNT, "input_tokens", calls, body_limit), _COUNT.error, calls)
        generate = _App(partial(_generate, calls, body_limit), google_error, calls)
        routes += [
            Route(f"{prefix}/v1/{_COUNT.path}", count, methods=["POST"]),
            Route(f"{prefix}/v1/responses", _App(partial(_no_websocket, calls)), methods=["GET"]),
            *(Route(f"{prefix}/{one}/models/{{call:path}}", generate, methods=["POST"]) for one in ("v1beta", "v1")),
            Route(f"{prefix}/v1/models", shown, methods=["GET"]),
            Route(f"{prefix}/v1/models/{{name:path}}", shown, methods=["GET"]),
        ]
    if attributed:
        routes.append(Route(f"{_PREFIX}/{{rest:path}}", _App(_unknown, calls=calls), methods=["POST"]))
    return routes


class Shortcut:
    """LLM calls past the web framework, whose routing and layers around a route cost a tenth of a call.

    ASGI: takes POST requests to those of the gateway's `routes` that are `/v1/…`, or the same under an attempt's
    prefix, straight to their endpoints; all others go to `app`, which has these routes too."""

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        self._plain: dict[str, Route] = {}
        self._attributed: dict[str, Route] = {}
        for route in routes:
            if isinstance(route, Route) and route.methods == {"POST"}:
                prefix, _, name = route.path.partition("/v1/")
                {"": self._plain, _PREFIX: self._attributed}.get(prefix, {})[name] = route

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "http" and scope["method"] == "POST":
            prefix, _, name = scope["path"].partition("/v1/")
            parts = prefix.split("/")
            route = self._plain.get(name) if not prefix else None
            params: dict[str, str] = {}
            if len(parts) == 5 and (parts[1], parts[3]) == ("rollout", "attempt") and parts[2] and parts[4]:
                route = self._attributed.get(name)
                params = {"rollout_id": parts[2], "attempt_id": parts[4]}
            if route is not None:
                scope["path_params"] = params
                return route.app(scope, receive, send)
        return self._app(scope, receive, send)


@dataclass(eq=False)
class _App:
    """An ASGI application whose every failure becomes an error of the protocol's shape, and is noted by `calls` if no
    call was begun."""

    answer: _Answer
    error: Callable[[BackendError], bytes] = openai_error
    calls: CallOpener | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send, self.error)
        with suppress(ClientGone):  # nobody is left to tell; the call is recorded as aborted
            try:
                await self.answer(scope, receive, reply)
            except ClientGone:
                raise
            except Exception as error:  # noqa: BLE001 - the boundary: nothing an agent sends may show it a traceback
                told = as_backend_error(error)
                try:
                    if self.calls is not None and not reply.of_call:
                        ids, path = path_ids_of(scope), scope["path"]
                        path = "/" + path.split("/", 5)[5] if ids else path
                        await self.calls.note_refusal(path, headers_of(scope), ids, told)
                finally:
                    await reply.fail(told)


async def _answer(
    endpoint: Endpoint, calls: CallOpener, body_limit: int, scope: Scope, receive: Receive, reply: Reply
) -> None:
    """`POST` to an endpoint, streamed or whole."""
    headers, body = await _received(calls, body_limit, scope, receive)
    with ClientWatch(receive) as watch:
        async with await calls.open(endpoint, body, headers, path_ids_of(scope)) as call:
            reply.of_call = True
            if call.relayed is not None:
                await _pass_through(endpoint, call, reply, watch)
            elif call.request.stream:
                await _stream(endpoint, call, reply, watch)
            else:
                await _whole(endpoint, call, reply, watch)


async def _received(calls: CallOpener, body_limit: int, scope: Scope, receive: Receive) -> tuple[dict[str, str], bytes]:
    """A request's headers and body. Memory for a large body is had with a key alone, where one is needed."""
    headers = headers_of(scope)
    if int(headers.get("content-length") or _LARGE) >= _LARGE:
        await calls.admit(headers)
    return headers, await read_body(headers, receive, body_limit)


async def _whole(endpoint: Endpoint, call: RunningCall, reply: Reply, watch: ClientWatch) -> None:
    async with aclosing(call.events()) as events:
        async for event in events:
            call.answer.add(event)
    body = endpoint.whole(call.request, call.answer, call.head)  # what cannot be written is not committed
    if await _commit(call, watch):
        await reply.json(200, body)


async def _stream(endpoint: Endpoint, call: RunningCall, reply: Reply, watch: ClientWatch) -> None:
    """Events as they come. The ends of the choices wait until the call is committed."""
    writer = endpoint.stream(call.request, call.head)
    reply.in_stream = writer.error
    async with aclosing(call.events()) as events:
        async for event in events:
            call.answer.add(event)
            if isinstance(event, Delta):
                chunk = writer.delta(event)
            elif isinstance(event, Started):
                chunk = writer.started(event)
            else:
                continue
            if chunk:
                await reply.part(chunk)
    end = writer.end(call.answer)
    if await _commit(call, watch):
        await reply.part(end, more=False)


async def _pass_through(endpoint: Endpoint, call: RunningCall, reply: Reply, watch: ClientWatch) -> None:
    """The backend's own bytes: a stream as it comes, its end when the call is committed; an answer as a whole."""
    copy, streamed = AnswerCopy(), call.request.stream
    reply.in_stream = lambda error: b"event: error\ndata: " + endpoint.error(error) + b"\n\n"
    async with call.relay() as answer:
        call.answer.replica = answer.replica
        headers = [(name.encode(), value.encode("latin-1", "replace")) for name, value in answer.headers.items()]
        parts: list[bytes] = []
        if streamed:
            await reply.start(answer.status, *headers)
        try:
            async for part in answer.parts:
                copy.add(part)
                if streamed:
                    await reply.body(part, more=True)
                else:
                    parts.append(part)
        finally:  # what was said before a client left is recorded too
            reason = copy.read_into(call.answer, streamed=streamed)
        if answer.status >= 400:
            call.answer.abort(FAILED)
            call.refused = copy.refusal(answer.status)
        else:
            call.answer.add(Finished(0, reason))
    if await _commit(call, watch):
        if not streamed:
            await reply.start(answer.status, *headers)
        await reply.body(b"".join(parts), more=False)


async def _commit(call: RunningCall, watch: ClientWatch) -> bool:
    """Store a call that is complete. False if its client left before the end could be sent."""
    watch.disarm()
    await call.commit()
    if watch.gone:
        await call.undelivered()
    return not watch.gone


async def _count(
    endpoint: Endpoint, told_as: str, calls: CallOpener, body_limit: int, scope: Scope, receive: Receive, reply: Reply
) -> None:
    """`POST /v1/messages/count_tokens` and its like."""
    headers, body = await _received(calls, body_limit, scope, receive)
    count = await calls.count_tokens(endpoint, body, headers, path_ids_of(scope))
    await reply.json(200, msgspec.json.encode({told_as: count}))


async def _generate(calls: CallOpener, body_limit: int, scope: Scope, receive: Receive, reply: Reply) -> None:
    """`POST /v1beta/models/{model}:{method}`: Google's protocol."""
    model, _, method = scope["path_params"]["call"].rpartition(":")
    if method == "countTokens":
        await _count(GenerateContent(model), "totalTokens", calls, body_limit, scope, receive, reply)
        return
    if method not in ("generateContent", "streamGenerateContent"):
        known = "generateContent, streamGenerateContent, countTokens"
        raise CallRefused(f"models have no method {method!r} here; known: {known}", status=404, code="not_found")
    streamed, as_events = method.startswith("stream"), b"alt=sse" in scope["query_string"].split(b"&")
    endpoint = GenerateContent(model, stream=streamed and as_events, listed=streamed and not as_events)
    await _answer(endpoint, calls, body_limit, scope, receive, reply)


async def _no_websocket(calls: CallOpener, scope: Scope, receive: Receive, reply: Reply) -> None:
    """`GET /v1/responses`: the answer upon which clients that would rather use a websocket ask by `POST` at once."""
    await calls.admit(headers_of(scope))
    raise CallRefused("responses are asked for by POST; there is no websocket here", status=426, code="no_websocket")


async def _unknown(scope: Scope, receive: Receive, reply: Reply) -> None:
    """What an attempt asks for that is none of the gateway's: its other calls may still be answered."""
    path = scope["path_params"]["rest"]
    raise CallRefused(f"there is no POST /{path} here; /docs lists what there is", status=404, code="not_found")


async def _models(calls: CallOpener, models: ModelTable, scope: Scope, receive: Receive, reply: Reply) -> None:
    """`GET /v1/models` and `/v1/models/{name}`, in Anthropic's form for those who speak its protocol."""
    headers, name = headers_of(scope), scope["path_params"].get("name")
    anthropic = "anthropic-version" in headers
    if anthropic:
        reply.encode = anthropic_error
    await calls.admit(headers)
    anything = models.get(ANY)
    if anything is not None and "models" in anything.backend.relays:
        await _relay_models(anything, name, headers, reply)
        return
    names = [entry.name for entry in models]
    if name is not None and name not in names:
        known = ", ".join(sorted(names))
        raise CallRefused(f"no model is called {name!r}; known: {known}", status=404, code="model_not_found")
    if anthropic:
        shown = model_list(names) if name is None else model_card(name)
    else:
        created = {"object": "model", "created": 0, "owned_by": "agentlightning"}
        cards = [{"id": one, **created} for one in names if name in (None, one)]
        shown = {"object": "list", "data": cards} if name is None else cards[0]
    await reply.json(200, msgspec.json.encode(shown))


async def _relay_models(entry: ModelEntry, name: str | None, headers: dict[str, str], reply: Reply) -> None:
    """The backend's own list: what it calls its models is what it can be asked for."""
    if name is not None and {".", ".."}.intersection(name.split("/")):  # would lead to other routes of the backend
        raise CallRefused(f"no model is called {name!r}", status=404, code="model_not_found")
    kept = {header: value for header, value in headers.items() if header in HEADERS}
    path = "models" if name is None else f"models/{quote(name)}"
    async with entry.backend.relay(RelayedCall(path, "", {}, kept)) as answer:
        body = b"".join([part async for part in answer.parts])
        await reply.json(answer.status, body)


# --- ASGI -------------------------------------------------------------------------------------------------------


class Reply:
    """What is sent back. `encode` writes an error as the protocol does; `in_stream`, which a stream sets, writes one
    that comes after its first part."""

    def __init__(self, send: Send, encode: Callable[[BackendError], bytes]) -> None:
        self.in_stream: Callable[[BackendError], bytes] | None = None
        self.of_call = False
        self._send = send
        self.encode = encode
        self._began = False

    async def json(self, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self.start(status, (b"content-type", b"application/json"), length, *headers)
        await self.body(body, more=False)

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
