"""The gateway over HTTP: the protocols' endpoints, and the list of models, at `/v1` and under each attempt's prefix.

Knows nothing of models, stores or tokens beyond what calls and endpoints offer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Final, TypeAlias
from urllib.parse import quote

import msgspec
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from agentlightning.errors import BackendError
from agentlightning.gateway.asgi import ClientWatch, Reply, as_backend_error, headers_of, path_ids_of, read_body
from agentlightning.gateway.backend import Delta, Finished, RelayedCall, Started
from agentlightning.gateway.calls import CallOpener
from agentlightning.gateway.capture import FAILED
from agentlightning.gateway.endpoints.base import Endpoint, openai_error
from agentlightning.gateway.endpoints.chat_completions import ChatCompletions
from agentlightning.gateway.endpoints.completions import Completions
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

_Answer: TypeAlias = Callable[[Scope, Receive, Reply], Awaitable[None]]


def gateway_routes(calls: CallOpener, models: ModelTable, *, body_limit: int, attributed: bool) -> list[BaseRoute]:
    """The gateway's routes, at `/v1` and, where calls can be attributed, under each attempt's own prefix."""
    shown = _App(partial(_models, calls, models))
    routes: list[BaseRoute] = []
    for prefix in ("", _PREFIX) if attributed else ("",):
        for endpoint in _ENDPOINTS:
            app = _App(partial(_answer, endpoint, calls, body_limit), endpoint.error)
            routes.append(Route(f"{prefix}/v1/{endpoint.path}", app, methods=["POST"]))
        count = _App(partial(_count, calls, body_limit), _COUNT.error)
        routes += [
            Route(f"{prefix}/v1/{_COUNT.path}", count, methods=["POST"]),
            Route(f"{prefix}/v1/models", shown, methods=["GET"]),
            Route(f"{prefix}/v1/models/{{name:path}}", shown, methods=["GET"]),
        ]
    return routes


class _App:
    """An ASGI application whose every failure becomes an error of the protocol's shape."""

    def __init__(self, answer: _Answer, error: Callable[[BackendError], bytes] = openai_error) -> None:
        self._answer = answer
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send, self._error)
        try:
            try:
                await self._answer(scope, receive, reply)
            except ClientGone:
                raise
            except Exception as error:  # noqa: BLE001 - the boundary: nothing an agent sends may show it a traceback
                await reply.fail(as_backend_error(error))
        except ClientGone:
            pass  # nobody is left to tell; the call is recorded as aborted


async def _answer(
    endpoint: Endpoint, calls: CallOpener, body_limit: int, scope: Scope, receive: Receive, reply: Reply
) -> None:
    """`POST` to an endpoint, streamed or whole."""
    headers, body = await _received(calls, body_limit, scope, receive)
    with ClientWatch(receive) as watch:
        async with await calls.open(endpoint, body, headers, path_ids_of(scope)) as call:
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
            call.refused = BackendError(f"the backend answered {answer.status}", status=answer.status)
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


async def _count(calls: CallOpener, body_limit: int, scope: Scope, receive: Receive, reply: Reply) -> None:
    """`POST /v1/messages/count_tokens`."""
    headers, body = await _received(calls, body_limit, scope, receive)
    count = await calls.count_tokens(_COUNT, body, headers, path_ids_of(scope))
    await reply.json(200, msgspec.json.encode({"input_tokens": count}))


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
