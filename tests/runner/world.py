"""What the runner's tests run against: a real HTTP endpoint that notes who called it, and a runner for a while."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from agentlightning.runner.runner import Runner

LEASE_SECONDS = 5.0  # of the brief store, longer than a busy machine stands still; heartbeats come three times as often


class Endpoint:
    """Answers every chat completion with `hello` and counts the calls by path and Authorization header.

    With `hold_until` it answers none before that many are open at once."""

    def __init__(self) -> None:
        self.url = ""
        self.calls: Counter[tuple[str, str]] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.status = 200
        self.hold_until = 0
        self.open = self.most_open = 0
        self._enough = asyncio.Event()

    async def answer(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        self.calls[request.path, request.headers.get("Authorization", "")] += 1
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        if self.open >= self.hold_until:
            self._enough.set()
        await asyncio.wait_for(self._enough.wait(), 60)
        self.open -= 1
        message = {"role": "assistant", "content": "hello"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        body = {"id": "c", "object": "chat.completion", "created": 1, "model": "policy", "choices": [choice]}
        return web.json_response(body, status=self.status)


@asynccontextmanager
async def serving() -> AsyncIterator[Endpoint]:
    server = Endpoint()
    application = web.Application()
    application.router.add_post("/{path:.*}", server.answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield server
    await runner.cleanup()


@asynccontextmanager
async def running(runner: Runner) -> AsyncIterator[Runner]:
    """`runner.run()` for the length of the block, then a graceful stop."""
    task = asyncio.create_task(runner.run())
    try:
        yield runner
    finally:
        runner.stop()
        await asyncio.wait_for(task, 60)
