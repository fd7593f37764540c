"""A store in memory behind a real server on loopback, and a plain HTTP client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import anyio
import pytest

from agentlightning.server.app import create_app
from agentlightning.server.serve import HttpServer
from agentlightning.store.sql import SqlStore

ADMIN_KEY = "an admin's key"


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for what nothing announces."""
    with anyio.fail_after(60):
        while not await condition():  # noqa: ASYNC110
            await anyio.sleep(0.01)


@pytest.fixture
async def store(anyio_backend) -> AsyncIterator[SqlStore]:
    opened = await SqlStore.open(":memory:")
    yield opened
    await opened.close()


@pytest.fixture
async def server(store) -> AsyncIterator[HttpServer]:
    async with HttpServer(create_app(store, admin_key=ADMIN_KEY, body_limit=100_000)) as running:
        yield running


@pytest.fixture
async def http(server) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(server.url) as session:
        yield session
