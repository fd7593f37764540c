"""The same store three ways: in memory, in a file, and through a real HTTP server on loopback."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentlightning.server.app import create_app
from agentlightning.server.serve import HttpServer
from agentlightning.store.base import LightningStore
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.sql import SqlStore


@contextlib.asynccontextmanager
async def open_store(kind: str, directory: Path, lease_seconds: float = 30.0) -> AsyncIterator[LightningStore]:
    path = ":memory:" if kind == "memory" else directory / "store.db"
    sql = await SqlStore.open(path, lease_seconds=lease_seconds)
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


@pytest.fixture(params=["memory", "file", "http"])
async def store(request, tmp_path, anyio_backend) -> AsyncIterator[LightningStore]:
    async with open_store(request.param, tmp_path) as opened:
        yield opened


@pytest.fixture(params=["memory", "file", "http"])
async def hasty_store(request, tmp_path, anyio_backend) -> AsyncIterator[LightningStore]:
    """A store whose leases run out after a fifth of a second."""
    async with open_store(request.param, tmp_path, lease_seconds=0.2) as opened:
        yield opened
