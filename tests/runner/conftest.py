"""Fixtures of the runner's tests; what they hand out is in `world`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentlightning.store.sql import SqlStore
from tests.runner.world import LEASE_SECONDS, Endpoint, serving


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqlStore]:
    opened = await SqlStore.open(tmp_path / "store.db")
    yield opened
    await opened.close()


@pytest.fixture
async def brief_store(tmp_path: Path) -> AsyncIterator[SqlStore]:
    """A store whose leases are short, so that heartbeats are frequent."""
    opened = await SqlStore.open(tmp_path / "brief.db", lease_seconds=LEASE_SECONDS)
    yield opened
    await opened.close()


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    async with serving() as server:
        yield server
