"""One process at a time owns a store in PostgreSQL, as one does a file."""

from __future__ import annotations

import asyncio
import contextlib
import os

import psycopg
import pytest
from anyio import to_thread

from agentlightning.errors import InUseError, UnavailableError
from agentlightning.store import postgres
from agentlightning.store.reader import StoreReader
from agentlightning.store.sql import SqlStore
from tests.postgres import PostgresServer

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "_TAKE_SECONDS", 0.0)
    monkeypatch.setattr(postgres, "_PATIENCE_SECONDS", 2.0)


async def test_a_second_process_is_told_who_owns_the_store_and_may_read_it(
    postgres_database: str,
) -> None:
    owner = await SqlStore.open(postgres_database)
    with pytest.raises(
        InUseError, match=rf"in use by agentlightning .*pid {os.getpid()}.* from 127.0.0.1"
    ):
        await SqlStore.open(postgres_database)
    await owner.enqueue_rollout("one")
    reader = await StoreReader.open(postgres_database)
    assert [rollout.input for rollout in await reader.query_rollouts()] == ["one"]
    await reader.close()
    await owner.close()
    await (await SqlStore.open(postgres_database)).close()


async def test_two_schemas_of_a_database_are_two_stores(postgres_database: str) -> None:
    def make_schemas() -> None:
        with psycopg.connect(postgres_database) as connection:
            connection.execute("CREATE SCHEMA a; CREATE SCHEMA b")

    await to_thread.run_sync(make_schemas)
    stores = [
        await SqlStore.open(f"{postgres_database}?options=-csearch_path%3D{name}") for name in "ab"
    ]
    await stores[0].enqueue_rollout(1)
    assert await stores[1].query_rollouts() == []
    for store in stores:
        await store.close()


def end_sessions(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


async def test_an_owner_whose_connection_was_lost_takes_the_store_again_before_it_writes(
    postgres_server: PostgresServer, postgres_database: str
) -> None:
    owner = await SqlStore.open(postgres_database)
    await to_thread.run_sync(end_sessions, postgres_database)
    await owner.enqueue_rollout(1)
    await to_thread.run_sync(postgres_server.restart, "immediate")
    await owner.enqueue_rollout(2)
    with pytest.raises(InUseError):
        await SqlStore.open(postgres_database)
    assert len(await owner.query_rollouts()) == 2
    await owner.close()


@pytest.mark.parametrize("successor", ["at work", "gone"])
async def test_an_owner_that_another_succeeded_writes_and_answers_no_more(
    postgres_database: str, successor
) -> None:
    owner = await SqlStore.open(postgres_database)
    leased = await owner.start_rollout(1)
    await to_thread.run_sync(end_sessions, postgres_database)
    async with contextlib.AsyncExitStack() as stack:
        other = await SqlStore.open(postgres_database)
        stack.push_async_callback(other.close)
        await other.cancel_rollout(leased.rollout_id)
        if successor == "gone":
            await stack.aclose()
        expected = (
            "in use by" if successor == "at work" else "another server has used the store since"
        )
        with pytest.raises(UnavailableError, match=expected):
            await owner.enqueue_rollout(2)
        await stack.aclose()
        with pytest.raises(UnavailableError, match="another server has used the store since"):
            await owner.enqueue_rollout(2)
        with pytest.raises(UnavailableError, match="restart this server"):
            await owner.statistics()
    reader = await StoreReader.open(postgres_database)
    assert [one.status for one in await reader.query_rollouts()] == ["cancelled"]
    await reader.close()
    await owner.close()


async def test_a_session_that_postgresql_believes_alive_is_ended_by_its_own_process(
    postgres_database: str,
) -> None:
    """As after a cut cable: the client's end of the connection is gone, the server's is not."""
    owner = await SqlStore.open(postgres_database)
    lost = owner._opened.writing._raw
    owner._opened.writing._raw = lost.__class__.connect(postgres_database)
    owner._opened.writing._raw.close()
    await owner.enqueue_rollout(1)
    assert len(await owner.query_rollouts()) == 1
    await asyncio.to_thread(lost.close)
    await owner.close()
