"""LLM calls reach their endpoints past the web framework as they would through it."""

from __future__ import annotations

import aiohttp
import pytest

from agentlightning.gateway.app import Gateway
from agentlightning.gateway.models import ModelTable
from agentlightning.server.app import create_app
from agentlightning.server.serve import HttpServer

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("method", "path", "status", "says"),
    [
        ("POST", "/v1/chat/completions", 404, "no model is called"),
        ("POST", "/rollout/none/attempt/none/v1/chat/completions", 404, "there is no rollout"),
        ("POST", "/rollout/v1/attempt/v1/v1/chat/completions", 404, "there is no rollout"),
        ("POST", "/rollout/none/attempt//v1/chat/completions", 404, "/docs"),
        ("POST", "/rollout/a/attempt/b/c/v1/chat/completions", 404, "/docs"),
        ("POST", "/v1/chat/nonsense", 404, "/docs"),
        ("GET", "/v1/chat/completions", 405, "GET"),
        ("POST", "/v1/models", 405, "POST"),
    ],
)
async def test_a_path_is_understood_as_the_framework_does(store, method: str, path: str, status: int, says: str):
    app = create_app(store, gateway=Gateway(ModelTable(), store))
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    async with HttpServer(app) as server, aiohttp.ClientSession(server.url) as http:
        async with http.request(method, path, json=body) as answer:
            assert answer.status == status
            assert says in await answer.text()
        async with http.get("/metrics") as answer:
            text = await answer.text()
    template = "/rollout/{rollout_id}/attempt/{attempt_id}/v1/chat/completions"
    assert (f'route="{template}"' in text) == ("no rollout" in says)
