"""New weights for servers that run elsewhere: what they are told, and what becomes of calls and
versions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import openai
import pytest

from agentlightning import semconv
from agentlightning.data.transitions import trace_rollout
from agentlightning.errors import BackendError, ConfigError
from agentlightning.gateway.backend import WEIGHTS_UNKNOWN
from agentlightning.gateway.backends.connection import BackendConnection
from agentlightning.gateway.backends.http import HttpBackend
from agentlightning.gateway.backends.tokens import SglangBackend
from agentlightning.gateway.chat.template import ChatTemplate
from agentlightning.gateway.models import ModelEntry
from agentlightning.gateway.replicas import Replicas, servers_of
from agentlightning.gateway.updates import declare_version, load_weights
from agentlightning.types import AttemptedRollout
from tests.gateway.talker import make_talker, user
from tests.gateway.upstream import Server, until
from tests.gateway.world import World, fronting

pytestmark = pytest.mark.anyio

CONTROL = ("/collective_rpc", "/reset_prefix_cache", "/pause", "/resume")
LOAD = ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/w/7"}})
RESET = ("/reset_prefix_cache?reset_running_requests=true", {})


@asynccontextmanager
async def before(*engines: Server) -> AsyncIterator[World]:
    """A gateway whose model `policy` is these servers."""
    async with AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine.http)
            stack.callback(engine.end)
        backends = [HttpBackend(engine.url) for engine in engines]
        backend = backends[0] if len(backends) == 1 else Replicas(backends)
        stack.push_async_callback(backend.close)
        yield await stack.enter_async_context(fronting(ModelEntry("policy", backend)))


async def load(world: World, version: int = 7) -> None:
    await load_weights(servers_of(world.gateway.entry("policy").backend), version, f"/w/{version}")


async def call(world: World, attempted: AttemptedRollout) -> tuple[Any, Any]:
    """The versions of the first and the last token of a streamed call."""
    stream = await world.client(attempted).chat.completions.create(
        model="policy", messages=user("hello"), stream=True
    )
    assert (
        "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
        == "Hi!"
    )
    attributes = (await world.spans(attempted))[-1].attributes
    return attributes[semconv.CALL_FIRST_VERSION], attributes[semconv.CALL_LAST_VERSION]


async def running(world: World, engine: Server, attempted: AttemptedRollout) -> asyncio.Task[Any]:
    """A call that the engine does not finish until it is released."""
    engine.hold()
    task = asyncio.create_task(call(world, attempted))
    await until(lambda: len(engine.asked) == 1)
    return task


One = tuple[World, Server, AttemptedRollout]


@pytest.fixture
async def one(anyio_backend: str) -> AsyncIterator[One]:
    """A vLLM server in development mode."""
    engine = Server(CONTROL)
    async with before(engine) as world:
        yield world, engine, await world.attempt()


@pytest.mark.parametrize("named", [False, True])
async def test_running_calls_pause_and_continue_with_the_new_weights_and_count_as_the_old(
    named: bool,
) -> None:
    engine = Server((*CONTROL, "/update_weight_version") if named else CONTROL)
    async with before(engine) as world:
        attempted = await world.attempt()
        early = await running(world, engine, attempted)
        await load(world)
        label = [("/update_weight_version", {"new_version": "7"})] if named else []
        assert engine.told == [("/pause?mode=keep", {}), LOAD, RESET, *label, ("/resume", {})]
        engine.release()
        assert await early == (0, 7)
        rollout = await world.store.get_rollout_by_id(attempted.rollout_id)
        assert rollout is not None
        (transition,) = trace_rollout(rollout, await world.spans(attempted)).transitions
        assert transition.versions.tolist() == [0, 0, 0]
        assert await call(world, attempted) == (7, 7)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/collective_rpc", 500),
        ("/pause", 404),
        ("/reset_prefix_cache", 404),
        ("/reset_prefix_cache", 200),
    ],
)
async def test_a_server_whose_weights_nobody_knows_answers_no_calls_until_it_loads_some(
    one: One, path: str, status: int
) -> None:
    world, engine, attempted = one
    early = await running(world, engine, attempted)
    engine.fails = {path: status}
    says = "VLLM_SERVER_DEV_MODE=1" if status == 404 else str(status)
    with pytest.raises(BackendError, match=f"no server has loaded version 7.*{says}") as failed:
        await load(world)
    assert failed.value.status == 502 and engine.told[-1][0] == "/resume"
    engine.release()
    await early
    assert (await world.spans(attempted))[0].attributes[semconv.CALL_FLAG] == WEIGHTS_UNKNOWN
    with pytest.raises(openai.InternalServerError, match="nobody knows the weights"):
        await call(world, attempted)
    assert len(engine.asked) == 1
    engine.fails = {}
    await load(world, 8)
    assert await call(world, attempted) == (8, 8)


async def test_a_load_that_is_cancelled_leaves_weights_that_nobody_knows(one: One) -> None:
    world, engine, attempted = one
    early = await running(world, engine, attempted)
    engine.loaded.clear()
    loading = asyncio.create_task(load(world))
    await until(lambda: len(engine.told) == 2)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    engine.release()
    await early
    assert (await world.spans(attempted))[0].attributes[semconv.CALL_FLAG] == WEIGHTS_UNKNOWN
    with pytest.raises(openai.InternalServerError, match="are being updated"):
        await call(world, attempted)
    declare_version(world.gateway.entry("policy"), 3)  # whoever looked knows
    assert await call(world, attempted) == (3, 3)


async def test_a_replica_that_failed_gets_no_calls_and_the_others_answer_under_the_new_version() -> (
    None
):
    good, bad = Server(CONTROL), Server(CONTROL)
    async with before(good, bad) as world:
        bad.fails = {"/collective_rpc": 500}
        await load(world)
        for _ in range(4):
            assert await call(world, await world.attempt()) == (7, 7)
        assert (len(good.asked), len(bad.asked)) == (4, 0)


async def test_sglang_loads_from_disk_and_is_told_what_to_call_the_weights() -> None:
    path = "/update_weights_from_disk"
    engine = Server([path])
    async with engine.http:
        connection = BackendConnection(engine.url)
        servers = [SglangBackend(connection, ChatTemplate.from_pretrained(make_talker().tokenizer))]
        await load_weights(servers, 7, "/w/7")
        asked = {"model_path": "/w/7", "weight_version": "7", "abort_all_requests": True}
        assert (engine.told, connection.version) == ([(path, asked)], 7)
        engine.fails = {path: 400}
        with pytest.raises(BackendError, match="it broke"):
            await load_weights(servers, 8, "/w/8")
        assert "nobody knows the weights" in (connection.unusable or "")
        await connection.close()


async def test_weights_that_are_not_a_servers_have_no_declared_version(
    gateway_world: World,
) -> None:
    hosted = HttpBackend("http://127.0.0.1:1/v1", kind="openai")
    gateway_world.gateway.models.put(ModelEntry("judge", hosted, trainable=False))
    for name in ("judge", "policy"):
        with pytest.raises(ConfigError, match="only those at vLLM and SGLang"):
            declare_version(gateway_world.gateway.entry(name), 7)
