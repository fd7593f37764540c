"""Which attempt a call belongs to, and which calls are turned away."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from agentlightning import semconv
from agentlightning.gateway.attribution import api_key_of
from tests.gateway.talker import PLAIN, user
from tests.gateway.world import World, world

pytestmark = pytest.mark.anyio


async def say_hello(client: openai.AsyncOpenAI) -> str | None:
    answer = await client.chat.completions.create(model="policy", messages=user("hello"))
    return answer.choices[0].message.content


async def test_a_call_is_attributed_by_its_key_alone(gateway_world: World) -> None:
    attempted = await gateway_world.attempt()
    await say_hello(gateway_world.client(api_key=attempted.api_key))
    assert len(await gateway_world.spans(attempted)) == 1


def test_a_bearer_token_wins_over_x_api_key() -> None:
    assert api_key_of({"authorization": "Bearer one", "x-api-key": "two"}) == "one"
    assert api_key_of({"authorization": "Basic abc", "x-api-key": "two"}) == "two"
    assert api_key_of({}) is None


async def test_a_key_of_another_attempt_than_the_path_is_refused(gateway_world: World) -> None:
    one, other = await gateway_world.attempt(), await gateway_world.attempt()
    with pytest.raises(openai.PermissionDeniedError) as caught:
        await say_hello(gateway_world.client(one, api_key=other.api_key))
    assert caught.value.code == "wrong_attempt"
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert await gateway_world.spans(one) == await gateway_world.spans(other) == []


async def test_a_required_key_must_be_one_of_the_stores(tmp_path: Path) -> None:
    async with world(tmp_path, admin_key="an-admin-key") as strict:
        attempted = await strict.attempt()
        for key in ("EMPTY", f"{attempted.api_key}x"):
            with pytest.raises(openai.AuthenticationError):
                await say_hello(strict.client(attempted, api_key=key))
        assert await say_hello(strict.client(attempted)) == PLAIN["hello"]


async def test_an_ended_attempt_and_a_cancelled_rollout_are_refused_for_good(gateway_world: World) -> None:
    ended, cancelled = await gateway_world.attempt(), await gateway_world.attempt()
    await say_hello(gateway_world.client(ended))
    await say_hello(gateway_world.client(cancelled))
    await gateway_world.store.update_attempt(ended.rollout_id, ended.attempt.attempt_id, status="succeeded")
    await gateway_world.store.cancel_rollout(cancelled.rollout_id)
    for attempted in (ended, cancelled):
        with pytest.raises(openai.PermissionDeniedError) as caught:
            await say_hello(gateway_world.client(attempted, max_retries=3))
        assert caught.value.code == "attempt_ended"
        assert caught.value.response.headers["x-should-retry"] == "false"
        assert len(await gateway_world.spans(attempted)) == 1


async def test_an_attempt_replaced_by_a_newer_one_is_refused(gateway_world: World) -> None:
    first = await gateway_world.attempt()
    await say_hello(gateway_world.client(first))
    second = await gateway_world.store.start_attempt(first.rollout_id)
    with pytest.raises(openai.PermissionDeniedError) as caught:
        await say_hello(gateway_world.client(first))
    assert caught.value.code == "attempt_superseded"
    assert await say_hello(gateway_world.client(second)) == PLAIN["hello"]


async def test_unknown_ids_are_not_found(gateway_world: World) -> None:
    attempted = await gateway_world.attempt()
    with pytest.raises(openai.NotFoundError):
        await say_hello(gateway_world.client(base_url=f"{gateway_world.url}/rollout/none/attempt/none/v1"))
    with pytest.raises(openai.PermissionDeniedError, match="latest"):
        url = f"{gateway_world.url}/rollout/{attempted.rollout_id}/attempt/none/v1"
        await say_hello(gateway_world.client(base_url=url))


async def test_calls_are_numbered_per_attempt_and_a_new_gateway_goes_on_counting(tmp_path: Path) -> None:
    async with world(tmp_path) as before:
        attempted = await before.attempt()
        for _ in range(2):
            await say_hello(before.client(attempted))
    async with world(tmp_path) as after:
        await say_hello(after.client(attempted))
        spans = await after.spans(attempted)
    assert [span.attributes[semconv.CALL_INDEX] for span in spans] == [0, 1, 2]


async def test_a_refused_request_takes_no_number(gateway_world: World) -> None:
    attempted = await gateway_world.attempt()
    client = gateway_world.client(attempted)
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(model="policy", messages=[])
    await say_hello(client)
    refused, span = await gateway_world.spans(attempted)
    assert semconv.CALL_INDEX not in refused.attributes
    assert span.attributes[semconv.CALL_INDEX] == 0
