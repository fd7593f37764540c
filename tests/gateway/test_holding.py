"""Calls held while weights change: they wait, are answered, and their agents' clocks stand still meanwhile."""

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
from agentlightning.gateway.holding import Gate, Holding
from agentlightning.gateway.models import ModelEntry
from agentlightning.store.sql import SqlStore
from agentlightning.types import Attempt, AttemptedRollout, RolloutConfig
from tests.gateway.talker import PLAIN, user
from tests.gateway.world import World, world

pytestmark = pytest.mark.anyio


def called(world: World, attempted: AttemptedRollout | None = None, model: str = "policy", **options: Any) -> Any:
    """A call under way."""
    client = world.client(attempted, **options)
    return asyncio.create_task(client.chat.completions.create(model=model, messages=user("hello")))


async def answered(call: asyncio.Task[Any]) -> bool:
    answer = await asyncio.wait_for(call, 60)
    return answer.choices[0].message.content == PLAIN["hello"]


async def waits(*calls: asyncio.Task[Any], seconds: float = 0.2) -> bool:
    done, _ = await asyncio.wait(calls, timeout=seconds)
    return not done


async def arrived(world: World, count: int = 1, model: str = "policy") -> None:
    """Return when so many attempts have a call at the model's gate."""
    async with asyncio.timeout(60):
        while len(world.gateway.models.gate(model).attempts) < count:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.01)


async def attempt_of(world: World, attempted: AttemptedRollout) -> Attempt:
    attempt = await world.store.get_latest_attempt(attempted.rollout_id)
    assert attempt is not None
    return attempt


# --- who holds ----------------------------------------------------------------------------------------------------


async def test_held_calls_wait_and_are_answered_and_their_spans_say_for_how_long(gateway_world: World) -> None:
    attempted = await gateway_world.attempt()
    async with gateway_world.gateway.held():
        call = called(gateway_world, attempted)
        await arrived(gateway_world)
        assert await waits(call, seconds=0.4)
        assert await gateway_world.spans(attempted) == []
    assert await answered(call)
    (span,) = await gateway_world.spans(attempted)
    assert 0.3 < float(span.attributes[semconv.CALL_HELD_SECONDS]) < 10
    assert gateway_world.gateway.statistics.held == 1
    assert gateway_world.gateway.statistics.held_seconds == span.attributes[semconv.CALL_HELD_SECONDS]


async def test_a_model_is_held_by_its_name_and_others_are_not(gateway_world: World) -> None:
    gateway = gateway_world.gateway
    gateway.models.put(ModelEntry("judge", gateway.entry("policy").backend, trainable=False, aliases=("grader",)))
    gateway.hold("grader")
    judged = called(gateway_world, model="judge")
    assert await answered(called(gateway_world))
    assert await waits(judged)
    await asyncio.wait_for(gateway.idle("judge"), 1)
    gateway.release("judge")
    assert await answered(judged)
    with pytest.raises(NotFoundError, match="no model is called 'jugde'; the models here are: judge, policy"):
        gateway.hold("jugde")


async def test_calls_pass_when_everybody_who_holds_them_has_released_them(gateway_world: World) -> None:
    gateway = gateway_world.gateway
    gateway.hold()
    gateway.hold()
    async with gateway.held("policy"):
        call = called(gateway_world)
        gateway.release()
        gateway.release()
        assert await waits(call)
        async with gateway.held():
            pass
        assert await waits(call)
    assert await answered(call)


async def test_a_holder_that_fails_holds_nothing(gateway_world: World) -> None:
    with pytest.raises(RuntimeError):
        async with gateway_world.gateway.held():
            raise RuntimeError("the weights could not be written")
    assert await answered(called(gateway_world))


@pytest.mark.slow
async def test_a_hold_whose_holder_is_not_heard_of_ends_by_itself_and_says_so(
    gateway_world: World, caplog: pytest.LogCaptureFixture
) -> None:
    call = called(gateway_world)
    gateway_world.gateway.hold("policy", seconds=1.5)
    await asyncio.sleep(1.0)
    gateway_world.gateway.hold("policy", seconds=1.5)  # it has been heard of
    assert await waits(call, seconds=0.8)
    with caplog.at_level(logging.WARNING):
        assert await answered(call)
    assert "'policy' are let through again" in caplog.text


async def test_a_hold_that_was_released_in_time_has_no_end_left(gateway_world: World) -> None:
    gateway = gateway_world.gateway
    gateway.hold(seconds=0.2)
    gateway.release()
    async with gateway.held():
        call = called(gateway_world)
        assert await waits(call, seconds=0.4)
    assert await answered(call)


# --- how long a call waits ----------------------------------------------------------------------------------------


async def test_a_call_that_was_held_too_long_is_told_to_ask_again(tmp_path: Path) -> None:
    async with world(tmp_path, longest_hold=0.2) as built:
        built.gateway.hold()
        with pytest.raises(openai.InternalServerError) as refused:
            await called(built)
        assert refused.value.status_code == 503
        assert refused.value.code == "model_held"
        assert refused.value.response.headers["retry-after"] == "1"


async def test_when_the_process_ends_waiting_calls_are_told_so_at_once(gateway_world: World) -> None:
    attempted = await gateway_world.attempt()
    gateway_world.gateway.hold()
    call = called(gateway_world, attempted)
    await arrived(gateway_world)
    gateway_world.gateway.turn_away()
    with pytest.raises(openai.InternalServerError, match="ask again"):
        await asyncio.wait_for(call, 1)


async def test_an_attempt_that_ended_meanwhile_is_told_to_stop(gateway_world: World) -> None:
    attempted = await gateway_world.attempt()
    gateway_world.gateway.hold()
    call = called(gateway_world, attempted)
    await arrived(gateway_world)
    await gateway_world.store.cancel_rollout(attempted.rollout_id)
    gateway_world.gateway.release()
    with pytest.raises(openai.PermissionDeniedError):
        await call


async def test_nothing_is_left_of_a_client_that_left_while_it_was_held(gateway_world: World) -> None:
    attempted = await gateway_world.attempt()
    async with gateway_world.gateway.held():
        call = called(gateway_world, attempted)
        await arrived(gateway_world)
        call.cancel()
        async with asyncio.timeout(60):
            while gateway_world.gateway.models.gate("policy").attempts:  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.01)
    await asyncio.wait_for(gateway_world.gateway.idle(), 1)
    assert await gateway_world.spans(attempted) == []


# --- clocks -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("clock", ["timeout_seconds", "unresponsive_seconds"])
async def test_the_clocks_of_an_attempt_stand_still_while_its_call_is_held(gateway_world: World, clock: str) -> None:
    attempted = await gateway_world.attempt(config=RolloutConfig(**{clock: 1.0}))
    async with gateway_world.gateway.held():
        call = called(gateway_world, attempted)
        assert await waits(call, seconds=2.0)
    assert await answered(call)
    attempt = await attempt_of(gateway_world, attempted)
    assert attempt.status == "running"
    assert attempt.held_seconds > 1.5


@pytest.mark.slow
async def test_and_run_on_where_nothing_is_held(gateway_world: World) -> None:
    held, free = [await gateway_world.attempt(config=RolloutConfig(timeout_seconds=1.0)) for _ in range(2)]
    assert await answered(called(gateway_world, free))
    async with gateway_world.gateway.held():
        call = called(gateway_world, held)
        assert await waits(call, seconds=1.5)
        assert (await attempt_of(gateway_world, free)).status == "timeout"
        assert (await attempt_of(gateway_world, held)).status == "preparing"
    assert await answered(call)


@pytest.mark.slow
async def test_they_stand_still_for_a_call_that_runs_in_an_engine_at_rest(gateway_world: World) -> None:
    attempted = await gateway_world.attempt(config=RolloutConfig(timeout_seconds=1.0))
    async with gateway_world.service.exclusive():
        call = called(gateway_world, attempted)
        await arrived(gateway_world)
        async with gateway_world.gateway.held():
            assert await waits(call, seconds=1.5)
    assert await answered(call)
    assert (await attempt_of(gateway_world, attempted)).status == "running"


async def test_calls_wait_on_where_the_store_cannot_be_told(caplog: pytest.LogCaptureFixture) -> None:
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
