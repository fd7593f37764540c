"""The gateway over HTTP: the protocols' endpoints, and the list of models, at `/v1` and under each
attempt's prefix."""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import quote

import msgspec

from agentlightning.arrays import int32
from agentlightning.errors import (
    AgentLightningError,
    BackendError,
    ConfigError,
    InvalidError,
    NotFoundError,
    UnavailableError,
)
from agentlightning.gateway.backend import Delta, Finished, NotRelayedError, RelayedCall, Started
from agentlightning.gateway.calls import Calls
from agentlightning.gateway.capture import FAILED, Call
from agentlightning.gateway.endpoints.base import Endpoint
from agentlightning.gateway.endpoints.completions import ChatCompletions, Completions
from agentlightning.gateway.endpoints.gemini import GenerateContent
from agentlightning.gateway.endpoints.messages import CountTokens, Messages
from agentlightning.gateway.endpoints.passed_through import (
    HEADERS,
    AnswerCopy,
    Embeddings,
    OwnWords,
)
from agentlightning.gateway.endpoints.responses import Responses
from agentlightning.gateway.exchange import Exchange
from agentlightning.gateway.models import ANY
from agentlightning.gateway.request import CallRefused
from agentlightning.shortages import lacking

_PREFIX: Final = "/rollout/{rollout_id}/attempt/{attempt_id}"
_ENDPOINTS: Final = (ChatCompletions(), Completions(), Responses(), Messages(), Embeddings())
_BELOW: Final = ("/v1/models/", "/v1beta/models/")  # what follows is the endpoint's to read
_OTLP: Final = "/v1/traces"  # the server's own, also under an attempt's prefix
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


class Route(NamedTuple):
    """The route of a kind of request. `template` is its path with the names of what varies in
    braces; errors are sent in the endpoint's protocol."""

    template: str
    handler: _Handler
    endpoint: Endpoint


class Found(NamedTuple):
    """The route of a request, the rollout and attempt that its path names, and what of it
    varies."""

    route: Route
    ids: tuple[str, str] | None
    rest: str


class Serving:
    """Answers requests at `/v1` and, where calls can be `attributed`, under each attempt's own
    prefix. A request body above `body_limit` bytes is refused with 413."""

    def __init__(self, calls: Calls, body_limit: int, *, attributed: bool) -> None:
        self._calls = calls
        self._body_limit = body_limit
        chat = ChatCompletions()
        gemini = GenerateContent("")
        table: list[tuple[str, str, _Handler, Endpoint]] = [
            *(("POST", f"/v1/{endpoint.path}", self._answer, endpoint) for endpoint in _ENDPOINTS),
            ("POST", "/v1/messages/count_tokens", self._count, CountTokens()),
            ("POST", "/v1beta/models/{call}", self._generate, gemini),
            ("POST", "/v1/models/{call}", self._generate, gemini),
            ("GET", "/v1/responses", self._no_websocket, chat),
            ("GET", "/v1/models", self._models, chat),
            ("GET", "/v1/models/{name}", self._models, chat),
        ]
        self._routes: dict[str, dict[str, Route]] = {}  # by path, up to what varies, and by method
        for prefix in ("", _PREFIX) if attributed else ("",):
            for method, path, handler, endpoint in table:
                of_path = self._routes.setdefault(prefix + path.partition("{")[0], {})
                of_path[method] = Route(prefix + path, handler, endpoint)
        self._other = Route(f"{_PREFIX}/{{rest}}", self._unknown, chat) if attributed else None

    def find(self, method: str, path: str) -> Found | None:
        """The route for a request; None where it is none of the gateway's."""
        prefix = ""
        ids = None
        rest = ""
        parts = path.split("/", 5)
        if (
            len(parts) == 6
            and (parts[1], parts[3]) == ("rollout", "attempt")
            and parts[2]
            and parts[4]
        ):
            prefix = _PREFIX
            ids = (parts[2], parts[4])
            path = f"/{parts[5]}"
        routes = self._routes.get(prefix + path)
        if routes is None and (below := next(filter(path.startswith, _BELOW), None)) is not None:
            routes = self._routes.get(prefix + below)
            rest = path.removeprefix(below)
        if routes is None:
            ours = ids and method == "POST" and path != _OTLP and self._other
            return Found(ours, ids, path) if ours else None
        route = routes.get("GET" if method == "HEAD" else method)
        if route is None:
            route = next(iter(routes.values()))._replace(
                handler=functools.partial(_wrong_method, ", ".join(routes))
            )
        return Found(route, ids, rest)

    async def answer(self, found: Found, exchange: Exchange) -> None:
        """Every failure becomes an error of the protocol's shape, and is noted if no call was
        begun."""
        try:
            await found.route.handler(found.route.endpoint, exchange)
        except Exception as error:  # noqa: BLE001 - the agent gets an answer whatever happens
            failure = as_backend_error(error)
            try:
                if not exchange.in_call and exchange.method == "POST":
                    path = "/" + exchange.path.split("/", 5)[5] if exchange.ids else exchange.path
                    await self._calls.note_refusal(path, exchange.headers, exchange.ids, failure)
            finally:
                await exchange.fail(failure, found.route.endpoint.error)

    async def _answer(self, endpoint: Endpoint, exchange: Exchange) -> None:
        """`POST` to an endpoint, streamed or whole: the end is sent when the call is committed."""
        body = await self._body(exchange)
        async with await self._calls.open(endpoint, body, exchange.headers, exchange.ids) as call:
            exchange.in_call = True
            end = None
            if call.relayed is not None:
                try:
                    end = await _relayed(call, call.relayed, exchange)
                except NotRelayedError:
                    self._calls.translate(call, body, exchange.headers)
            del body  # it may be large, and the answer may take long
            if end is None:
                end = await _answered(call, exchange)
            exchange.shielded = True  # it is committed whether or not its client still listens
            await call.commit()
            if exchange.disconnected:
                await call.undelivered()
            else:
                await exchange.end(end)

    async def _body(self, exchange: Exchange) -> bytes:
        """The body; a large one is read into memory only for callers that may call."""
        if exchange.announced is None or exchange.announced >= _LARGE:
            await self._calls.attributor.attribute(exchange.ids, exchange.headers)
        return await exchange.read(self._body_limit)

    async def _count(self, endpoint: Endpoint, exchange: Exchange) -> None:
        """`POST /v1/messages/count_tokens` and its like."""
        body = await self._body(exchange)
        await exchange.end(
            await self._calls.count_tokens(endpoint, body, exchange.headers, exchange.ids)
        )

    async def _generate(self, endpoint: Endpoint, exchange: Exchange) -> None:
        """`POST /v1beta/models/{model}:{method}`: Google's protocol."""
        model, _, method = exchange.rest.rpartition(":")
        if method == "countTokens":
            await self._count(GenerateContent(model), exchange)
        elif method in ("generateContent", "streamGenerateContent"):
            await self._answer(GenerateContent(model, stream=method.startswith("stream")), exchange)
        else:
            known = "generateContent, streamGenerateContent, countTokens"
            raise CallRefused(
                f"models have no method {method!r} here; known: {known}",
                status=404,
                code="not_found",
            )

    async def _no_websocket(self, endpoint: Endpoint, exchange: Exchange) -> None:
        """`GET /v1/responses`: upon this answer clients that would rather use a websocket ask by
        `POST`."""
        await self._calls.attributor.check_key(exchange.headers)
        raise CallRefused(
            "responses are asked for by POST; there is no websocket here",
            status=426,
            code="no_websocket",
        )

    async def _unknown(self, endpoint: Endpoint, exchange: Exchange) -> None:
        """Answer a request of an attempt that is none of the gateway's: its other calls may still
        be answered."""
        raise CallRefused(
            f"there is no POST {exchange.rest} here; /docs lists what there is",
            status=404,
            code="not_found",
        )

    async def _models(self, endpoint: Endpoint, exchange: Exchange) -> None:
        """`GET /v1/models` and `/v1/models/{name}`, in a form that OpenAI's and Anthropic's SDKs
        both read; where any name is answered, what the backend calls its models."""
        await self._calls.attributor.check_key(exchange.headers)
        models = self._calls.models
        name = None if exchange.path.endswith("/v1/models") else exchange.rest
        anything = models.get(ANY)
        if anything is not None and "models" in anything.backend.relays:
            # would lead to other routes
            if name is not None and {".", ".."}.intersection(name.split("/")):
                raise CallRefused(
                    f"no model is called {name!r}", status=404, code="model_not_found"
                )
            kept = {
                header: value for header, value in exchange.headers.items() if header in HEADERS
            }
            path = "models" if name is None else f"models/{quote(name)}"
            async with anything.backend.relay(RelayedCall(path, "", {}, kept)) as answer:
                exchange.answers_with(answer.status, {"content-type": "application/json"})
                await exchange.end(b"".join([part async for part in answer.parts]))
            return
        names = [entry.name for entry in models]
        if name is None:
            shown = {
                "object": "list",
                "data": [_card(entry_name) for entry_name in names],
                "has_more": False,
            }
        elif name in names:
            shown = _card(name)
        else:
            known = ", ".join(sorted(names))
            raise CallRefused(
                f"no model is called {name!r}; known: {known}", status=404, code="model_not_found"
            )
        await exchange.end(msgspec.json.encode(shown))


async def _wrong_method(allowed: str, endpoint: Endpoint, exchange: Exchange) -> None:
    message = f"{exchange.path} takes {allowed}, not {exchange.method}"
    exchange.answers_with(405, {"content-type": "application/json", "allow": allowed})
    await exchange.end(endpoint.error(CallRefused(message, status=405, code="method_not_allowed")))


def _card(name: str) -> dict[str, Any]:
    """One model. When it was made is not known, which both protocols write as the epoch."""
    openai = {"object": "model", "created": 0, "owned_by": "agentlightning"}
    return {
        "id": name,
        **openai,
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }


async def _answered(call: Call, exchange: Exchange) -> bytes:
    """Send the events of a stream as they come; gives its end, or the whole answer."""
    writer = call.endpoint.writer(call.request, call.answer)
    streamed = call.request.stream
    if streamed:
        exchange.answers_with_events(writer.error)
    async with aclosing(call.events()) as events:
        async for event in events:
            call.answer.add(event)
            chunk = b""
            if streamed and isinstance(event, Delta):
                chunk = writer.delta(event)
            elif streamed and isinstance(event, Started):
                chunk = writer.started(event)
            if chunk:
                await exchange.part(chunk)
    call.answer.settle()
    # what cannot be written is not committed
    return writer.end() if streamed else writer.whole()


async def _relayed(call: Call, relayed: RelayedCall, exchange: Exchange) -> bytes:
    """The backend's own bytes: of a stream as they come, of another answer as a whole at the
    end."""
    copy = AnswerCopy()
    streamed = call.request.stream
    own = None
    if call.replaced is not None and call.endpoint.path == Responses.path:
        own = OwnWords(call.replaced, streamed=streamed)
    parts = list[bytes]()
    exchange.error_event = lambda error: (
        b"event: error\ndata: " + call.endpoint.error(error) + b"\n\n"
    )
    async with call.entry.backend.relay(relayed) as answer:
        call.answer.add(Started(int32(), replica=answer.replica))
        exchange.answers_with(answer.status, answer.headers)
        if streamed:
            await exchange.part(b"")
        try:
            async for part in answer.parts:
                copy.add(part)
                if streamed:
                    await exchange.part(part if own is None else own.part(part))
                else:
                    parts.append(part)
        finally:  # the part before a client left is recorded too
            reason = copy.read_into(call.answer)
        if answer.status >= 400:
            call.answer.abort(FAILED)
            call.refused = copy.refusal(answer.status)
        else:
            call.answer.add(Finished(0, reason))
    rest = b"".join(parts)
    return rest if own is None else own.end(rest)


def as_backend_error(error: Exception) -> BackendError:
    """The error for the agent. Details of an unexpected error are only in the log."""
    if isinstance(error, BackendError):
        return error
    for kind, (status, code) in _STATUSES.items():
        if isinstance(error, kind):
            return BackendError(str(error), status=status, code=code)
    resource = lacking(error)
    if resource is not None:
        why = f"the gateway has no more {resource} at present; try again later"
        return BackendError(why, status=503, code="out_of_resources")
    _log.exception("a call failed unexpectedly", exc_info=error)
    return BackendError(
        "the gateway failed to answer this call; its log has the details",
        status=500,
        code="internal",
    )
