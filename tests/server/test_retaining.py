"""What is old goes by itself, and a store that is away for a while does not end that."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import anyio
import pytest

from agentlightning.errors import UnavailableError
from agentlightning.server.service import retain
from agentlightning.store.base import LightningStore
from agentlightning.store.sql import SqlStore
from tests.server.conftest import until

pytestmark = pytest.mark.anyio


async def ended(store: LightningStore) -> str:
    rollout = await store.start_rollout("a task")
    await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")
    return rollout.rollout_id


@contextlib.asynccontextmanager
async def retaining(store: LightningStore, older_than: float, **options) -> AsyncIterator[None]:
    task = asyncio.create_task(retain(store, older_than, **options))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()


async def until_gone(store: SqlStore, rollout_id: str) -> None:
    async def gone() -> bool:
        return await store.get_rollout_by_id(rollout_id) is None

    await until(gone)


async def test_what_is_old_goes_at_once_and_again_and_again(store, caplog):
    caplog.set_level(logging.INFO, "agentlightning")
    first, unfinished = await ended(store), await store.start_rollout("at work")
    async with retaining(store, 1e-6, every_seconds=0.01):
        await until_gone(store, first)
        await until_gone(store, await ended(store))
        assert await store.get_rollout_by_id(unfinished.rollout_id) is not None
    assert "removed 1 rollouts" in caplog.text
    assert "delete_rollouts by retention" in caplog.text


async def test_what_is_young_by_the_stores_clock_stays(caplog):
    """That of a machine which slept for a day is a day behind."""
    caplog.set_level(logging.INFO, "agentlightning.audit")
    store = await SqlStore.open(":memory:", clock=lambda: time.time() - 86_400)
    young = await ended(store)

    async def looked() -> bool:
        return len(caplog.records) >= 2

    async with retaining(store, 3600, every_seconds=0.001):
        await until(looked)
    assert await store.get_rollout_by_id(young) is not None
    await store.close()


async def test_a_store_that_is_away_is_tried_again(store, caplog, monkeypatch):
    rollout_id, perform, lost = await ended(store), store.perform, iter(range(3))

    async def flaky(call):
        if call.method == "get_time" and next(lost, None) is not None:
            raise UnavailableError("the database is away")
        return await perform(call)

    monkeypatch.setattr(store, "perform", flaky)
    async with retaining(store, 1e-6, every_seconds=0.01):
        await until_gone(store, rollout_id)
    assert "trying again in 0.01 s: the database is away" in caplog.text
