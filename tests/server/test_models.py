"""The gateway's model table over HTTP, as a trainer in another process uses it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from agentlightning.errors import ConfigError, UnavailableError
from agentlightning.gateway.app import Gateway
from agentlightning.gateway.backend import Sampling
from agentlightning.gateway.backends.http import HttpBackend
from agentlightning.gateway.models import ModelEntry, ModelTable
from agentlightning.server.app import create_app
from agentlightning.server.models import register_model, unregister_model
from agentlightning.server.serve import HttpServer
from agentlightning.store.sql import SqlStore

pytestmark = pytest.mark.anyio
KEY = "a key of the admin"


@asynccontextmanager
async def served() -> AsyncIterator[tuple[HttpServer, ModelTable, SqlStore]]:
    store = await SqlStore.open(":memory:")
    models = ModelTable()
    app = create_app(store, gateway=Gateway(models, store, admin_key=KEY), admin_key=KEY, body_limit=10_000)
    async with HttpServer(app) as http:
        yield http, models, store
    await store.close()


def entry(temperature: float = 1.0) -> ModelEntry:
    return ModelEntry("writer", HttpBackend("http://127.0.0.1:1/v1"), train=Sampling(temperature=temperature))


async def test_a_trainer_lends_its_policy_changes_it_and_takes_it_back() -> None:
    async with served() as (http, models, _):
        await register_model(http.url, entry(), base_url="http://127.0.0.1:1/v1", api_key=KEY)
        assert models.resolve("gpt-4o").name == "writer"
        await register_model(http.url, entry(0.7), base_url="http://127.0.0.1:2/v1", api_key=KEY)
        (only,) = models
        assert only.train.temperature == 0.7
        assert isinstance(only.backend, HttpBackend)
        assert only.backend.base_url == "http://127.0.0.1:2/v1"
        await unregister_model(http.url, "writer", api_key=KEY)
        await unregister_model(http.url, "writer", api_key=KEY)
        assert list(models) == []


async def test_only_the_admin_key_changes_the_table_and_no_key_is_shown() -> None:
    async with served() as (http, models, store):
        attempt = await store.start_rollout("task")
        for key in (None, attempt.api_key, "wrong"):
            with pytest.raises(ConfigError, match=r"40[13]"):
                await register_model(http.url, entry(), base_url="http://127.0.0.1:1/v1", api_key=key)
        assert list(models) == []
        headers = {"authorization": f"Bearer {KEY}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            body = {"base_url": "http://127.0.0.1:1/v1", "api_key": "a secret"}
            async with session.put(f"{http.url}/api/v1/models/m", json=body) as answer:
                assert answer.status == 200
            async with session.get(f"{http.url}/api/v1/models") as answer:
                assert "a secret" not in await answer.text()
            for wrong in ({"base_url": 7}, {"base_uri": "x"}, {"base_url": "ftp://x"}):
                async with session.put(f"{http.url}/api/v1/models/m", json=wrong) as answer:
                    assert answer.status == 422, await answer.text()


async def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(UnavailableError, match="agl server"):
        await register_model("http://127.0.0.1:1", entry(), base_url="http://127.0.0.1:1/v1", api_key=None)


async def test_a_keyed_server_shows_its_models_to_attempts_only_and_takes_no_endless_registration() -> None:
    async with served() as (http, models, store):
        models.put(entry())
        attempt = await store.start_rollout("task")
        async with aiohttp.ClientSession(http.url) as session:
            for headers, status in (({}, 401), ({"x-api-key": "wrong"}, 401), ({"x-api-key": attempt.api_key}, 200)):
                for path in ("/v1/models", "/v1/models/writer"):
                    async with session.get(path, headers=headers) as answer:
                        assert answer.status == status, path
            headers = {"authorization": f"Bearer {KEY}"}
            async with session.put("/api/v1/models/m", data=b" " * 10_001, headers=headers) as answer:
                assert answer.status == 413
