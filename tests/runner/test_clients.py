"""Clients for agents: one set of connections per runner, every call attributed."""

from __future__ import annotations

import asyncio

import pytest

import agentlightning as agl
from agentlightning.runner.clients import ClientPool, current_pool, openai_client
from agentlightning.types import LLM
from tests.runner.world import Endpoint

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "hi"}]


async def test_clients_of_a_pool_share_connections_but_not_url_and_key(endpoint: Endpoint) -> None:
    pool = ClientPool(asyncio.get_running_loop())
    token = current_pool.set(pool)
    try:
        clients = []
        for name in ("a", "b"):
            url = LLM(endpoint=endpoint.url, model="m", gateway=True).get_base_url("R", name)
            clients.append(openai_client(LLM(endpoint=url, model="m", api_key=f"key-{name}")))
        await asyncio.gather(
            *(c.chat.completions.create(model="m", messages=MESSAGES) for c in clients)
        )  # type: ignore[arg-type]
    finally:
        current_pool.reset(token)
        await pool.close()
    assert clients[0]._client is clients[1]._client
    assert endpoint.calls == {
        ("/rollout/R/attempt/a/v1/chat/completions", "Bearer key-a"): 1,
        ("/rollout/R/attempt/b/v1/chat/completions", "Bearer key-b"): 1,
    }


async def test_a_failed_call_is_not_repeated(endpoint: Endpoint) -> None:
    import openai

    endpoint.status = 500
    client = openai_client(LLM(endpoint=endpoint.url, model="m"))
    with pytest.raises(openai.InternalServerError):
        await client.chat.completions.create(model="m", messages=MESSAGES)  # type: ignore[arg-type]
    await client.close()
    assert sum(endpoint.calls.values()) == 1


async def test_a_sync_agent_with_its_own_event_loop_gets_a_client_of_its_own(
    endpoint: Endpoint,
) -> None:
    async def ask(llm: LLM) -> str | None:
        async with agl.openai_client(llm) as client:
            answer = await client.chat.completions.create(model="m", messages=MESSAGES)  # type: ignore[arg-type]
            return answer.choices[0].message.content

    pool = ClientPool(asyncio.get_running_loop())
    token = current_pool.set(pool)
    llm = LLM(endpoint=endpoint.url, model="m")
    pool.client(llm)
    assert await asyncio.to_thread(lambda: asyncio.run(ask(llm))) == "hello"
    current_pool.reset(token)
    await pool.close()
