"""Models held over HTTP, as a trainer in another process does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentlightning.errors import ForbiddenError, InvalidError, NotFoundError
from agentlightning.gateway.app import Gateway
from agentlightning.gateway.backends.http import HttpBackend
from agentlightning.gateway.models import ModelEntry, ModelTable
from agentlightning.server.app import create_app
from agentlightning.server.models import HoldModel, ReleaseModel
from agentlightning.server.serve import HttpServer
from agentlightning.server.service import models_held
from agentlightning.store.calls import Call
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.sql import SqlStore
from tests.server.conftest import until

pytestmark = pytest.mark.anyio
KEY = "a key of the admin"
NAME = "Qwen/Qwen3-4B"


class Vllm:
    """Stands in for a vLLM server."""

    def __init__(self) -> None:
        self.asked = 0

    async def _answer(self, request: Request) -> Response:
        self.asked += 1
        choice = {"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}
        logprobs = {"content": [{"logprob": -0.5}]}
        usage = {"prompt_tokens": 2, "completion_tokens": 1}
        choices = [choice | {"logprobs": logprobs, "token_ids": [3]}]
        return JSONResponse({"choices": choices, "prompt_token_ids": [1, 2], "usage": usage})

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/v1/chat/completions", self._answer, methods=["POST"])])


class Place:
    """A server whose gateway has one model, and what a trainer and an agent say to it."""

    def __init__(self, url: str, gateway: Gateway, vllm: Vllm, http: aiohttp.ClientSession, server: HttpServer) -> None:
        self.url, self.gateway, self.vllm, self.http, self.server = url, gateway, vllm, http, server

    @property
    def held(self) -> bool:
        return self.gateway.models.gate(NAME).held

    async def call(self) -> tuple[int, Any]:
        body = {"model": NAME, "messages": [{"role": "user", "content": "hello"}]}
        async with self.http.post("/v1/chat/completions", json=body) as answer:
            return answer.status, await answer.json()

    async def perform(self, call: Call[Any], key: str | None = KEY) -> Any:
        client = LightningStoreClient(self.url, key, patience=1)
        try:
            return await client.perform(call)
        finally:
            await client.close()

    async def post(self, verb: str, body: Any) -> int:
        async with self.http.post(f"/api/v1/models/{NAME}/{verb}", json=body) as answer:
            return answer.status


@pytest.fixture
async def place(anyio_backend) -> AsyncIterator[Place]:
    async with _place() as built:
        yield built


@asynccontextmanager
async def _place() -> AsyncIterator[Place]:
    store, vllm = await SqlStore.open(":memory:"), Vllm()
    headers = {"authorization": f"Bearer {KEY}"}
    async with HttpServer(vllm.app()) as upstream:
        backend = HttpBackend(f"{upstream.url}/v1")
        gateway = Gateway(ModelTable([ModelEntry(NAME, backend)]), store, admin_key=KEY)
        app = create_app(store, gateway=gateway, admin_key=KEY, body_limit=10_000)
        async with HttpServer(app) as server, aiohttp.ClientSession(server.url, headers=headers) as http:
            yield Place(server.url, gateway, vllm, http, server)
        await gateway.close()
    await store.close()


async def test_a_trainer_holds_calls_and_lets_them_go_on_with_weights_of_its_own(place: Place) -> None:
    await place.perform(HoldModel(name=NAME))
    call = asyncio.create_task(place.call())
    done, _ = await asyncio.wait([call], timeout=0.3)
    assert not done and place.vllm.asked == 0
    await place.perform(ReleaseModel(name=NAME, policy_version=5))
    assert (await call)[0] == 200
    backend = place.gateway.entry(NAME).backend
    assert isinstance(backend, HttpBackend)
    assert backend.connection.version == 5
    async with place.http.get("/metrics") as answer:
        assert "agl_gateway_held_calls_total 1.0" in await answer.text()


async def test_a_hold_of_a_trainer_that_died_ends_by_itself(place: Place) -> None:
    await place.perform(HoldModel(name=NAME, seconds=0.3))
    assert (await asyncio.wait_for(place.call(), 60))[0] == 200


async def test_only_an_admin_holds_a_model(place: Place) -> None:
    async with place.http.post("/api/v1/keys", json={"name": "trainer", "scopes": ["trainer"]}) as answer:
        trainer = (await answer.json())["api_key"]
    for key in (None, "wrong", trainer):
        for call in (HoldModel(name=NAME), ReleaseModel(name=NAME)):
            with pytest.raises(ForbiddenError):
                await place.perform(call, key)
    assert not place.held


async def test_a_person_and_a_trainer_hold_each_by_themselves(place: Place) -> None:
    assert await place.post("hold", {"seconds": 60, "holder": "dashboard"}) == 200
    async with models_held(place.url, [NAME], api_key=KEY):
        pass
    call = asyncio.create_task(place.call())

    async def waits() -> bool:
        return place.gateway.models.gate(NAME).waiting == 1

    await until(waits)
    async with place.http.get("/api/v1/models") as answer:
        (told,) = await answer.json()
    assert (told["held"], told["waiting"], told["running"]) == (True, 1, 0)
    assert await place.post("release", {"holder": "dashboard"}) == 200
    assert (await call)[0] == 200 and not place.held


async def test_a_hold_lasts_as_long_as_its_block(place: Place) -> None:
    async with models_held(place.url, [NAME], api_key=KEY, lease=0.6):
        await asyncio.sleep(1.2)
        assert place.held
    assert not place.held


async def test_a_block_goes_on_where_nothing_can_be_held(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    done = []
    for url, name in ((place.url, "nobody"), ("http://127.0.0.1:1", NAME)):
        with caplog.at_level(logging.WARNING):
            async with models_held(url, [name], api_key=KEY):
                done.append(name)
    assert done == ["nobody", NAME]
    assert "no model is called 'nobody'" in caplog.text
    assert "cannot be reached" in caplog.text


async def test_a_server_that_is_registered_again_holds_the_weights_it_held(place: Place) -> None:
    await place.perform(ReleaseModel(name=NAME, policy_version=3))
    body = {"base_url": place.gateway.entry(NAME).backend.name, "check": False, "train": {"temperature": 0.5}}
    async with place.http.put(f"/api/v1/models/{NAME}", json=body) as answer:
        assert answer.status == 200
    backend = place.gateway.entry(NAME).backend
    assert isinstance(backend, HttpBackend)
    assert (place.gateway.entry(NAME).train.temperature, backend.connection.version) == (0.5, 3)


async def test_what_is_wrong_with_a_request_is_said(place: Place) -> None:
    for verb, body in (
        ("hold", {"seconds": 0}),
        ("hold", {"second": 1}),
        ("hold", []),
        ("release", {"policy_version": -1}),
    ):
        assert await place.post(verb, body) == 422, (verb, body)
    assert await place.post("hold", {"x": "y" * 10_000}) == 413
    assert not place.held
    with pytest.raises(NotFoundError, match="the models here are"):
        await place.perform(HoldModel(name="nobody"))
    with pytest.raises(InvalidError):
        await place.perform(HoldModel(name=NAME, seconds=-1.0))


async def test_a_server_that_stops_tells_the_calls_it_holds(place: Place) -> None:
    await place.perform(HoldModel(name=NAME))
    call = asyncio.create_task(place.call())
    await asyncio.wait([call], timeout=0.3)
    await place.server.stop()
    status, said = await asyncio.wait_for(call, 60)
    assert (status, said["error"]["code"]) == (503, "model_held")
