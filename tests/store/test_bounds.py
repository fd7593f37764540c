"""What one reader asks costs the others a bounded time and the server a bounded memory."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import aiohttp
import msgspec
import pytest

from agentlightning.errors import InvalidError
from agentlightning.server.app import create_app
from agentlightning.server.serve import HttpServer
from agentlightning.store.sql import SqlStore
from agentlightning.types import Condition, EnqueueRolloutRequest, Filter, Or

pytestmark = pytest.mark.anyio
ADMIN = {"Authorization": "Bearer an admin's key"}
NOTHING: Filter = Or(
    [Condition("metadata.text", "lt", f"nowhere {number}") for number in range(190)]
)


@contextlib.asynccontextmanager
async def filled(address: object, read_seconds: float, rows: int) -> AsyncIterator[SqlStore]:
    """A store in which looking for NOTHING takes many seconds."""
    store = await SqlStore.open(str(address), read_seconds=read_seconds)
    metadata = {"text": "somewhere"}
    await store.enqueue_many_rollouts(
        [EnqueueRolloutRequest(input=i, metadata=metadata) for i in range(rows)]
    )
    yield store
    await store.close()


async def test_a_query_that_takes_too_long_is_ended_and_says_what_to_do(address) -> None:
    async with filled(address, read_seconds=0.1, rows=3_000) as store:
        began = time.monotonic()
        with pytest.raises(
            InvalidError, match=r"longer than 0\.1 s and was ended; narrow it by a run"
        ):
            await store.page_rollouts(NOTHING)
        assert time.monotonic() - began < 2
        assert len((await store.page_rollouts(limit=5)).items) == 5
        assert await store.check_store() == []


@pytest.mark.slow
@pytest.mark.parametrize("address", ["file", "postgres"], indirect=True)
async def test_slow_queries_hold_up_neither_health_nor_keys_nor_other_reads(address) -> None:
    async with filled(address, read_seconds=3.0, rows=60_000) as store:
        key = await store.issue_key(name="k", scopes=["read"])
        app = create_app(store, admin_key="an admin's key")
        async with HttpServer(app) as server, aiohttp.ClientSession(server.url) as http:
            query = {"where": msgspec.to_builtins(NOTHING)}
            slow = [
                asyncio.create_task(http.post("/api/v1/rollouts/query", json=query, headers=ADMIN))
                for _ in "1234"
            ]
            await asyncio.sleep(0.5)
            began = time.monotonic()
            assert (await http.get("/ready")).status == 200
            known = await http.get(
                "/api/v1/runs", headers={"Authorization": f"Bearer {key.api_key}"}
            )
            assert (known.status, await known.json()) == (200, [])
            assert time.monotonic() - began < 1.5
            assert not any(task.done() for task in slow)
            for answer in await asyncio.gather(*slow):
                assert answer.status == 422


async def test_a_page_is_bounded_in_rows_and_bytes_and_a_query_puts_pages_together(
    store, monkeypatch
) -> None:
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=i) for i in range(1100)])
    assert [one.input for one in await store.query_rollouts()] == list(range(1100))
    assert [one.input for one in await store.query_rollouts(limit=1050, offset=2)] == list(
        range(2, 1052)
    )
    page = await store.page_rollouts(limit=1050, with_total=True)
    assert (len(page.items), page.total) == (1050 if isinstance(store, SqlStore) else 1000, 1100)
    assert (await store.page_rollouts(limit=1, cursor=page.next_cursor)).items[0].input == len(
        page.items
    )

    monkeypatch.setattr("agentlightning.store.pages.MOST_BYTES", 1_500_000)
    await store.enqueue_many_rollouts(
        [EnqueueRolloutRequest(input="x" * 1_000_000) for _ in range(3)]
    )
    large = Condition("number", "gt", 1100)
    page = await store.page_rollouts(large)
    assert (len(page.items), page.next_cursor is None) == (2, False)
    assert len(await store.query_rollouts(where=large)) == 3


async def test_the_feed_of_a_quiet_run_says_how_far_it_looked(store) -> None:
    busy, quiet = [(await store.start_run("train", {})).run_id for _ in range(2)]

    async def finish(run_id: str) -> str:
        (one,) = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=1, run_id=run_id)])
        await store.cancel_rollout(one.rollout_id)
        return one.rollout_id

    for _ in range(25):
        await finish(busy)
    page = await store.finished_after(run_id=quiet)
    assert (page.rollouts, page.cursor) == ((), 25)
    waiting = asyncio.create_task(store.finished_after(run_id=quiet, timeout=30))
    await finish(busy)
    last = await finish(quiet)
    assert [one.rollout_id for one in (await waiting).rollouts] == [last]
    assert ((await waiting).cursor, (await store.finished_after(99, run_id=quiet)).cursor) == (
        27,
        99,
    )
    assert (await store.finished_after(limit=0, run_id=quiet)).rollouts == ()
    with pytest.raises(InvalidError, match="cursor is -562949953421311"):
        await store.finished_after(-562949953421311)
