"""Which attempt a call belongs to, and which calls are turned away."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from agentlightning import semconv
from agentlightning.gateway.attribution import api_key_of
from agentlightning.store import keys
from agentlightning.types import AttemptedRollout, RolloutConfig
from tests.gateway.talker import PLAIN, user
from tests.gateway.world import World, world

pytestmark = pytest.mark.anyio


async def say_hello(client: openai.AsyncOpenAI) -> str | None:
    answer = await client.chat.completions.create(
        model="policy", messages=user("hello"), temperature=0
    )
    return answer.choices[0].message.content


async def refusal(client: openai.AsyncOpenAI, status: int) -> str | None:
    """The code of a refusal, which clients do not retry."""
    with pytest.raises(openai.APIStatusError) as caught:
        await say_hello(client)
    assert (
        caught.value.status_code == status
        and caught.value.response.headers["x-should-retry"] == "false"
    )
    return caught.value.code


async def end(there: World, attempted: AttemptedRollout, status: str) -> None:
    await there.store.update_attempt(
        attempted.rollout_id, attempted.attempt.attempt_id, status=status
    )  # type: ignore[arg-type]


async def test_a_call_is_attributed_by_its_path_or_its_key_or_not_at_all(
    gateway_world: World,
) -> None:
    attempted = await gateway_world.attempt()
    for options in (
        {"attempted": attempted, "api_key": "EMPTY"},
        {"api_key": attempted.api_key},
        {},
    ):
        assert await say_hello(gateway_world.client(**options)) == PLAIN["hello"]
    assert len(await gateway_world.spans(attempted)) == 2


def test_a_bearer_token_wins_over_x_api_key() -> None:
    assert api_key_of({"authorization": "Bearer one", "x-api-key": "two"}) == "one"
    assert api_key_of({"authorization": "Basic abc", "x-api-key": "two"}) == "two"
    assert api_key_of({}) is None


async def test_a_key_of_another_attempt_than_the_path_is_refused(gateway_world: World) -> None:
    one, other = await gateway_world.attempt(), await gateway_world.attempt()
    assert await refusal(gateway_world.client(one, api_key=other.api_key), 403) == "wrong_attempt"
    assert await gateway_world.spans(one) == await gateway_world.spans(other) == []


async def test_a_required_key_must_be_one_of_the_stores(tmp_path: Path) -> None:
    async with world(tmp_path, admin_key="an-admin-key") as strict:
        worker = await strict.store.issue_worker_key("w/1")
        attempted = await leased(strict)
        for key in ("EMPTY", f"{attempted.api_key}x", f"{worker}x"):
            with pytest.raises(openai.AuthenticationError):
                await say_hello(strict.client(attempted, api_key=key))
        clients = [
            strict.client(attempted),
            strict.client(api_key=worker),
            strict.client(attempted, api_key=worker),
        ]
        assert [await say_hello(client) for client in clients] == [PLAIN["hello"]] * 3


async def test_attempts_that_ended_in_any_way_are_refused_for_good(gateway_world: World) -> None:
    ended, cancelled, superseded = [await gateway_world.attempt() for _ in range(3)]
    for attempted in (ended, cancelled, superseded):
        await say_hello(gateway_world.client(attempted))
    await end(gateway_world, ended, "succeeded")
    await gateway_world.store.cancel_rollout(cancelled.rollout_id)
    newer = await gateway_world.store.start_attempt(superseded.rollout_id)
    codes = {"attempt_ended": (ended, cancelled), "attempt_superseded": (superseded,)}
    for code, attempts in codes.items():
        for attempted in attempts:
            assert await refusal(gateway_world.client(attempted, max_retries=3), 403) == code
            assert len(await gateway_world.spans(attempted)) == 1 or code == "attempt_superseded"
    assert await say_hello(gateway_world.client(newer)) == PLAIN["hello"]


async def test_unknown_ids_are_not_found(gateway_world: World) -> None:
    attempted = await gateway_world.attempt()
    with pytest.raises(openai.NotFoundError):
        await say_hello(
            gateway_world.client(base_url=f"{gateway_world.url}/rollout/none/attempt/none/v1")
        )
    with pytest.raises(openai.PermissionDeniedError, match="latest"):
        url = f"{gateway_world.url}/rollout/{attempted.rollout_id}/attempt/none/v1"
        await say_hello(gateway_world.client(base_url=url))


async def test_calls_are_numbered_without_those_refused_and_a_new_gateway_goes_on_counting(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as before:
        attempted = await before.attempt()
        client = before.client(attempted)
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="policy", messages=[])
        for _ in range(2):
            await say_hello(client)
    async with world(tmp_path) as after:
        await say_hello(after.client(attempted))
        spans = await after.spans(attempted)
    assert [span.attributes.get(semconv.CALL_INDEX) for span in spans] == [None, 0, 1, 2]


async def leased(there: World, worker_id: str = "w/1", **config: object) -> AttemptedRollout:
    await there.store.enqueue_rollout("task", config=RolloutConfig(**config))  # type: ignore[arg-type]
    attempted = await there.store.dequeue_rollout(worker_id)
    assert attempted is not None
    return attempted


async def test_a_workers_key_follows_it_from_attempt_to_attempt(gateway_world: World) -> None:
    client = gateway_world.client(
        api_key=await gateway_world.store.issue_worker_key("w/1"), max_retries=3
    )
    for _ in range(2):
        attempted = await leased(gateway_world)
        await leased(gateway_world, "w/2")
        assert await say_hello(client) == PLAIN["hello"]
        assert len(await gateway_world.spans(attempted)) == 1
        await end(gateway_world, attempted, "succeeded")
        assert await refusal(client, 409) == "worker_attempt"  # it holds none
    for _ in range(2):
        await leased(gateway_world)
    assert await refusal(client, 409) == "worker_attempt"  # it holds two


async def test_a_call_revives_the_workers_silent_attempt(gateway_world: World) -> None:
    client = gateway_world.client(api_key=await gateway_world.store.issue_worker_key("w/1"))
    attempted = await leased(gateway_world, max_attempts=2, retry_condition=("unresponsive",))
    await end(gateway_world, attempted, "unresponsive")
    assert await say_hello(client) == PLAIN["hello"]
    (attempt,) = await gateway_world.store.query_attempts(attempted.rollout_id)
    assert attempt.status == "running"


def test_only_the_stores_secret_signs_it_and_neither_kind_of_key_passes_for_the_other() -> None:
    secret, other = keys.new_secret(), keys.new_secret()
    key = keys.sign_worker(secret, "host-1/3")
    assert keys.verify_worker(secret, key) == "host-1/3"
    assert keys.verify_worker(other, key) is keys.verify(secret, key) is None
    assert keys.verify_worker(secret, keys.sign(secret, "ro-1", "at-1")) is None
    assert (
        keys.verify_worker(secret, key.removeprefix("agl-wk-"))
        is keys.verify_worker(secret, "agl-wk-é.x")
        is None
    )
