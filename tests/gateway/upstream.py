"""Servers that stand in for vLLM: they give the answers they were made with, streamed or whole,
remember what they were asked, and can be slow, full, broken and unhealthy at will."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from agentlightning.gateway.backends.http import HttpBackend
from agentlightning.gateway.models import ModelEntry
from agentlightning.server.serve import HttpServer
from agentlightning.store.sql import SqlStore
from tests.gateway.world import GREEDY, World, fronting, serving

DONE = "data: [DONE]\n\n"


def chunk(*choices: dict[str, Any], **more: Any) -> str:
    body = {"id": "1", "object": "chat.completion.chunk", "choices": list(choices), **more}
    return f"data: {json.dumps(body)}\n\n"


def piece(text: str, ids: list[int], logprobs: list[float], **more: Any) -> dict[str, Any]:
    """A choice of a chunk as vLLM writes it."""
    content = [
        {"token": "?", "logprob": value, "bytes": None, "top_logprobs": []} for value in logprobs
    ]
    return {
        "index": 0,
        "delta": {"content": text},
        "logprobs": {"content": content},
        "token_ids": ids,
        **more,
    }


GOOD = [
    chunk({"index": 0, "delta": {"role": "assistant", "content": ""}}, prompt_token_ids=[1, 2, 3]),
    chunk(piece("Hi", [4], [-0.5])),
    chunk(piece("!", [5, 6], [-0.25, -0.125], finish_reason="stop", stop_reason=None)),
    chunk(usage={"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}),
    DONE,
]
UNTOLD = [chunk({"index": 0, "delta": {"content": "Hi!"}, "finish_reason": "stop"}), DONE]  # no ids


def whole(events: list[str]) -> dict[str, Any]:
    """The answer that is not streamed, of the chunks of one that is. One choice."""
    answer: dict[str, Any] = {"id": "1", "object": "chat.completion"}
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": ""},
        "finish_reason": None,
    }
    for event in events:
        if event == DONE:
            continue
        part = json.loads(event.removeprefix("data: "))
        answer |= {name: value for name, value in part.items() if name not in ("choices", "object")}
        for one in part["choices"]:
            choice["message"]["content"] += one["delta"].get("content") or ""
            choice.setdefault("token_ids", []).extend(one.get("token_ids", []))
            if one.get("logprobs"):
                choice.setdefault("logprobs", {"content": []})["content"].extend(
                    one["logprobs"]["content"]
                )
            choice |= {
                name: one[name]
                for name in ("finish_reason", "stop_reason")
                if one.get(name) is not None
            }
    return {**answer, "choices": [choice]}


class Upstream:
    """Answers with the given events, or refuses."""

    def __init__(self, events: list[str], status: int = 200, error: Any = None) -> None:
        self.events, self.status, self.error = events, status, error
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []

    async def answer(self, request: Request) -> Response:
        asked = await request.json()
        self.asked.append(asked)
        self.headers.append(dict(request.headers))
        if self.status != 200:
            return JSONResponse(self.error, self.status)
        if not asked.get("stream"):
            return JSONResponse(whole(self.events))
        return StreamingResponse(iter(self.events), media_type="text/event-stream")

    @asynccontextmanager
    async def backend(self, **options: Any) -> AsyncIterator[HttpBackend]:
        app = Starlette(routes=[Route("/v1/chat/completions", self.answer, methods=["POST"])])
        async with serving(app) as url:
            backend = HttpBackend(f"{url}/v1", **options)
            try:
                yield backend
            finally:
                await backend.close()


class Server(Upstream):
    """Of `http`. `behaviour` says what becomes of a call; while `hold` is set calls wait before
    that. What it is `told` on its `control` routes it does once it has `loaded`; `fails` holds the
    status of a path, 200 for an answer that says so."""

    def __init__(self, control: Sequence[str] = ()) -> None:
        super().__init__(GOOD)
        self.behaviour = "answers"
        self.healthy = True
        self.running = 0
        self._go_on = asyncio.Event()
        self._go_on.set()
        self._end = asyncio.Event()
        paths = ("/v1/chat/completions", "/v1/embeddings", "/tokenize")
        routes = [Route(path, self.answer, methods=["POST"]) for path in paths]
        routes += [Route(path, self._control, methods=["POST"]) for path in control]
        routes.append(Route("/health", self._health))
        self.told: list[tuple[str, Any]] = []
        self.fails: dict[str, int] = {}
        self.loaded = asyncio.Event()
        self.loaded.set()
        self.http = HttpServer(Starlette(routes=routes))

    @property
    def url(self) -> str:
        return f"{self.http.url}/v1"

    def hold(self) -> None:
        self._go_on.clear()

    def release(self) -> None:
        self._go_on.set()

    def end(self) -> None:
        self.release()
        self.loaded.set()
        self._end.set()

    async def _control(self, request: Request) -> Response:
        path = request.url.path
        query = f"?{request.url.query}" if request.url.query else ""
        self.told.append((path + query, json.loads(await request.body() or b"null")))
        if path == "/collective_rpc":
            await self.loaded.wait()
        status = self.fails.get(path)
        if status is None:
            return JSONResponse({"status": "done"})
        return JSONResponse(
            {"detail": "Not Found" if status == 404 else "it broke", "success": False}, status
        )

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200 if self.healthy else 503)

    async def answer(self, request: Request) -> Response:
        self.events = UNTOLD if self.behaviour == "tells no ids" else GOOD
        answer = await super().answer(request)
        self.running += 1
        try:
            await self._go_on.wait()
        finally:
            self.running -= 1
        match self.behaviour:
            case "hangs":
                await self._end.wait()
            case "500" | "503" | "400":
                return JSONResponse({"error": {"message": "not now"}}, int(self.behaviour))
            case "breaks off":
                return BrokenOff()
            case "breaks off in mid-answer":
                return StreamingResponse(iter(GOOD[:2]), media_type="text/event-stream")
        return JSONResponse({"count": 7}) if request.url.path == "/tokenize" else answer


class BrokenOff(Response):
    """Says that it will send more than it does."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"1000"), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{", "more_body": True})


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(30):
        while not condition():  # noqa: ASYNC110 - what servers do is not announced
            await anyio.sleep(0.005)


@asynccontextmanager
async def gateway_before(
    upstream: Upstream, store: SqlStore | None = None, **options: Any
) -> AsyncIterator[World]:
    """A gateway whose one model, `policy`, is the upstream. Hosted kinds are not trained."""
    async with upstream.backend(**options) as backend:
        own = backend.captures_tokens
        entry = ModelEntry("policy", backend, trainable=own, train=GREEDY if own else None)
        async with fronting(entry, store=store) as built:
            yield built
