"""A copy of a store's file holds every write that was answered before it began, and is a store
itself."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from agentlightning.errors import ConfigError
from agentlightning.store.sql import SqlStore
from agentlightning.store.sqlite import back_up
from agentlightning.types import EnqueueRolloutRequest

pytestmark = pytest.mark.anyio


async def test_every_write_answered_before_a_copy_is_in_it_and_the_copy_goes_on(tmp_path):
    store = await SqlStore.open(tmp_path / "store.db")
    leased = await store.start_rollout(1)
    answered, before, more = 0, list[int](), asyncio.Event()

    async def write() -> None:
        nonlocal answered
        while len(before) < 4:
            await store.enqueue_many_rollouts([EnqueueRolloutRequest(input="x" * 2000)])
            answered += 1
            more.set()

    writers = [asyncio.create_task(write()) for _ in range(8)]
    for number in range(4):
        while answered < 50 * (number + 1):  # the store is being written all the while
            more.clear()
            await more.wait()
        known = answered
        await asyncio.to_thread(back_up, tmp_path / "store.db", tmp_path / f"{number}.db")
        before.append(known)
    await asyncio.gather(*writers)
    await store.close()
    for number, least in enumerate(before):
        assert (tmp_path / f"{number}.db").stat().st_mode & 0o777 == 0o600
        copy = await SqlStore.open(tmp_path / f"{number}.db")
        assert await copy.check_store() == []
        assert (await copy.statistics())["rollouts"] > least
        found = await copy.find_key(api_key=leased.api_key)
        assert found is not None and found.attempt == (leased.rollout_id, leased.attempt.attempt_id)
        await copy.enqueue_rollout("it goes on")
        await copy.close()


async def test_a_copy_that_cannot_be_made_leaves_all_as_it_is(tmp_path: Path):
    await (await SqlStore.open(tmp_path / "store.db")).close()
    (tmp_path / "notes.txt").write_text("not a store")
    names = sorted(os.listdir(tmp_path))
    with pytest.raises(ConfigError, match="exists already"):
        back_up(tmp_path / "store.db", tmp_path / "notes.txt")
    with pytest.raises(ConfigError, match="cannot be copied"):
        back_up(tmp_path / "store.db", tmp_path / "nowhere" / "copy.db")
    with pytest.raises(ConfigError, match="cannot be copied"):
        back_up(tmp_path / "store.db", tmp_path / "notes.txt" / "copy.db")
    with pytest.raises(ConfigError, match="not an Agent Lightning store"):
        back_up(tmp_path / "notes.txt", tmp_path / "copy.db")
    assert sorted(os.listdir(tmp_path)) == names
