"""Runners as processes of their own, over HTTP, and killed."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.runner.runner import Runner
from agentlightning.server.app import create_app
from agentlightning.server.serve import HttpServer
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.sql import SqlStore
from agentlightning.types import RolloutConfig
from tests.runner.world import running

pytestmark = pytest.mark.anyio

WORKER = """
import asyncio, sys
import agentlightning as agl

async def agent(task):
    print("started", flush=True)
    await asyncio.Event().wait()

async def main():
    store = agl.LightningStoreClient(sys.argv[1])
    await agl.Runner(store, agent, worker_id="killed").run()

asyncio.run(main())
"""


@pytest.mark.slow
async def test_the_rollouts_of_a_killed_runner_are_finished_by_another(brief_store: SqlStore, tmp_path: Path) -> None:
    server = HttpServer(create_app(brief_store), port=0)
    await server.start()
    config = RolloutConfig(max_attempts=2, retry_condition=("unresponsive",))
    rollout = await brief_store.enqueue_rollout("task", config=config)

    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    pipe = asyncio.subprocess.PIPE
    worker = await asyncio.create_subprocess_exec(sys.executable, str(script), server.url, stdout=pipe)
    assert worker.stdout is not None
    assert await asyncio.wait_for(worker.stdout.readline(), 60) == b"started\n"
    worker.send_signal(signal.SIGKILL)
    await worker.wait()

    client = LightningStoreClient(server.url)
    async with running(Runner(client, lambda task: 1.0, worker_id="second")):
        (ended,) = await brief_store.wait_for_rollouts([rollout.rollout_id], timeout=60)
    await client.close()
    await server.stop()

    assert ended.status == "succeeded"
    attempts = await brief_store.query_attempts(rollout.rollout_id)
    assert [(attempt.worker_id, attempt.status) for attempt in attempts] == [
        ("killed", "unresponsive"),
        ("second", "succeeded"),
    ]
    assert agl.find_final_reward(await brief_store.query_spans(rollout.rollout_id, "latest")) == 1.0


async def test_a_server_that_is_away_for_a_moment_costs_no_rollout(store: SqlStore) -> None:
    server = HttpServer(create_app(store), port=0)
    await server.start()
    port = int(server.url.rsplit(":", 1)[1])
    inside, away = asyncio.Event(), asyncio.Event()

    async def agent(task: str) -> float:
        inside.set()
        await away.wait()
        return 1.0

    rollout = await store.enqueue_rollout("task")
    client = LightningStoreClient(server.url)
    async with running(Runner(client, agent)):
        await asyncio.wait_for(inside.wait(), 60)
        await server.stop()
        away.set()
        back = HttpServer(create_app(store), port=port)
        await asyncio.sleep(0.3)  # the runner finds nobody there
        await back.start()
        (ended,) = await store.wait_for_rollouts([rollout.rollout_id], timeout=60)
    await client.close()
    await back.stop()
    assert ended.status == "succeeded"
