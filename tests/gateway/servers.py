"""Servers that stand in for vLLM and can be slow, full, broken and unhealthy at will."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from agentlightning.server.serve import HttpServer
from tests.gateway.upstream import DONE, GOOD, chunk, whole

UNTOLD = [chunk({"index": 0, "delta": {"content": "Hi!"}, "finish_reason": "stop"}), DONE]


class Server:
    """Stands in for vLLM. `behaviour` says what becomes of a call; while `hold` is set calls wait before that. What it
    is `told` on its `control` routes it does once it has `loaded`; `fails` holds the status of a path, 200 for an
    answer that says so."""

    def __init__(self, control: Sequence[str] = ()) -> None:
        self.behaviour = "answers"
        self.healthy = True
        self.asked: list[str] = []  # what the user said in each call
        self.running = 0
        self._go_on = asyncio.Event()
        self._go_on.set()
        self._end = asyncio.Event()
        paths = ("chat/completions", "embeddings")
        routes = [Route(f"/v1/{path}", self._answer, methods=["POST"]) for path in paths]
        routes += [Route("/tokenize", self._answer, methods=["POST"]), Route("/health", self._health)]
        routes += [Route(path, self._control, methods=["POST"]) for path in control]
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
        return JSONResponse({"detail": "Not Found" if status == 404 else "it broke", "success": False}, status)

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200 if self.healthy else 503)

    async def _answer(self, request: Request) -> Response:
        asked = await request.json()
        self.asked.append(asked.get("input") or asked["messages"][0]["content"])
        self.running += 1
        try:
            await self._go_on.wait()
        finally:
            self.running -= 1
        if self.behaviour == "hangs":
            await self._end.wait()
        if self.behaviour in ("500", "503", "400"):
            return JSONResponse({"error": {"message": "not now"}}, int(self.behaviour))
        if self.behaviour == "breaks off":
            return BrokenOff()
        if self.behaviour == "breaks off in mid-answer":
            return StreamingResponse(iter(GOOD[:2]), media_type="text/event-stream")
        if request.url.path == "/tokenize":
            return JSONResponse({"count": 7})
        if self.behaviour == "tells no ids":
            return JSONResponse(whole(UNTOLD))
        if asked.get("stream"):
            return StreamingResponse(iter(GOOD), media_type="text/event-stream")
        return JSONResponse(whole(GOOD))


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
