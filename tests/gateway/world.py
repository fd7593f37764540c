"""A real server on loopback: gateway, embedded engine, SQLite store, and OpenAI's own client to
call it with."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from openai import AsyncOpenAI

from agentlightning.engine.engine import Engine
from agentlightning.engine.service import EngineService
from agentlightning.gateway.backend import Sampling
from agentlightning.gateway.chat.template import ChatTemplate
from agentlightning.gateway.chat.token_backend import TokenBackend
from agentlightning.gateway.gateway import Gateway
from agentlightning.gateway.models import ModelEntry, ModelTable
from agentlightning.server.app import create_app
from agentlightning.server.serve import HttpServer
from agentlightning.store.sql import SqlStore
from agentlightning.types import AttemptedRollout, EnqueueRolloutRequest, Mode, Span
from tests.gateway.talker import make_talker

# Temperature 0 everywhere: the talker then says what it has learned.
GREEDY = Sampling(temperature=0.0)


@asynccontextmanager
async def serving(app: Any, **settings: Any) -> AsyncIterator[str]:
    """Serve an ASGI application on a free port, with these settings of uvicorn; gives its root
    URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    # as HttpServer does: nothing waits for an ACK
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    config = uvicorn.Config(app, log_level="error", lifespan="off", **settings)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def serving_gateway(gateway: Gateway) -> AsyncIterator[str]:
    """Serve a gateway's calls on a free port, to whoever asks; gives its root URL."""
    async with HttpServer(create_app(None, gateway=gateway)) as http:
        yield http.url


@asynccontextmanager
async def talking(
    policy: Any = None, *, length: int = 512
) -> AsyncIterator[tuple[TokenBackend, EngineService]]:
    """A policy, or else the talker, behind a running engine."""
    talker = policy or make_talker()
    end = talker.tokenizer.eos_token_id
    service = EngineService(
        Engine(talker.model, eos_token_ids=[end], max_sequence_length=length, slots=16)
    )
    service.start()
    try:
        chat = ChatTemplate.from_pretrained(talker.tokenizer)
        yield TokenBackend(chat, service, name="embedded", max_sequence_length=length), service
    finally:
        service.close()


@dataclass
class World:
    url: str
    store: SqlStore
    gateway: Gateway
    service: EngineService
    clients: list[AsyncOpenAI] = field(default_factory=list)

    async def attempt(self, mode: Mode = "train", **request: Any) -> AttemptedRollout:
        """A new rollout with its first attempt, leased."""
        await self.store.enqueue_many_rollouts(
            [EnqueueRolloutRequest(input="task", mode=mode, **request)]
        )
        leased = await self.store.dequeue_rollout()
        assert leased is not None
        return leased

    def client(self, attempted: AttemptedRollout | None = None, **options: Any) -> AsyncOpenAI:
        """OpenAI's client, at the attempt's own URL and with its key, or at the bare URL."""
        url, key = f"{self.url}/v1", "EMPTY"
        if attempted is not None:
            url = f"{self.url}/rollout/{attempted.rollout_id}/attempt/{attempted.attempt.attempt_id}/v1"
            key = attempted.api_key or key
        self.clients.append(
            AsyncOpenAI(**{"base_url": url, "api_key": key, "max_retries": 0, **options})
        )
        return self.clients[-1]

    async def spans(self, attempted: AttemptedRollout) -> list[Span]:
        return await self.store.query_spans(attempted.rollout_id, attempted.attempt.attempt_id)


@asynccontextmanager
async def fronting(
    *models: ModelEntry, store: SqlStore | None = None, **options: Any
) -> AsyncIterator[World]:
    """A gateway of these models, which records in this store, or in one in memory."""
    own = store or await SqlStore.open(":memory:")
    gateway = Gateway(ModelTable(models), own, **options)
    async with serving_gateway(gateway) as url:
        built = World(url, own, gateway, None)  # type: ignore[arg-type]
        try:
            yield built
        finally:
            for client in built.clients:
                await client.close()
    await gateway.close()
    if store is None:
        await own.close()


@asynccontextmanager
async def world(
    directory: Path, *, policy: Any = None, length: int = 512, **options: Any
) -> AsyncIterator[World]:
    """A gateway of one model, `policy`, behind a running engine, which records in a store in the
    directory."""
    store = await SqlStore.open(directory / "store.sqlite", synchronous="NORMAL")
    try:
        async with talking(policy, length=length) as (backend, service):
            entry = ModelEntry(
                "policy", backend, train=GREEDY, val=Sampling(temperature=0.0, max_tokens=4)
            )
            async with fronting(entry, store=store, **options) as built:
                built.service = service
                yield built
    finally:
        await store.close()
