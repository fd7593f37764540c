"""The runner's own clock: an agent has its timeout, less what the gateway held its calls for."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.runner.runner import Runner
from agentlightning.types import LLM, Attempt, EnqueueRolloutRequest, Rollout, RolloutConfig
from tests.gateway.world import World, world
from tests.runner.world import running

pytestmark = pytest.mark.anyio


@agl.rollout
async def asks(task: str, llm: LLM) -> float:
    await agl.openai_client(llm).chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "hello"}]
    )
    if task == "hang":
        await asyncio.Event().wait()
    return 1.0


async def run_with_calls_held(gateway_world: World, task: str) -> tuple[Rollout, Attempt]:
    """Run `asks` with a timeout of 1 second while its call is held for 2."""
    await gateway_world.store.add_resources(
        {"llm": LLM(endpoint=f"{gateway_world.url}/v1", model="policy", gateway=True)}
    )
    request = EnqueueRolloutRequest(input=task, config=RolloutConfig(timeout_seconds=1.0))
    (queued,) = await gateway_world.store.enqueue_many_rollouts([request])
    async with running(Runner(gateway_world.store, asks)):
        async with gateway_world.gateway.held():
            assert not await gateway_world.store.wait_for_rollouts([queued.rollout_id], timeout=2)
        (rollout,) = await gateway_world.store.wait_for_rollouts([queued.rollout_id], timeout=60)
    attempt = await gateway_world.store.get_latest_attempt(rollout.rollout_id)
    assert attempt is not None
    return rollout, attempt


@pytest.mark.slow
async def test_an_agent_whose_call_is_held_beyond_its_timeout_succeeds(tmp_path: Path) -> None:
    async with world(tmp_path) as gateway_world:
        rollout, attempt = await run_with_calls_held(gateway_world, "answer")
    assert (rollout.status, attempt.status) == ("succeeded", "succeeded")
    assert attempt.held_seconds > 1.5


@pytest.mark.slow
async def test_one_that_hangs_after_a_held_call_is_still_stopped(tmp_path: Path) -> None:
    async with world(tmp_path) as gateway_world:
        rollout, attempt = await run_with_calls_held(gateway_world, "hang")
    assert (rollout.status, attempt.status) == ("failed", "timeout")
    assert re.search(r"within 1 s, the \d.* s that its calls were held left out", attempt.metadata.get("reason", ""))
