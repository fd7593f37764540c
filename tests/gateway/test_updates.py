"""New weights for servers that run elsewhere: what they are told and when, and what becomes of calls and versions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentlightning import semconv
from agentlightning.data.transitions import trace_rollout
from agentlightning.errors import BackendError, ConfigError, ConflictError, NotFoundError, UnavailableError
from agentlightning.gateway.app import Gateway
from agentlightning.gateway.backend import WEIGHTS_UNKNOWN
from agentlightning.gateway.backends.connection import Connection
from agentlightning.gateway.backends.http import HttpBackend
from agentlightning.gateway.backends.tokens import SglangBackend
from agentlightning.gateway.chat.template import ChatTemplate
from agentlightning.gateway.models import ModelEntry, ModelTable
from agentlightning.gateway.replicas import Replicas
from agentlightning.gateway.updates import ServerUpdate, WeightUpdate, declare_version, update_weights
from agentlightning.types import AttemptedRollout
from tests.gateway.servers import Server, until
from tests.gateway.talker import make_talker, user
from tests.gateway.world import World, fronting, serving

pytestmark = pytest.mark.anyio

LOAD = {"method": "reload_weights", "kwargs": {"weights_path": "/w/7"}}
RESET = "/reset_prefix_cache?reset_running_requests=true"
SEVEN = WeightUpdate(policy_version=7, path="/w/7")


CONTROL = ("/collective_rpc", "/reset_prefix_cache", "/pause", "/resume")


def engine_of(*control: str) -> Server:
    """A vLLM server in development mode."""
    return Server((*CONTROL, *control))


class Sglang:
    """Stands in for an SGLang server."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []
        self.succeeds = True

    async def _control(self, request: Request) -> Response:
        self.told.append((request.url.path, await request.json()))
        said = {"success": self.succeeds, "message": "Failed to update weights", "num_paused_requests": 0}
        return JSONResponse(said, 200 if self.succeeds else 400)

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/update_weights_from_disk", self._control, methods=["POST"])])


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
        yield await stack.enter_async_context(fronting(ModelEntry("policy", backend, aliases=("p",))))


async def call(world: World, attempted: AttemptedRollout) -> str:
    """What a streamed call says."""
    stream = await world.client(attempted).chat.completions.create(model="p", messages=user("hello"), stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


async def versions(world: World, attempted: AttemptedRollout) -> tuple[Any, Any]:
    """Of the first and of the last token of an attempt's last call."""
    attributes = (await world.spans(attempted))[-1].attributes
    return attributes[semconv.CALL_FIRST_VERSION], attributes[semconv.CALL_LAST_VERSION]


async def running(world: World, engine: Server, attempted: AttemptedRollout) -> asyncio.Task[str]:
    """A call that the engine does not finish until it is set free."""
    engine.hold()
    task = asyncio.create_task(call(world, attempted))
    await until(lambda: len(engine.asked) == 1)
    return task


async def loading(world: World, engine: Server) -> asyncio.Task[Any]:
    """An update whose weights the engine does not load until it is told to."""
    engine.loaded.clear()
    task = asyncio.create_task(update_weights(world.gateway, "policy", SEVEN))
    await until(lambda: len(engine.told) == 1)
    return task


One = tuple[World, Server]


@pytest.fixture
async def one(anyio_backend: str) -> AsyncIterator[One]:
    engine = engine_of()
    async with before(engine) as world:
        yield world, engine


async def test_vllm_loads_the_weights_then_forgets_what_it_computed_with_the_old_ones(one: One) -> None:
    world, engine = one
    attempted = await world.attempt()
    await call(world, attempted)
    assert await versions(world, attempted) == (0, 0)
    (outcome,) = await update_weights(world.gateway, "p", SEVEN)
    assert (outcome.policy_version, outcome.error) == (7, None)
    assert engine.told == [("/collective_rpc", LOAD), (RESET, {})]
    await call(world, attempted)
    assert await versions(world, attempted) == (7, 7)


async def test_a_server_that_names_its_weights_is_told_their_version_and_reads_its_own_files_anew() -> None:
    engine = engine_of("/update_weight_version")
    async with before(engine) as world:
        await update_weights(world.gateway, "p", WeightUpdate(policy_version=7))
    assert engine.told[0] == ("/collective_rpc", {"method": "reload_weights", "kwargs": {}})
    assert engine.told[-1] == ("/update_weight_version", {"new_version": "7"})


async def test_running_calls_finish_on_the_old_weights_and_new_ones_wait_for_the_new(one: One) -> None:
    world, engine = one
    first, late = [await world.attempt() for _ in range(2)]
    early = await running(world, engine, first)
    updating = asyncio.create_task(update_weights(world.gateway, "policy", SEVEN))
    waiting = asyncio.create_task(call(world, late))
    await until(lambda: len(world.gateway.models.gate("policy").attempts) == 2)
    await asyncio.sleep(0.1)
    assert (engine.told, len(engine.asked)) == ([], 1)
    engine.release()
    engine.loaded.clear()
    assert await early == "Hi!"
    await until(lambda: len(engine.told) == 1)
    await asyncio.sleep(0.1)
    assert len(engine.asked) == 1
    engine.loaded.set()
    await updating
    assert await waiting == "Hi!"
    assert await versions(world, first) == (0, 0)
    assert await versions(world, late) == (7, 7)


async def test_calls_that_are_paused_go_on_with_the_new_weights_and_count_as_the_old_ones(
    one: One,
) -> None:
    world, engine = one
    attempted = await world.attempt()
    early = await running(world, engine, attempted)
    update = WeightUpdate(policy_version=7, path="/w/7", in_flight="pause")
    await asyncio.wait_for(update_weights(world.gateway, "policy", update), 60)
    assert engine.told == [("/pause?mode=keep", {}), ("/collective_rpc", LOAD), (RESET, {}), ("/resume", {})]
    engine.release()
    assert await early == "Hi!"
    assert await versions(world, attempted) == (0, 7)
    rollout = await world.store.get_rollout_by_id(attempted.rollout_id)
    assert rollout is not None
    (transition,) = trace_rollout(rollout, await world.spans(attempted)).transitions
    assert transition.versions.tolist() == [0, 0, 0]


async def test_calls_that_do_not_finish_in_time_keep_their_weights(one: One) -> None:
    world, engine = one
    attempted = await world.attempt()
    early = await running(world, engine, attempted)
    with pytest.raises(UnavailableError, match=r"1 calls .* in_flight='pause'"):
        await update_weights(world.gateway, "policy", WeightUpdate(policy_version=7, path="/w/7", seconds=0.2))
    engine.release()
    assert await early == "Hi!"
    assert await call(world, attempted) == "Hi!"
    assert engine.told == []


async def test_a_server_without_the_route_goes_on_as_it_was_and_the_flag_is_named() -> None:
    engine = engine_of()
    engine.fails = dict.fromkeys(("/collective_rpc", "/pause", "/resume"), 404)
    async with before(engine) as world:
        attempted = await world.attempt()
        for in_flight in ("finish", "pause"):
            with pytest.raises(BackendError, match="VLLM_SERVER_DEV_MODE=1"):
                await update_weights(world.gateway, "p", WeightUpdate(policy_version=7, in_flight=in_flight))
            assert await call(world, attempted) == "Hi!"
        assert await versions(world, attempted) == (0, 0)


@pytest.mark.parametrize(
    ("path", "status"), [("/collective_rpc", 500), ("/reset_prefix_cache", 404), ("/reset_prefix_cache", 200)]
)
async def test_a_server_whose_weights_nobody_knows_answers_no_calls_until_it_loads_some(
    one: One, path: str, status: int
) -> None:
    world, engine = one
    attempted = await world.attempt()
    engine.fails = {path: status}
    with pytest.raises(BackendError, match="no server of the model 'policy' has loaded version 7") as failed:
        await update_weights(world.gateway, "policy", SEVEN)
    assert failed.value.status == 502
    with pytest.raises(openai.InternalServerError, match=r"nobody knows the weights .* update them again"):
        await call(world, attempted)
    assert len(engine.asked) == 0
    engine.fails = {}
    await update_weights(world.gateway, "policy", WeightUpdate(policy_version=8, path="/w/8"))
    await call(world, attempted)
    assert await versions(world, attempted) == (8, 8)


async def test_a_server_that_is_gone_is_not_trusted_when_it_comes_back(one: One) -> None:
    world, _ = one
    attempted = await world.attempt()
    backend = world.gateway.entry("policy").backend
    assert isinstance(backend, HttpBackend)
    connection, there = backend.connection, backend.connection._port
    connection.retries, connection._port = False, 1
    await connection.close()
    with pytest.raises(BackendError, match="cannot be reached"):
        await update_weights(world.gateway, "policy", SEVEN)
    connection._port = there
    with pytest.raises(openai.InternalServerError, match="nobody knows the weights"):
        await call(world, attempted)
    declare_version(world.gateway.entry("policy"), 3)  # whoever started it again knows
    await call(world, attempted)
    assert await versions(world, attempted) == (3, 3)


async def test_a_paused_call_whose_server_then_fails_is_not_trained(one: One) -> None:
    world, engine = one
    attempted = await world.attempt()
    early = await running(world, engine, attempted)
    engine.fails = {"/collective_rpc": 500}
    with pytest.raises(BackendError, match="500"):
        await update_weights(world.gateway, "policy", WeightUpdate(policy_version=7, path="/w", in_flight="pause"))
    assert [path for path, _ in engine.told] == ["/pause?mode=keep", "/collective_rpc", "/resume"]
    engine.release()
    assert await early == "Hi!"
    (span,) = await world.spans(attempted)
    assert span.attributes[semconv.CALL_FLAG] == WEIGHTS_UNKNOWN


async def test_an_update_that_is_cancelled_holds_nothing_and_no_other_begins_meanwhile(one: One) -> None:
    world, engine = one
    updating = await loading(world, engine)
    assert world.gateway.models.gate("policy").held
    with pytest.raises(ConflictError, match="being updated already"):
        await update_weights(world.gateway, "p", SEVEN)
    updating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await updating
    assert not world.gateway.models.gate("policy").held
    with pytest.raises(openai.InternalServerError, match="are being updated"):
        await call(world, await world.attempt())


async def test_a_server_that_is_registered_again_meanwhile_is_updated_all_the_same(one: One) -> None:
    world, engine = one
    updating = await loading(world, engine)
    again = HttpBackend(world.gateway.entry("policy").backend.name)
    world.gateway.models.put(ModelEntry("policy", again))
    engine.loaded.set()
    await updating
    attempted = await world.attempt()
    await call(world, attempted)
    assert await versions(world, attempted) == (7, 7)
    await again.close()


async def test_a_replica_that_failed_gets_no_calls_and_the_others_answer_under_the_new_version() -> None:
    good, bad = engine_of(), engine_of()
    async with before(good, bad) as world:
        bad.fails = {"/collective_rpc": 500}
        updated, failed = await update_weights(world.gateway, "policy", SEVEN)
        assert (updated.policy_version, updated.error) == (7, None)
        assert failed.policy_version is None
        assert "500" in (failed.error or "")
        for _ in range(4):
            attempted = await world.attempt()
            assert await call(world, attempted) == "Hi!"
            assert await versions(world, attempted) == (7, 7)
        assert (len(good.asked), len(bad.asked)) == (4, 0)


async def test_a_replica_that_could_not_be_told_answers_on_under_its_old_version() -> None:
    new, old = engine_of(), engine_of()
    async with before(new, old) as world:
        old.fails = {"/collective_rpc": 404}
        outcomes = await update_weights(world.gateway, "policy", SEVEN)
        assert [outcome.policy_version for outcome in outcomes] == [7, 0]
        attempts = [await world.attempt() for _ in range(20)]  # each keeps to a server of its own
        for attempted in attempts:
            await call(world, attempted)
        assert {await versions(world, attempted) for attempted in attempts} == {(7, 7), (0, 0)}


@asynccontextmanager
async def before_sglang(server: Sglang) -> AsyncIterator[tuple[Gateway, Connection]]:
    async with serving(server.app()) as url:
        connection = Connection(f"{url}/v1")
        backend = SglangBackend(connection, ChatTemplate.from_pretrained(make_talker().tokenizer))
        yield Gateway(ModelTable([ModelEntry("policy", backend)])), connection
        await backend.close()


async def test_sglang_loads_from_disk_and_is_told_what_to_call_the_weights() -> None:
    server = Sglang()
    async with before_sglang(server) as (gateway, connection):
        assert await update_weights(gateway, "policy", SEVEN) == [
            ServerUpdate(url=connection.base_url, policy_version=7)
        ]
        assert server.told == [("/update_weights_from_disk", {"model_path": "/w/7", "weight_version": "7"})]
        assert connection.version == 7
        server.succeeds = False
        with pytest.raises(BackendError, match="Failed to update weights"):
            await update_weights(gateway, "policy", WeightUpdate(policy_version=8, path="/w/8"))
        assert "nobody knows the weights" in (connection.unusable or "")


@pytest.mark.parametrize(
    ("update", "said"),
    [
        (WeightUpdate(policy_version=1), "`path` is missing"),
        (WeightUpdate(policy_version=1, path="/w", in_flight="pause"), "let them finish"),
    ],
)
async def test_what_sglang_cannot_do_is_refused_before_anything_is_held(update: WeightUpdate, said: str) -> None:
    server = Sglang()
    async with before_sglang(server) as (gateway, _):
        with pytest.raises(ConfigError, match=said):
            await update_weights(gateway, "policy", update)
        assert server.told == []


async def test_weights_that_are_not_a_servers_cannot_be_updated(gateway_world: World) -> None:
    hosted = HttpBackend("http://127.0.0.1:1/v1", kind="openai")
    gateway_world.gateway.models.put(ModelEntry("judge", hosted, trainable=False))
    for name in ("judge", "policy"):
        with pytest.raises(ConfigError, match=r"cannot be updated from here.* vllm, sglang"):
            await update_weights(gateway_world.gateway, name, SEVEN)
        with pytest.raises(ConfigError, match="cannot be updated from here"):
            declare_version(gateway_world.gateway.entry(name), 7)
    with pytest.raises(NotFoundError):
        await update_weights(gateway_world.gateway, "nobody", SEVEN)
