"""What is in the place of a store: nothing of ours, no longer whole, or a store of another
layout."""

from __future__ import annotations

import contextlib
import random
import sqlite3
from pathlib import Path

import psycopg
import pytest
from anyio import to_thread

from agentlightning.errors import ConfigError, UnavailableError
from agentlightning.store import sqlite, tables
from agentlightning.store.reader import StoreReader
from agentlightning.store.sql import SqlStore
from tests.store.conftest import opened, span_of

pytestmark = pytest.mark.anyio


async def make_store(path: Path) -> None:
    """A store of a few hundred pages, closed."""
    async with opened(path) as store:
        for number in range(40):
            leased = await store.start_rollout({"text": "x" * 3000}, metadata={"number": number})
            await store.add_many_spans([span_of(leased, str(i)) for i in range(10)])
    path.with_name(f"{path.name}-owner").unlink()


def files(directory: Path) -> dict[str, bytes]:
    """What is in a directory, without the marks of who uses what."""
    return {
        path.name: path.read_bytes()
        for path in directory.iterdir()
        if not path.name.endswith("-owner")
    }


async def refused_untouched(path: Path, reason: str) -> None:
    before = files(path.parent)
    for kind in (SqlStore, StoreReader):
        with pytest.raises(ConfigError, match=reason):
            await kind.open(path)
    assert files(path.parent) == before


async def test_random_bytes_and_databases_of_others_are_refused_untouched(tmp_path):
    with contextlib.closing(sqlite3.connect(tmp_path / "theirs.db")) as theirs:
        theirs.execute("CREATE TABLE theirs (x)")
    await refused_untouched(tmp_path / "theirs.db", "not an Agent Lightning store")
    for number in range(20):
        path = tmp_path / f"{number}.db"
        path.write_bytes(random.Random(number).randbytes(1 + 400 * number))
        await refused_untouched(path, "not an Agent Lightning store")


async def test_a_store_that_was_cut_off_is_refused_untouched(tmp_path):
    whole = tmp_path / "whole.db"
    await make_store(whole)
    content = whole.read_bytes()
    for number, size in enumerate(
        [100, 4000, 4096, 8192, len(content) // 2, len(content) - 4096, len(content) - 1]
    ):
        path = tmp_path / f"{number}.db"
        path.write_bytes(content[:size])
        await refused_untouched(path, "damaged")


async def test_damaged_pages_are_found_by_the_check(tmp_path):
    whole = tmp_path / "whole.db"
    await make_store(whole)
    content = whole.read_bytes()
    pages = len(content) // 4096
    found = 0
    for number in range(12):
        page = random.Random(number).randrange(1, pages)
        path = tmp_path / f"{number}.db"
        damaged = bytearray(content)
        damaged[page * 4096 : page * 4096 + 64] = random.Random(number).randbytes(64)
        path.write_bytes(damaged)
        try:
            async with opened(path) as store:
                problems = await store.check_store()
        except (ConfigError, UnavailableError) as error:
            # where it is needed to open or to write at all
            problems = [str(error)]
        found += bool(problems)
    assert found == 12


async def test_a_postgresql_database_of_somebody_else_is_refused_untouched(postgres_database):
    def contents(connection: psycopg.Connection) -> list[object]:
        names = (
            "SELECT relname, relkind FROM pg_class WHERE relnamespace = 'public'::regnamespace "
            "ORDER BY 1"
        )
        return [*connection.execute(names), *connection.execute("SELECT * FROM meta")]

    with psycopg.connect(postgres_database, autocommit=True) as connection:
        connection.execute("CREATE TABLE meta (theirs TEXT)")
        connection.execute("INSERT INTO meta VALUES ('precious')")
        before = contents(connection)
        with pytest.raises(ConfigError, match="not a store's"):
            await SqlStore.open(postgres_database)
        assert contents(connection) == before
        connection.execute("CREATE TABLE rollouts (x TEXT)")
        connection.execute("CREATE TABLE spans (x TEXT)")
        before = contents(connection)
        with pytest.raises(ConfigError, match="cannot be opened"):
            await SqlStore.open(postgres_database)
        assert contents(connection) == before


def number_sqlite(path: Path, layout: int) -> None:
    with contextlib.closing(sqlite._open(str(path))) as connection:
        connection.execute(f"PRAGMA user_version = {layout}")


def number_postgres(url: str, layout: int) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("UPDATE meta SET value = %s WHERE name = 'layout'", (b"%d" % layout,))


@pytest.mark.parametrize("layout", [tables.VERSION - 1, tables.VERSION + 1])
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_store_of_another_layout_is_refused_and_left_as_it_is(
    request, tmp_path, kind, layout
):
    address = (
        tmp_path / "store.db" if kind == "sqlite" else request.getfixturevalue("postgres_database")
    )
    number = number_sqlite if kind == "sqlite" else number_postgres
    async with opened(address) as store:
        await store.enqueue_rollout("a")
    await to_thread.run_sync(number, address, layout)
    with pytest.raises(
        ConfigError, match=f"layout {layout} and this release reads layout {tables.VERSION};"
    ):
        await SqlStore.open(address)
    await to_thread.run_sync(number, address, tables.VERSION)
    async with opened(address) as store:
        assert [one.input for one in await store.query_rollouts()] == ["a"]
