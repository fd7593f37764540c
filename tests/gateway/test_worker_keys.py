"""A worker's key stands for whatever attempt the worker holds at present, and for nothing else."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from agentlightning.store import keys
from agentlightning.types import AttemptedRollout, RolloutConfig
from tests.gateway.talker import PLAIN, user
from tests.gateway.world import World, world

pytestmark = pytest.mark.anyio


async def leased(place: World, worker_id: str, **config: object) -> AttemptedRollout:
    await place.store.enqueue_rollout("task", config=RolloutConfig(**config))  # type: ignore[arg-type]
    attempted = await place.store.dequeue_rollout(worker_id)
    assert attempted is not None
    return attempted


async def say_hello(client: openai.AsyncOpenAI) -> str | None:
    answer = await client.chat.completions.create(model="policy", messages=user("hello"))
    return answer.choices[0].message.content


async def test_one_client_follows_its_worker_from_attempt_to_attempt(gateway_world: World) -> None:
    client = gateway_world.client(api_key=await gateway_world.store.issue_worker_key("w/1"))
    for _ in range(2):
        attempted = await leased(gateway_world, "w/1")
        await leased(gateway_world, "w/2")
        assert await say_hello(client) == PLAIN["hello"]
        assert len(await gateway_world.spans(attempted)) == 1
        await gateway_world.store.update_attempt(attempted.rollout_id, attempted.attempt.attempt_id, status="succeeded")


async def test_it_opens_a_gateway_that_requires_keys(tmp_path: Path) -> None:
    async with world(tmp_path, admin_key="an-admin-key") as strict:
        key = await strict.store.issue_worker_key("w/1")
        attempted = await leased(strict, "w/1")
        assert await say_hello(strict.client(api_key=key)) == PLAIN["hello"]
        assert await say_hello(strict.client(attempted, api_key=key)) == PLAIN["hello"]
        with pytest.raises(openai.AuthenticationError):
            await say_hello(strict.client(api_key=f"{key}x"))


async def test_without_an_attempt_it_is_refused_and_not_retried(gateway_world: World) -> None:
    client = gateway_world.client(api_key=await gateway_world.store.issue_worker_key("w/1"), max_retries=3)
    attempted = await leased(gateway_world, "w/1")
    await gateway_world.store.update_attempt(attempted.rollout_id, attempted.attempt.attempt_id, status="failed")
    with pytest.raises(openai.ConflictError) as caught:
        await say_hello(client)
    assert caught.value.code == "worker_attempt"
    assert "which holds none at present" in caught.value.message
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert await gateway_world.spans(attempted) == []


async def test_with_two_attempts_at_once_it_is_refused(gateway_world: World) -> None:
    client = gateway_world.client(api_key=await gateway_world.store.issue_worker_key("w/1"))
    for _ in range(2):
        await leased(gateway_world, "w/1")
    with pytest.raises(openai.ConflictError, match="holds 2 at present"):
        await say_hello(client)


async def test_a_call_revives_the_workers_silent_attempt(gateway_world: World) -> None:
    client = gateway_world.client(api_key=await gateway_world.store.issue_worker_key("w/1"))
    attempted = await leased(gateway_world, "w/1", max_attempts=2, retry_condition=("unresponsive",))
    ids = (attempted.rollout_id, attempted.attempt.attempt_id)
    await gateway_world.store.update_attempt(*ids, status="unresponsive")
    assert await say_hello(client) == PLAIN["hello"]
    (attempt,) = await gateway_world.store.query_attempts(attempted.rollout_id)
    assert attempt.status == "running"


def test_only_the_stores_secret_signs_it_and_neither_kind_of_key_passes_for_the_other() -> None:
    secret, other = keys.new_secret(), keys.new_secret()
    key = keys.sign_worker(secret, "host-1/3")
    assert keys.verify_worker(secret, key) == "host-1/3"
    assert keys.verify_worker(other, key) is keys.verify(secret, key) is None
    assert keys.verify_worker(secret, keys.sign(secret, "ro-1", "at-1")) is None
    assert keys.verify_worker(secret, key.removeprefix("agl-wk-")) is keys.verify_worker(secret, "agl-wk-é.x") is None
