"""The gateway over HTTP: the protocols' endpoints, and the list of models, at `/v1` and under each attempt's prefix.

Knows nothing of stores or tokens beyond what calls and endpoints offer.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias
from urllib.parse import quote

import msgspec
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from agentlightning.errors import (
    AgentLightningError,
    BackendError,
    ConfigError,
    InvalidError,
    NotFoundError,
    UnavailableError,
)
from agentlightning.gateway.backend import Delta, Finished, RelayedCall, Started
from agentlightning.gateway.calls import Calls
from agentlightning.gateway.capture import FAILED, Call
from agentlightning.gateway.endpoints.base import Endpoint
from agentlightning.gateway.endpoints.completions import ChatCompletions, Completions
from agentlightning.gateway.endpoints.gemini import GenerateContent
from agentlightning.gateway.endpoints.messages import CountTokens, Messages
from agentlightning.gateway.endpoints.passed_through import HEADERS, AnswerCopy, Embeddings
from agentlightning.gateway.endpoints.responses import Responses
from agentlightning.gateway.exchange import ClientGone, ClientWatch, Exchange
from agentlightning.gateway.models import ANY
from agentlightning.gateway.request import CallRefused

_PREFIX: Final = "/rollout/{rollout_id}/attempt/{attempt_id}"
_ENDPOINTS: Final = (ChatCompletions(), Completions(), Responses(), Messages(), Embeddings())
_LARGE: Final = 1 << 20  # bytes
_log = logging.getLogger(__name__)

_STATUSES: Final[Mapping[type[AgentLightningError], tuple[int, str]]] = {
    ConfigError: (400, "invalid_request"),
    NotFoundError: (404, "not_found"),
    InvalidError: (422, "invalid_request"),
    UnavailableError: (503, "service_unavailable"),
}
"""HTTP status and OpenAI error code."""

_Handler: TypeAlias = Callable[[Endpoint, Exchange], Awaitable[None]]


class Serving:
    """Answers requests. A request body above `body_limit` bytes is refused with 413."""

    def __init__(self, calls: Calls, body_limit: int) -> None:
        self._calls = calls
        self._body_limit = body_limit

    def routes(self, *, attributed: bool) -> list[BaseRoute]:
        """The routes at `/v1` and, where calls can be attributed, under each attempt's own prefix."""
        chat, gemini = ChatCompletions(), GenerateContent("")
        table: list[tuple[str, str, _Handler, Endpoint]] = [
            *(("POST", f"/v1/{endpoint.path}", self._answer, endpoint) for endpoint in _ENDPOINTS),
            ("POST", "/v1/messages/count_tokens", self._count, CountTokens()),
            ("POST", "/v1beta/models/{call:path}", self._generate, gemini),
            ("POST", "/v1/models/{call:path}", self._generate, gemini),
            ("GET", "/v1/responses", self._no_websocket, chat),
            ("GET", "/v1/models", self._models, chat),
            ("GET", "/v1/models/{name:path}", self._models, chat),
        ]
        made = [
            Route(prefix + path, _Application(handler, endpoint, self._calls), methods=[method])
            for prefix in (("", _PREFIX) if attributed else ("",))
            for method, path, handler, endpoint in table
        ]
        if attributed:
            made.append(
                Route(f"{_PREFIX}/{{rest:path}}", _Application(self._unknown, chat, self._calls), methods=["POST"])
            )
        return [*made]

    async def _answer(self, endpoint: Endpoint, exchange: Exchange) -> None:
        """`POST` to an endpoint, streamed or whole: the end is sent when the call is committed."""
        body = await self._body(exchange)
        with ClientWatch(exchange.receive) as watch:
            async with await self._calls.open(endpoint, body, exchange.headers, exchange.ids) as call:
                exchange.in_call = True
                if call.relayed is not None:
                    end = await _relayed(call, call.relayed, exchange)
                elif call.request.stream:
                    end = await _streamed(call, exchange)
                else:
                    end = await _whole(call)
                watch.disarm()
                await call.commit()
                if watch.gone:
                    await call.undelivered()
                else:
                    await exchange.end(end)

    async def _body(self, exchange: Exchange) -> bytes:
        """Memory for a large body is had by those alone who may call."""
        if int(exchange.headers.get("content-length") or _LARGE) >= _LARGE:
            await self._calls.attributor.attribute(exchange.ids, exchange.headers)
        return await exchange.body(self._body_limit)

    async def _count(self, endpoint: Endpoint, exchange: Exchange) -> None:
        """`POST /v1/messages/count_tokens` and its like."""
        body = await self._body(exchange)
        count = await self._calls.count_tokens(endpoint, body, exchange.headers, exchange.ids)
        await exchange.end(msgspec.json.encode({endpoint.counted_as: count}))

    async def _generate(self, endpoint: Endpoint, exchange: Exchange) -> None:
        """`POST /v1beta/models/{model}:{method}`: Google's protocol."""
        model, _, method = exchange.params["call"].rpartition(":")
        if method == "countTokens":
            await self._count(GenerateContent(model), exchange)
        elif method in ("generateContent", "streamGenerateContent"):
            await self._answer(GenerateContent(model, stream=method.startswith("stream")), exchange)
        else:
            known = "generateContent, streamGenerateContent, countTokens"
            raise CallRefused(f"models have no method {method!r} here; known: {known}", status=404, code="not_found")

    async def _no_websocket(self, endpoint: Endpoint, exchange: Exchange) -> None:
        """`GET /v1/responses`: upon this answer clients that would rather use a websocket ask by `POST`."""
        await self._calls.attributor.check_key(exchange.headers)
        raise CallRefused(
            "responses are asked for by POST; there is no websocket here", status=426, code="no_websocket"
        )

    async def _unknown(self, endpoint: Endpoint, exchange: Exchange) -> None:
        """What an attempt asks for that is none of the gateway's: its other calls may still be answered."""
        path = exchange.params["rest"]
        raise CallRefused(f"there is no POST /{path} here; /docs lists what there is", status=404, code="not_found")

    async def _models(self, endpoint: Endpoint, exchange: Exchange) -> None:
        """`GET /v1/models` and `/v1/models/{name}`, in a form that OpenAI's and Anthropic's SDKs both read; where any
        name is answered, what the backend calls its models."""
        await self._calls.attributor.check_key(exchange.headers)
        name, models = exchange.params.get("name"), self._calls.models
        anything = models.get(ANY)
        if anything is not None and "models" in anything.backend.relays:
            if name is not None and {".", ".."}.intersection(name.split("/")):  # would lead to other routes
                raise CallRefused(f"no model is called {name!r}", status=404, code="model_not_found")
            kept = {header: value for header, value in exchange.headers.items() if header in HEADERS}
            path = "models" if name is None else f"models/{quote(name)}"
            async with anything.backend.relay(RelayedCall(path, "", {}, kept)) as answer:
                exchange.answers_with(answer.status, {"content-type": "application/json"})
                await exchange.end(b"".join([part async for part in answer.parts]))
            return
        names = [entry.name for entry in models]
        if name is None:
            shown = {"object": "list", "data": [_card(one) for one in names], "has_more": False}
        elif name in names:
            shown = _card(name)
        else:
            known = ", ".join(sorted(names))
            raise CallRefused(f"no model is called {name!r}; known: {known}", status=404, code="model_not_found")
        await exchange.end(msgspec.json.encode(shown))


def _card(name: str) -> dict[str, Any]:
    """One model. When it was made is not known, which both protocols write as the epoch."""
    openai = {"object": "model", "created": 0, "owned_by": "agentlightning"}
    return {"id": name, **openai, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


async def _whole(call: Call) -> bytes:
    async with aclosing(call.events()) as events:
        async for event in events:
            call.answer.add(event)
    return call.endpoint.whole(call.request, call.answer)  # what cannot be written is not committed


async def _streamed(call: Call, exchange: Exchange) -> bytes:
    """Send events as they come; gives the ends of the choices."""
    writer = call.endpoint.stream(call.request, call.answer)
    exchange.answers_with_events(writer.error)
    async with aclosing(call.events()) as events:
        async for event in events:
            call.answer.add(event)
            chunk = b""
            if isinstance(event, Delta):
                chunk = writer.delta(event)
            elif isinstance(event, Started):
                chunk = writer.started(event)
            if chunk:
                await exchange.part(chunk)
    return writer.end()


async def _relayed(call: Call, relayed: RelayedCall, exchange: Exchange) -> bytes:
    """The backend's own bytes: of a stream as they come, of another answer as a whole at the end."""
    copy, streamed, parts = AnswerCopy(), call.request.stream, list[bytes]()
    exchange.error_event = lambda error: b"event: error\ndata: " + call.endpoint.error(error) + b"\n\n"
    async with call.entry.backend.relay(relayed) as answer:
        call.answer.add(Started((), replica=answer.replica))
        exchange.answers_with(answer.status, answer.headers)
        if streamed:
            await exchange.part(b"")
        try:
            async for part in answer.parts:
                copy.add(part)
                if streamed:
                    await exchange.part(part)
                else:
                    parts.append(part)
        finally:  # what was said before a client left is recorded too
            reason = copy.read_into(call.answer, streamed=streamed)
        if answer.status >= 400:
            call.answer.abort(FAILED)
            call.refused = copy.refusal(answer.status)
        else:
            call.answer.add(Finished(0, reason))
    return b"".join(parts)


@dataclass(eq=False)
class _Application:
    """An ASGI application whose every failure becomes an error of the protocol's shape, and is noted if no call was
    begun."""

    handler: _Handler
    endpoint: Endpoint
    calls: Calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        with suppress(ClientGone):  # nobody is left to tell; the call is recorded as aborted
            try:
                await self.handler(self.endpoint, exchange)
            except ClientGone:
                raise
            except Exception as error:  # noqa: BLE001 - the agent gets an answer whatever happens
                told = as_backend_error(error)
                try:
                    if not exchange.in_call and scope["method"] == "POST":
                        path = "/" + scope["path"].split("/", 5)[5] if exchange.ids else scope["path"]
                        await self.calls.note_refusal(path, exchange.headers, exchange.ids, told)
                finally:
                    await exchange.fail(told, self.endpoint.error)


def as_backend_error(error: Exception) -> BackendError:
    """What an agent is told. An error that is not one of ours is logged in full and told in one sentence."""
    if isinstance(error, BackendError):
        return error
    for kind, (status, code) in _STATUSES.items():
        if isinstance(error, kind):
            return BackendError(str(error), status=status, code=code)
    _log.exception("a call failed unexpectedly", exc_info=error)
    return BackendError("the gateway failed to answer this call; its log has the details", status=500, code="internal")


class Shortcut:
    """LLM calls past the web framework, whose routing and layers around a route cost a tenth of a call.

    ASGI: takes POST requests to those of the gateway's `routes` that are `/v1/…`, or the same under an attempt's
    prefix, straight to their endpoints; all others go to `app`, which has these routes too."""

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        posts = [route for route in routes if isinstance(route, Route) and route.methods == {"POST"}]
        self._routes = {route.path: route for route in posts}

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "http" and scope["method"] == "POST":
            prefix, _, name = scope["path"].partition("/v1/")
            parts, params = prefix.split("/"), dict[str, str]()
            if len(parts) == 5 and (parts[1], parts[3]) == ("rollout", "attempt") and parts[2] and parts[4]:
                params = {"rollout_id": parts[2], "attempt_id": parts[4]}
                prefix = _PREFIX
            route = self._routes.get(f"{prefix}/v1/{name}")
            if route is not None and "{" not in name:
                scope["path_params"] = params
                return route.app(scope, receive, send)
        return self._app(scope, receive, send)
