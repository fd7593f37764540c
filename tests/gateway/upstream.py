"""A server that stands in for vLLM: it gives the answers it was made with, streamed or whole, and remembers what it was
asked."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agentlightning.gateway.backends.http import HttpBackend
from agentlightning.gateway.models import ModelEntry
from agentlightning.store.sql import SqlStore
from tests.gateway.world import GREEDY, World, fronting, serving

DONE = "data: [DONE]\n\n"


def chunk(*choices: dict[str, Any], **more: Any) -> str:
    body = {"id": "1", "object": "chat.completion.chunk", "choices": list(choices), **more}
    return f"data: {json.dumps(body)}\n\n"


def piece(text: str, ids: list[int], logprobs: list[float], **more: Any) -> dict[str, Any]:
    """A choice of a chunk as vLLM writes it."""
    content = [{"token": "?", "logprob": value, "bytes": None, "top_logprobs": []} for value in logprobs]
    return {"index": 0, "delta": {"content": text}, "logprobs": {"content": content}, "token_ids": ids, **more}


GOOD = [
    chunk({"index": 0, "delta": {"role": "assistant", "content": ""}}, prompt_token_ids=[1, 2, 3]),
    chunk(piece("Hi", [4], [-0.5])),
    chunk(piece("!", [5, 6], [-0.25, -0.125], finish_reason="stop", stop_reason=None)),
    chunk(usage={"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}),
    DONE,
]


def whole(events: list[str]) -> dict[str, Any]:
    """The answer that is not streamed, of the chunks of one that is. One choice."""
    answer: dict[str, Any] = {"id": "1", "object": "chat.completion"}
    choice: dict[str, Any] = {"index": 0, "message": {"role": "assistant", "content": ""}, "finish_reason": None}
    for event in events:
        if event == DONE:
            continue
        part = json.loads(event.removeprefix("data: "))
        answer |= {name: value for name, value in part.items() if name not in ("choices", "object")}
        for one in part["choices"]:
            choice["message"]["content"] += one["delta"].get("content") or ""
            choice.setdefault("token_ids", []).extend(one.get("token_ids", []))
            if one.get("logprobs"):
                choice.setdefault("logprobs", {"content": []})["content"].extend(one["logprobs"]["content"])
            choice |= {name: one[name] for name in ("finish_reason", "stop_reason") if one.get(name) is not None}
    return {**answer, "choices": [choice]}


class Upstream:
    """Answers with the given events, or refuses."""

    def __init__(self, events: list[str], status: int = 200, error: Any = None) -> None:
        self.events, self.status, self.error = events, status, error
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []

    async def answer(self, request: Request) -> Response:
        self.asked.append(await request.json())
        self.headers.append(dict(request.headers))
        if self.status != 200:
            return JSONResponse(self.error, self.status)
        if not self.asked[-1]["stream"]:
            return JSONResponse(whole(self.events))
        return StreamingResponse(self._sent(), media_type="text/event-stream")

    async def _sent(self) -> AsyncIterator[str]:
        for event in self.events:
            yield event

    @asynccontextmanager
    async def backend(self, **options: Any) -> AsyncIterator[HttpBackend]:
        app = Starlette(routes=[Route("/v1/chat/completions", self.answer, methods=["POST"])])
        async with serving(app) as url:
            backend = HttpBackend(f"{url}/v1", **options)
            try:
                yield backend
            finally:
                await backend.close()


@asynccontextmanager
async def gateway_before(upstream: Upstream, store: SqlStore | None = None, **options: Any) -> AsyncIterator[World]:
    """A gateway whose one model, `policy`, is the upstream. Hosted kinds are not trained."""
    async with upstream.backend(**options) as backend:
        own = backend.captures_tokens
        entry = ModelEntry("policy", backend, trainable=own, train=GREEDY if own else None)
        async with fronting(entry, store=store) as built:
            yield built
