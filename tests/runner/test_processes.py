"""Runners over HTTP: killed, without their server for a moment, and with calls that are held."""

from __future__ import annotations

import asyncio
import re
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
from agentlightning.types import LLM, RolloutConfig
from tests.gateway.world import world
from tests.runner.world import AGAIN, Waiting, enqueue, reason_of, running, statuses

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
async def test_the_rollouts_of_a_killed_runner_are_finished_by_another(
    brief_store: SqlStore,
) -> None:
    (rollout_id,) = await enqueue(brief_store, "task", config=AGAIN)
    async with HttpServer(create_app(brief_store), port=0) as server:
        pipe = asyncio.subprocess.PIPE
        worker = await asyncio.create_subprocess_exec(
            sys.executable, "-c", WORKER, server.url, stdout=pipe
        )
        assert worker.stdout is not None
        assert await asyncio.wait_for(worker.stdout.readline(), 60) == b"started\n"
        worker.send_signal(signal.SIGKILL)
        await worker.wait()
        client = LightningStoreClient(server.url)
        async with running(Runner(client, lambda task: 1.0, worker_id="second")):
            await brief_store.wait_for_rollouts([rollout_id], timeout=60)
        await client.close()
    attempts = [(one.worker_id, one.status) for one in await brief_store.query_attempts(rollout_id)]
    assert attempts == [("killed", "unresponsive"), ("second", "succeeded")]
    assert agl.find_final_reward(await brief_store.query_spans(rollout_id, "latest")) == 1.0


async def test_a_server_that_is_away_for_a_moment_costs_no_rollout(store: SqlStore) -> None:
    server = HttpServer(create_app(store), port=0)
    await server.start()
    agent, client = Waiting(), LightningStoreClient(server.url)
    (rollout_id,) = await enqueue(store, "task")
    async with running(Runner(client, agent)):
        await agent.begun()
        await server.stop()
        agent.release.set()
        back = HttpServer(create_app(store), port=int(server.url.rsplit(":", 1)[1]))
        await asyncio.sleep(0.3)  # the runner finds nobody there
        await back.start()
        await store.wait_for_rollouts([rollout_id], timeout=60)
    await client.close()
    await back.stop()
    assert await statuses(store, rollout_id) == [["succeeded"]]


@pytest.mark.slow
async def test_the_time_for_which_a_call_is_held_does_not_count_towards_the_timeout(
    tmp_path: Path,
) -> None:
    @agl.rollout
    async def asks(task: str, llm: LLM) -> float:
        client = agl.openai_client(llm)
        await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "hello"}]
        )
        if task == "hang":
            await asyncio.Event().wait()
        return 1.0

    async with world(tmp_path) as there:
        store = there.store
        await store.add_resources(
            {"llm": LLM(endpoint=f"{there.url}/v1", model="policy", gateway=True)}
        )
        answering, hanging = await enqueue(
            store, "answer", "hang", config=RolloutConfig(timeout_seconds=1.0)
        )
        async with running(Runner(store, asks)):
            async with there.gateway.held("policy"):
                assert not await store.wait_for_rollouts([answering, hanging], timeout=2)
            await store.wait_for_rollouts([answering, hanging], timeout=60)
        assert await statuses(store, answering, hanging) == [["succeeded"], ["timeout"]]
        attempt = await store.get_latest_attempt(answering)
        assert attempt is not None and attempt.held_seconds > 1.5
        reason = await reason_of(store, hanging)
    assert re.search(r"within 1 s, the \d.* s that its calls were held left out", reason)
