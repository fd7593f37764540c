"""The gateway over HTTP: the protocols' endpoints, and the list of models, at `/v1` and under each attempt's prefix.

Knows nothing of models, stores or tokens beyond what calls and endpoints offer.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, Final
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
_ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    ChatCompletions(),
    Completions(),
    Responses(),
    Messages(),
    Embeddings(),
)


def gateway_routes(calls: CallOpener, models: ModelTable, *, body_limit: int, attributed: bool) -> list[BaseRoute]:
    """The gateway's routes, at `/v1` and, where calls can be attributed, under each attempt's own prefix."""
    answering = [_Answering(endpoint, calls, body_limit) for endpoint in _ENDPOINTS]
    counting = _Counting(calls, body_limit)
    cards = _Models(calls, models)
    kept = _KeptResponse(calls)
    routes: list[BaseRoute] = []
    for prefix in ("", _PREFIX) if attributed else ("",):
        routes += [Route(f"{prefix}/v1/{one.endpoint.path}", one, methods=["POST"]) for one in answering]
        routes += [
            Route(f"{prefix}/v1/responses/{{response_id}}", kept, methods=["GET", "DELETE"]),
            Route(f"{prefix}/v1/{counting.endpoint.path}", counting, methods=["POST"]),
            Route(f"{prefix}/v1/models", cards, methods=["GET"]),
            Route(f"{prefix}/v1/models/{{name:path}}", cards, methods=["GET"]),
        ]
    return routes


class _Route(abc.ABC):
    """An ASGI application whose every failure becomes an error of the protocol's shape."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send, self.error)
        try:
            try:
                await self.answer(scope, receive, reply)
            except ClientGone:
                raise
            except Exception as error:  # noqa: BLE001 - the boundary: nothing an agent sends may show it a traceback
                await reply.fail(as_backend_error(error))
        except ClientGone:
            pass  # nobody is left to tell; the call is recorded as aborted

    def error(self, error: BackendError) -> bytes:
        return openai_error(error)

    @abc.abstractmethod
    async def answer(self, scope: Scope, receive: Receive, reply: Reply) -> None: ...


class _Answering(_Route):
    """`POST` to an endpoint, streamed or whole."""

    def __init__(self, endpoint: Endpoint, calls: CallOpener, body_limit: int) -> None:
        self.endpoint = endpoint
        self._calls = calls
        self._body_limit = body_limit

    def error(self, error: BackendError) -> bytes:
        return self.endpoint.error(error)

    async def answer(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        headers = headers_of(scope)
        body = await read_body(headers, receive, self._body_limit)
        with ClientWatch(receive) as watch:
            call = await self._calls.open(self.endpoint, body, headers, path_ids_of(scope))
            async with call:
                if call.relayed is not None:
                    await self._pass_through(call, reply, watch)
                elif call.request.stream:
                    await self._stream(call, reply, watch)
                else:
                    await self._whole(call, reply, watch)

    async def _whole(self, call: RunningCall, reply: Reply, watch: ClientWatch) -> None:
        async with aclosing(call.events()) as events:
            async for event in events:
                call.answer.add(event)
        body = self.endpoint.whole(call.request, call.answer, call.head)  # what cannot be written is not committed
        if await _commit(call, watch):
            await reply.json(200, body)

    async def _stream(self, call: RunningCall, reply: Reply, watch: ClientWatch) -> None:
        """Events as they come. The ends of the choices wait until the call is committed."""
        writer = self.endpoint.stream(call.request, call.head)
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

    async def _pass_through(self, call: RunningCall, reply: Reply, watch: ClientWatch) -> None:
        """The backend's own bytes: a stream as it comes, its end when the call is committed; an answer as a whole."""
        copy, streamed = AnswerCopy(), call.request.stream
        reply.in_stream = lambda error: b"event: error\ndata: " + self.endpoint.error(error) + b"\n\n"
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


async def _relay_models(entry: ModelEntry, scope: Scope, headers: dict[str, str], reply: Reply) -> None:
    """The backend's own list: what it calls its models is what it can be asked for."""
    name = scope["path_params"].get("name")
    if name is not None and {".", ".."}.intersection(name.split("/")):  # would lead to other routes of the backend
        raise CallRefused(f"no model is called {name!r}", status=404, code="model_not_found")
    kept = {header: value for header, value in headers.items() if header in HEADERS}
    path = "models" if name is None else f"models/{quote(name)}"
    async with entry.backend.relay(RelayedCall(path, "", {}, kept)) as answer:
        body = b"".join([part async for part in answer.parts])
        await reply.json(answer.status, body)


class _KeptResponse(_Route):
    """`GET` and `DELETE /v1/responses/{response_id}`, of recent responses."""

    def __init__(self, calls: CallOpener) -> None:
        self._calls = calls

    async def answer(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        caller = await self._calls.caller(headers_of(scope), path_ids_of(scope))
        response_id = scope["path_params"]["response_id"]
        if b"stream=true" in scope["query_string"]:
            raise CallRefused("a response is not streamed again; leave stream out", param="stream")
        if scope["method"] == "DELETE":
            self._calls.conversations.delete(caller, response_id)
            body = msgspec.json.encode({"id": response_id, "object": "response", "deleted": True})
        else:
            body = self._calls.conversations.body(caller, response_id)
        await reply.json(200, body)


class _Counting(_Route):
    """`POST /v1/messages/count_tokens`."""

    def __init__(self, calls: CallOpener, body_limit: int) -> None:
        self.endpoint = CountTokens()
        self._calls = calls
        self._body_limit = body_limit

    def error(self, error: BackendError) -> bytes:
        return self.endpoint.error(error)

    async def answer(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        headers = headers_of(scope)
        body = await read_body(headers, receive, self._body_limit)
        count = await self._calls.count_tokens(self.endpoint, body, headers, path_ids_of(scope))
        await reply.json(200, self.endpoint.counted(count))


class _Models(_Route):
    """`GET /v1/models` and `/v1/models/{name}`, in Anthropic's form for those who speak its protocol."""

    def __init__(self, calls: CallOpener, models: ModelTable) -> None:
        self._calls = calls
        self._models = models

    async def answer(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        headers = headers_of(scope)
        card, listed = _card, _list
        if "anthropic-version" in headers:
            card, listed, reply.encode = model_card, model_list, anthropic_error
        await self._calls.admit(headers)
        anything = self._models.get(ANY)
        if anything is not None and "models" in anything.backend.relays:
            await _relay_models(anything, scope, headers, reply)
            return
        names = [entry.name for entry in self._models]
        name = scope["path_params"].get("name")
        if name is None:
            await reply.json(200, msgspec.json.encode(listed(names)))
        elif name in names:
            await reply.json(200, msgspec.json.encode(card(name)))
        else:
            known = ", ".join(sorted(names))
            raise CallRefused(f"no model is called {name!r}; known: {known}", status=404, code="model_not_found")


def _card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "agentlightning"}


def _list(names: Sequence[str]) -> dict[str, Any]:
    return {"object": "list", "data": [_card(name) for name in names]}
