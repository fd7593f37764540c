"""The gateway's model table over HTTP, as trainers in other processes and those who operate servers
use it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest

from agentlightning.errors import ConflictError, ForbiddenError, InvalidError, NotFoundError
from agentlightning.gateway.backend import Sampling
from agentlightning.gateway.backends.http import HttpBackend
from agentlightning.gateway.gateway import Gateway
from agentlightning.gateway.models import ModelEntry, ModelTable
from agentlightning.gateway.replicas import Replicas
from agentlightning.server.app import create_app
from agentlightning.server.model_calls import HoldModel, ReleaseModel, RemoveModel, registration
from agentlightning.server.serve import HttpServer
from agentlightning.server.server_process import models_held
from agentlightning.store.base import CALLS
from agentlightning.store.calls import StoreCall
from agentlightning.store.client import LightningStoreClient, form_of
from agentlightning.store.sql import SqlStore
from tests.gateway.upstream import Server, until

pytestmark = pytest.mark.anyio
KEY = "a key of the admin"
NOBODY = "http://127.0.0.1:1/v1"
"""Where no server is."""


class Place:
    """A server with a gateway, and what an admin asks of it."""

    def __init__(
        self, http: HttpServer, gateway: Gateway, store: SqlStore, admin: aiohttp.ClientSession
    ) -> None:
        self.http, self.url, self.gateway, self.models = http, http.url, gateway, gateway.models
        self.store, self.admin = store, admin

    async def perform(self, call: StoreCall[Any], key: str | None = KEY) -> Any:
        client = LightningStoreClient(self.url, key, patience=1)
        try:
            return await client.perform(call)
        finally:
            await client.close()

    async def put(self, name: str, **registration: Any) -> tuple[int, Any]:
        async with self.admin.put(f"/api/v1/models/{name}", json=registration) as answer:
            return answer.status, await answer.json()

    async def refused(self, name: str, **registration: Any) -> str:
        """The message of a refusal as unusable."""
        status, said = await self.put(name, **registration)
        assert status == 422, said
        return said["error"]["message"]

    async def list(self) -> list[dict[str, Any]]:
        async with self.admin.get("/api/v1/models") as answer:
            assert answer.status == 200
            return await answer.json()

    async def ask(self, model: str) -> str:
        """What the model answers."""
        body = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
        async with self.admin.post("/v1/chat/completions", json=body) as answer:
            said = await answer.json()
            assert answer.status == 200, said
            return said["choices"][0]["message"]["content"]


@asynccontextmanager
async def served() -> AsyncIterator[Place]:
    store = await SqlStore.open(":memory:")
    gateway = Gateway(ModelTable(), store, admin_key=KEY)
    app = create_app(store, gateway=gateway, admin_key=KEY, body_limit=10_000)
    async with (
        HttpServer(app) as http,
        aiohttp.ClientSession(http.url, headers={"authorization": f"Bearer {KEY}"}) as admin,
    ):
        yield Place(http, gateway, store, admin)
    await gateway.close()
    await store.close()


@asynccontextmanager
async def upstreams(count: int) -> AsyncIterator[list[Server]]:
    async with AsyncExitStack() as stack:
        servers = [Server() for _ in range(count)]
        for server in servers:
            await stack.enter_async_context(server.http)
            stack.callback(server.end)
        yield servers


async def lend(place: Place, entry: ModelEntry, base_url: str, owner: str = "run-1") -> None:
    await place.perform(registration(entry, base_url, api_key="its own", owner=owner))


async def take_back(place: Place, owner: str) -> None:
    await place.perform(RemoveModel(name="writer", owner=owner))


def entry(temperature: float = 1.0) -> ModelEntry:
    return ModelEntry(
        "writer", HttpBackend(NOBODY), train=Sampling(temperature=temperature, max_tokens=5)
    )


async def test_only_the_admin_key_changes_the_table_and_no_key_is_shown() -> None:
    async with served() as place:
        attempt = await place.store.start_rollout("task")
        trainer = await place.store.issue_key(name="trainer", scopes=["trainer"])
        registering = registration(entry(), NOBODY, api_key="its own", owner="run-1")
        for key in (None, attempt.api_key, trainer.api_key, "wrong"):
            for call in (
                registering,
                HoldModel(name="m"),
                ReleaseModel(name="m"),
                RemoveModel(name="m"),
            ):
                with pytest.raises(ForbiddenError):
                    await place.perform(call, key)
        assert list(place.models) == []
        status, said = await place.put(
            "m", base_url=[NOBODY, NOBODY], api_key="a secret", check=False
        )
        assert status == 200
        assert "secret" not in str([said, await place.list()])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"base_uri": "x"}, "base_uri"),
        ({"base_url": "ftp://x"}, "http://"),
        ({"base_url": []}, "names no server"),
        ({"base_url": NOBODY, "kind": "vlm"}, "vlm"),
        ({"base_url": NOBODY, "train": {"temprature": 0.5}}, "temprature"),
        ({"base_url": NOBODY, "kind": "openai"}, "trainable=False"),
        (
            {"base_url": NOBODY, "trainable": False, "val": {"temperature": 0}},
            "asked as agents ask it",
        ),
        ({"base_url": NOBODY, "kind": "sglang"}, "tokenizer"),
        ({"base_url": NOBODY, "check": False, "aliases": [".."]}, "'..' names no model"),
        ({"base_url": NOBODY, "check": False, "aliases": ["org/./m"]}, "names no model"),
    ],
)
async def test_a_registration_that_cannot_be_used_is_refused_and_says_where(
    wrong: dict[str, Any], says: str
) -> None:
    async with served() as place:
        assert says in await place.refused("m", **wrong)
        assert list(place.models) == []


async def test_a_server_whose_model_is_to_be_trained_is_asked_for_one_token() -> None:
    async with served() as place, upstreams(2) as (good, silent):
        silent.behaviour = "tells no ids"
        assert (await place.put("m", base_url=good.url))[0] == 200
        assert len(good.asked) == 1
        said = await place.refused("n", base_url=[good.url, silent.url])
        assert silent.url in said
        assert "backend returns no token ids" in said
        assert "vLLM 0.16" in said
        with pytest.raises(InvalidError, match="trainable"):
            await lend(place, entry(), silent.url)
        assert [one.name for one in place.models] == ["m"]
        asked = len(silent.asked)
        assert (await place.put("n", base_url=silent.url, trainable=False))[0] == 200
        assert (await place.put("o", base_url=silent.url, check=False))[0] == 200
        assert len(silent.asked) == asked


async def test_several_servers_answer_under_one_name_and_its_aliases() -> None:
    async with served() as place, upstreams(2) as servers:
        both = [server.url for server in servers]
        status, said = await place.put(
            "org/model", base_url=both, aliases=["gpt-4o"], train={"temperature": 0.5}, val=None
        )
        assert status == 200
        assert [one["base_url"] for one in said["replicas"]] == both
        (registered,) = place.models
        assert isinstance(registered.backend, Replicas)
        assert (registered.train, registered.val) == (Sampling(temperature=0.5), None)
        asked = [len(server.asked) for server in servers]
        for name in ("org/model", "gpt-4o"):
            assert await place.ask(name) == "Hi!"
        assert [len(server.asked) for server in servers] == [count + 1 for count in asked]
        assert "gpt-4o" in await place.refused(
            "other", base_url=NOBODY, aliases=["gpt-4o"], check=False
        )
        async with place.admin.delete("/api/v1/models/org/model") as answer:
            assert answer.status == 200
        assert list(place.models) == []


async def test_the_list_says_how_each_server_does() -> None:
    async with served() as place, upstreams(3) as (busy, broken, alone):
        await place.put("m", base_url=[busy.url, broken.url], owner="run-1")
        await place.put("n", base_url=alone.url, trainable=False)
        broken.behaviour = "500"
        for _ in range(6):
            await place.ask("m")
        busy.hold()
        asking = [asyncio.create_task(place.ask("m")) for _ in range(3)]
        await until(lambda: busy.running == 3)
        several, single = await place.list()
        assert (several["owner"], several["trainable"], single["trainable"]) == (
            "run-1",
            True,
            False,
        )
        first, second = several["replicas"]
        assert first == {
            "base_url": busy.url,
            "kind": "vllm",
            "healthy": True,
            "running": 3,
            "ejected_since": None,
            "why": None,
        }
        assert (second["healthy"], second["running"]) == (False, 0)
        assert second["ejected_since"] > 0
        assert "not now" in second["why"]
        assert single["replicas"][0]["healthy"]
        busy.release()
        assert await asyncio.gather(*asking) == ["Hi!"] * 3
        await alone.http.stop()
        assert not (await place.list())[1]["replicas"][0]["healthy"]


async def test_a_model_is_changed_while_its_calls_run() -> None:
    async with served() as place, upstreams(2) as (old, new):
        await place.put("m", base_url=old.url)
        (registered,) = place.models
        old.hold()
        running = asyncio.create_task(place.ask("m"))
        await until(lambda: old.running == 1)
        assert (await place.put("m", base_url=new.url))[0] == 200
        assert await place.ask("m") == "Hi!"
        assert len(new.asked) == 2
        assert not running.done()
        old.release()
        assert await running == "Hi!"
        assert isinstance(registered.backend, HttpBackend)
        connection = registered.backend.connection
        await until(lambda: connection.running == 0)
        assert connection._session is None, "nobody asks there again"


async def test_a_name_is_its_owners_as_long_as_its_server_lives() -> None:
    async with served() as place, upstreams(2) as (one, other):
        await lend(place, entry(), one.url, owner="run-1")
        with pytest.raises(ConflictError, match="registered by run-1 and its server lives"):
            await lend(place, entry(), other.url, owner="run-2")
        assert (await place.put("writer", base_url=other.url))[0] == 409
        await lend(place, entry(0.5), one.url, owner="run-1")
        assert place.models.resolve("gpt-4o").train == Sampling(temperature=0.5, max_tokens=5)
        await one.http.stop()  # a run that was killed takes nothing back
        await lend(place, entry(), other.url, owner="run-2")
        await lend(place, entry(), other.url, owner="run-3")  # run-2's port is its now
        await take_back(place, "run-1")  # late, and no longer its own
        assert [model.backend.name for model in place.models] == [other.url]
        for _ in range(2):
            await take_back(place, "run-3")
        assert list(place.models) == []


async def test_a_model_of_the_server_itself_is_not_replaced_by_accident() -> None:
    async with served() as place, upstreams(2) as (own, other):
        place.models.put(ModelEntry("policy", HttpBackend(own.url)))
        status, said = await place.put("policy", base_url=other.url)
        assert status == 409
        assert "the server itself" in said["error"]["message"]
        assert (await place.put("policy", base_url=other.url, owner="run-2", replace=True))[
            0
        ] == 200
        assert [
            (model["owner"], model["replicas"][0]["base_url"]) for model in await place.list()
        ] == [("run-2", other.url)]


def test_a_server_that_hangs_is_not_waited_for_as_one_that_checks_its_store() -> None:
    """A step of training begins with a hold: it is not worth ten minutes."""
    assert form_of(HoldModel).request(HoldModel(name="policy")).wait == 0
    assert form_of(CALLS["check_store"]).request(CALLS["check_store"]()).wait == 600


# --- calls that wait for new weights --------------------------------------------------------------

NAME = "Qwen/Qwen3-4B"


@pytest.fixture
async def place(anyio_backend) -> AsyncIterator[Place]:
    """A server with one model."""
    async with served() as built, upstreams(1) as (server,):
        built.models.put(ModelEntry(NAME, HttpBackend(server.url)))
        yield built


def version(place: Place) -> int:
    backend = place.gateway.entry(NAME).backend
    assert isinstance(backend, HttpBackend)
    return backend.connection.version


async def held(place: Place) -> asyncio.Task[str]:
    """A call that waits."""
    asking = asyncio.create_task(place.ask(NAME))
    await until(lambda: place.models.gate(NAME).waiting == 1)
    assert place.models.gate(NAME).running == 0
    return asking


async def test_a_trainer_holds_calls_and_lets_them_go_on_with_weights_of_its_own(
    place: Place,
) -> None:
    await place.perform(HoldModel(name=NAME))
    asking = await held(place)
    await place.perform(ReleaseModel(name=NAME, policy_version=5))
    assert (await asking, version(place)) == ("Hi!", 5)
    async with place.admin.get("/metrics") as answer:
        assert "agl_gateway_held_calls_total 1.0" in await answer.text()
    again = {
        "base_url": place.gateway.entry(NAME).backend.name,
        "check": False,
        "train": {"temperature": 0.5},
    }
    assert (await place.put(NAME, **again))[0] == 200
    assert version(place) == 5, "a server that is registered again holds the weights it held"


async def test_a_hold_of_a_trainer_that_died_ends_by_itself(place: Place) -> None:
    await place.perform(HoldModel(name=NAME, seconds=0.3))
    assert await asyncio.wait_for(place.ask(NAME), 60) == "Hi!"


async def test_a_person_and_a_trainer_hold_each_by_themselves(place: Place) -> None:
    await place.perform(HoldModel(name=NAME, seconds=60, holder="dashboard"))
    async with models_held(place.url, [NAME], api_key=KEY, lease=0.6):
        await asyncio.sleep(1.2)
        assert len(place.models.gate(NAME).holds()) == 2
    asking = await held(place)
    (told,) = await place.list()
    assert (told["held"], told["paused"], told["waiting"], told["running"]) == (True, True, 1, 0)
    await place.perform(ReleaseModel(name=NAME, holder="dashboard"))
    assert await asking == "Hi!"


async def test_a_block_goes_on_where_nothing_can_be_held(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    for url, name in ((place.url, "nobody"), ("http://127.0.0.1:1", NAME)):
        async with models_held(url, [name], api_key=KEY):
            pass
    assert "no model is called 'nobody'" in caplog.text
    assert "cannot be reached" in caplog.text


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("hold", {"seconds": 0}),
        ("hold", {"second": 1}),
        ("hold", []),
        ("release", {"policy_version": -1}),
    ],
)
async def test_what_is_wrong_with_a_request_is_said(place: Place, verb: str, body: Any) -> None:
    assert (await place.admin.post(f"/api/v1/models/{NAME}/{verb}", json=body)).status == 422
    assert not place.models.gate(NAME).held
    with pytest.raises(NotFoundError, match="the models here are"):
        await place.perform(HoldModel(name="nobody"))


async def test_a_server_that_stops_tells_the_calls_it_holds(place: Place) -> None:
    await place.perform(HoldModel(name=NAME))
    asking = await held(place)
    await place.http.stop()
    with pytest.raises(AssertionError, match="model_held"):
        await asking
