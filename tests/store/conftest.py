"""The same store four ways: in memory, in a file, in PostgreSQL, and through a real HTTP server on loopback."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from agentlightning.server.app import create_app
from agentlightning.server.serve import HttpServer
from agentlightning.store.base import LightningStore
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.sql import SqlStore

KINDS = ["memory", "file", "postgres", "http"]


@contextlib.asynccontextmanager
async def open_store(
    kind: str, request: pytest.FixtureRequest, lease_seconds: float = 30.0
) -> AsyncIterator[LightningStore]:
    match kind:
        case "memory":
            address = ":memory:"
        case "postgres":
            address = request.getfixturevalue("postgres_database")
        case _:
            address = request.getfixturevalue("tmp_path") / "store.db"
    sql = await SqlStore.open(address, lease_seconds=lease_seconds)
    try:
        if kind != "http":
            yield sql
            return
        async with HttpServer(create_app(sql, admin_key="an admin's key")) as server:
            client = LightningStoreClient(server.url, "an admin's key", patience=2)
            try:
                yield client
            finally:
                await client.close()
    finally:
        await sql.close()


@pytest.fixture(params=KINDS)
async def store(request, anyio_backend) -> AsyncIterator[LightningStore]:
    async with open_store(request.param, request) as opened:
        yield opened


@pytest.fixture(params=KINDS)
async def hasty_store(request, anyio_backend) -> AsyncIterator[LightningStore]:
    """A store whose leases run out after a fifth of a second."""
    async with open_store(request.param, request, lease_seconds=0.2) as opened:
        yield opened
