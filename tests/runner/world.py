"""What the runner's tests run against: a real HTTP endpoint that notes who called it, and a runner
for a while."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from agentlightning.runner.runner import Runner
from agentlightning.semconv import LOG_STREAM, LOG_TEXT
from agentlightning.store.base import LightningStore
from agentlightning.types import EnqueueRolloutRequest, Rollout, RolloutConfig, Span

AGAIN = RolloutConfig(max_attempts=2, retry_condition=("unresponsive",))
# of the brief store, longer than a busy machine stands still; heartbeats come three times as often
LEASE_SECONDS = 5.0


class Endpoint:
    """Answers every chat completion with `hello` and counts the calls by path and Authorization
    header."""

    def __init__(self) -> None:
        self.url = ""
        self.calls: Counter[tuple[str, str]] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.status = 200

    async def answer(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        self.calls[request.path, request.headers.get("Authorization", "")] += 1
        message = {"role": "assistant", "content": "hello"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        body = {
            "id": "c",
            "object": "chat.completion",
            "created": 1,
            "model": "policy",
            "choices": [choice],
        }
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


class Waiting:
    """An agent that waits until it is released, or cancelled."""

    def __init__(self) -> None:
        self.started, self.release, self.stopped = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def __call__(self, task: Any) -> float:
        self.started.set()
        try:
            await self.release.wait()
        finally:
            self.stopped.set()
        return 1.0

    async def begun(self) -> None:
        await asyncio.wait_for(self.started.wait(), 60)


async def enqueue(
    store: LightningStore, *tasks: Any, config: RolloutConfig | None = None
) -> list[str]:
    requests = [
        EnqueueRolloutRequest(input=task, config=config or RolloutConfig()) for task in tasks
    ]
    return [rollout.rollout_id for rollout in await store.enqueue_many_rollouts(requests)]


async def run_to_end(
    store: LightningStore,
    agent: Any,
    *tasks: Any,
    config: RolloutConfig | None = None,
    **options: Any,
) -> list[Rollout]:
    """Run an agent on tasks; the ended rollouts in the order of the tasks."""
    ids = await enqueue(store, *tasks, config=config)
    async with running(Runner(store, agent, **options)):
        done = {one.rollout_id: one for one in await store.wait_for_rollouts(ids, timeout=60)}
    return [done[rollout_id] for rollout_id in ids]


async def reason_of(store: LightningStore, rollout_id: str) -> str:
    attempt = await store.get_latest_attempt(rollout_id)
    assert attempt is not None
    return str(attempt.metadata.get("reason"))


async def statuses(store: LightningStore, *rollout_ids: str) -> list[list[str]]:
    """Of each rollout's attempts."""
    return [[attempt.status for attempt in await store.query_attempts(one)] for one in rollout_ids]


async def until(true: Callable[[], Any], seconds: float = 60) -> None:
    """Wait for what only another process knows."""
    async with asyncio.timeout(seconds):
        while not (await found if inspect.isawaitable(found := true()) else found):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process is there and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def log_of(spans: list[Span], stream: str = "stdout") -> str:
    return "".join(
        str(s.attributes[LOG_TEXT]) for s in spans if s.attributes.get(LOG_STREAM) == stream
    )
