"""Calls held while weights change: they wait, are answered, and their agents' clocks stand still
meanwhile."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from agentlightning import semconv
from agentlightning.errors import BackendError, NotFoundError
from agentlightning.gateway.gates import Gate, Holding
from agentlightning.gateway.models import ModelEntry
from agentlightning.store.sql import SqlStore
from agentlightning.types import Attempt, AttemptedRollout, RolloutConfig
from tests.gateway.talker import PLAIN, user
from tests.gateway.upstream import until
from tests.gateway.world import World, world

pytestmark = pytest.mark.anyio


def called(
    world: World, attempted: AttemptedRollout | None = None, model: str = "policy", **options: Any
) -> Any:
    """A call under way."""
    client = world.client(attempted, **options)
    return asyncio.create_task(client.chat.completions.create(model=model, messages=user("hello")))


async def answered(call: asyncio.Task[Any]) -> bool:
    answer = await asyncio.wait_for(call, 60)
    return answer.choices[0].message.content == PLAIN["hello"]


async def waits(*calls: asyncio.Task[Any], seconds: float = 0.2) -> bool:
    done, _ = await asyncio.wait(calls, timeout=seconds)
    return not done


async def arrived(world: World) -> None:
    """Return when an attempt has a call at the model's gate."""
    await until(lambda: bool(world.gateway.models.gate("policy").attempts))


async def attempt_of(world: World, attempted: AttemptedRollout) -> Attempt:
    attempt = await world.store.get_latest_attempt(attempted.rollout_id)
    assert attempt is not None
    return attempt


async def test_held_calls_wait_and_are_answered_and_their_spans_say_for_how_long(
    gateway_world: World,
) -> None:
    attempted = await gateway_world.attempt()
    assert await answered(called(gateway_world, attempted))
    async with gateway_world.gateway.held("policy"):
        call = called(gateway_world, attempted)
        await arrived(gateway_world)
        assert await waits(call, seconds=0.4)
    assert await answered(call)
    free, held = await gateway_world.spans(attempted)
    assert 0.3 < float(held.attributes[semconv.CALL_HELD_SECONDS]) < 10
    assert semconv.CALL_HELD_SECONDS not in free.attributes
    statistics = gateway_world.gateway.statistics
    assert (statistics.held, statistics.held_seconds) == (
        1,
        held.attributes[semconv.CALL_HELD_SECONDS],
    )
    with pytest.raises(RuntimeError, match="not written"):
        async with gateway_world.gateway.held("policy"):
            raise RuntimeError("the weights were not written")
    assert await answered(called(gateway_world))


async def test_a_model_is_held_by_its_name_until_everybody_who_holds_it_has_released_it(
    gateway_world: World,
) -> None:
    gateway = gateway_world.gateway
    gateway.models.put(
        ModelEntry("judge", gateway.entry("policy").backend, trainable=False, aliases=("grader",))
    )
    gateway.hold("grader")
    async with gateway.held("policy", "judge"):
        gateway.hold("judge")
        judged, called_too = called(gateway_world, model="judge"), called(gateway_world)
        assert await waits(judged, called_too)
    assert await answered(called_too)
    assert await waits(judged)
    gateway.release("judge")
    assert await answered(judged)
    with pytest.raises(
        NotFoundError, match="no model is called 'jugde'; the models here are: judge, policy"
    ):
        gateway.hold("jugde")


@pytest.mark.slow
async def test_a_hold_whose_holder_is_not_heard_of_ends_by_itself_and_says_so(
    gateway_world: World, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = gateway_world.gateway
    call = called(gateway_world)
    gateway.hold("policy", seconds=1.5)
    await asyncio.sleep(1.0)
    gateway.hold("policy", seconds=1.5)  # it has been heard of
    assert await waits(call, seconds=0.8)
    with caplog.at_level(logging.WARNING):
        assert await answered(call)
    assert "'policy' are let through again" in caplog.text
    gateway.hold("policy", seconds=0.2)
    gateway.release("policy")  # in time: it has no end left
    async with gateway.held("policy"):
        call = called(gateway_world)
        assert await waits(call, seconds=0.4)
    assert await answered(call)


async def test_a_call_that_was_held_too_long_is_told_to_ask_again(tmp_path: Path) -> None:
    async with world(tmp_path, longest_hold=0.2) as built:
        built.gateway.hold("policy")
        with pytest.raises(openai.InternalServerError) as refused:
            await called(built)
        assert refused.value.status_code == 503
        assert refused.value.code == "model_held"
        assert refused.value.response.headers["retry-after"] == "1"


@pytest.mark.parametrize(("what", "status"), [("process", 503), ("attempt", 403)])
async def test_when_the_process_or_its_attempt_ends_a_waiting_call_ends_too(
    gateway_world: World, what: str, status: int
) -> None:
    attempted = await gateway_world.attempt()
    gateway_world.gateway.hold("policy")
    call = called(gateway_world, attempted)
    await arrived(gateway_world)
    if what == "process":
        gateway_world.gateway.turn_away()
    else:
        await gateway_world.store.cancel_rollout(attempted.rollout_id)
        gateway_world.gateway.release("policy")
    with pytest.raises(openai.APIStatusError) as caught:
        await asyncio.wait_for(call, 1)
    assert caught.value.status_code == status


async def test_nothing_is_left_of_a_client_that_left_while_it_was_held(
    gateway_world: World,
) -> None:
    attempted = await gateway_world.attempt()
    async with gateway_world.gateway.held("policy"):
        call = called(gateway_world, attempted)
        await arrived(gateway_world)
        call.cancel()
        await until(lambda: not gateway_world.gateway.models.gate("policy").attempts)
    await until(lambda: not gateway_world.gateway.running)
    assert await gateway_world.spans(attempted) == []


@pytest.mark.slow
@pytest.mark.parametrize("clock", ["timeout_seconds", "unresponsive_seconds"])
async def test_the_clocks_of_attempts_stand_still_while_their_calls_are_held_and_run_where_none_is(
    gateway_world: World, clock: str
) -> None:
    config = RolloutConfig(**{clock: 1.0})
    free = await gateway_world.attempt(config=config)
    assert await answered(called(gateway_world, free))
    async with gateway_world.gateway.held("policy"):
        held = [await gateway_world.attempt(config=config) for _ in range(2)]
        calls = [called(gateway_world, attempted) for attempted in held]
        assert await waits(*calls, seconds=2.0)
        assert (await attempt_of(gateway_world, free)).status == clock.removesuffix("_seconds")
    for call, attempted in zip(calls, held, strict=True):
        assert await answered(call)
        attempt = await attempt_of(gateway_world, attempted)
        assert attempt.status == "running" and attempt.held_seconds > 1.5


@pytest.mark.slow
async def test_they_stand_still_for_a_call_that_runs_in_an_engine_at_rest(
    gateway_world: World,
) -> None:
    attempted = await gateway_world.attempt(config=RolloutConfig(timeout_seconds=1.0))
    async with gateway_world.service.exclusive():
        call = called(gateway_world, attempted)
        await arrived(gateway_world)
        async with gateway_world.gateway.held("policy"):
            assert await waits(call, seconds=1.5)
    assert await answered(call)
    assert (await attempt_of(gateway_world, attempted)).status == "running"


async def test_calls_wait_on_where_the_store_cannot_be_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = await SqlStore.open(":memory:")
    await store.close()
    gate = Gate("policy")
    holding = Holding(store, lambda: [gate], longest=0.3)
    gate.hold("test")
    began = time.monotonic()
    with caplog.at_level(logging.WARNING), pytest.raises(BackendError, match="ask again"):
        await holding.wait(gate, ("r", "a"))
    assert time.monotonic() - began > 0.25
    assert "the clocks of attempts with held calls could not be stopped" in caplog.text
    await holding.close()
