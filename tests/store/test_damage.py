"""What is in the place of a store: nothing of ours, no longer whole, or a store of another layout."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from anyio import to_thread

from agentlightning.errors import ConfigError, UnavailableError
from agentlightning.store import calls, postgres, schema, sqlite
from agentlightning.store.database import Connection
from agentlightning.store.sql import SqlStore
from agentlightning.types import Condition, EnqueueRolloutRequest
from tests.store.storm import span_of

pytestmark = pytest.mark.anyio


@contextlib.asynccontextmanager
async def opened(address: Path | str) -> AsyncIterator[SqlStore]:
    store = await SqlStore.open(address)
    try:
        yield store
    finally:
        await store.close()


# --- what is in the file is not a store, or no longer whole ------------------------------------------------------


async def make_store(path: Path) -> None:
    """A store of a few hundred pages, closed."""
    async with opened(path) as store:
        for number in range(40):
            leased = await store.start_rollout({"text": "x" * 3000}, metadata={"number": number})
            await store.add_many_spans([span_of(leased, str(i)) for i in range(10)])
    path.with_name(f"{path.name}-owner").unlink()


def files(directory: Path) -> dict[str, bytes]:
    """What is in a directory, without the marks of who uses what."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if not path.name.endswith("-owner")}


async def refused_untouched(path: Path, reason: str) -> None:
    before = files(path.parent)
    with pytest.raises(ConfigError, match=reason):
        await SqlStore.open(path)
    assert files(path.parent) == before


async def test_random_bytes_are_refused_untouched(tmp_path):
    for number in range(20):
        path = tmp_path / f"{number}.db"
        path.write_bytes(random.Random(number).randbytes(1 + 400 * number))
        await refused_untouched(path, "not an Agent Lightning store")


async def test_a_store_that_was_cut_off_is_refused_untouched(tmp_path):
    whole = tmp_path / "whole.db"
    await make_store(whole)
    content = whole.read_bytes()
    for number, size in enumerate([100, 4000, 4096, 8192, len(content) // 2, len(content) - 4096, len(content) - 1]):
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
                problems = await store.perform(calls.CheckStore())
        except (ConfigError, UnavailableError) as error:  # where it is needed to open or to write at all
            problems = [str(error)]
        found += bool(problems)
    assert found == 12


async def test_a_postgresql_database_of_somebody_else_is_refused_untouched(postgres_database):
    def contents(connection: psycopg.Connection) -> list[object]:
        names = "SELECT relname, relkind FROM pg_class WHERE relnamespace = 'public'::regnamespace ORDER BY 1"
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
        with pytest.raises(ConfigError, match="laid out"):
            await SqlStore.open(postgres_database)
        assert contents(connection) == before


async def test_a_store_can_live_in_a_schema_of_its_own_beside_foreign_tables(postgres_database):
    with psycopg.connect(postgres_database, autocommit=True) as connection:
        connection.execute("CREATE TABLE theirs (x TEXT)")
        connection.execute("CREATE SCHEMA ours")
        async with opened(f"{postgres_database}?options=-csearch_path%3Dours") as store:
            await store.enqueue_rollout(1)
        assert connection.execute("SELECT count(*) FROM ours.rollouts").fetchone() == (1,)


# --- stores of other layouts -------------------------------------------------------------------------------------

FIRST_LAYOUT_ROWS = """
INSERT INTO runs (run_id, kind, status, start_time, policy_version, manifest)
VALUES ('run', 'train', 'running', 1, 7, '{}');
INSERT INTO rollout_groups (group_id, run_id, size, finished_index) VALUES ('g', 'run', 1, 1);
INSERT INTO rollouts (rollout_id, input, start_time, end_time, status, mode, run_id, group_id, group_index,
    config, metadata, attempts)
VALUES ('done', '"a"', 1, 2, 'succeeded', 'train', 'run', 'g', 0, '{}', '{"k":1}', 1),
    ('busy', '"b"', 3, NULL, 'running', 'train', 'run', NULL, NULL, '{}', '{}', 1),
    ('waits', '"c"', 4, NULL, 'queuing', 'val', NULL, NULL, NULL, '{}', '{}', 0),
    ('unattributed', 'null', 5, 5, 'succeeded', 'val', NULL, NULL, NULL, '{}', '{}', 1);
INSERT INTO attempts (attempt_id, rollout_id, sequence_id, start_time, end_time, status, metadata, last_activity,
    lease_expires, check_time, span_sequence)
VALUES ('a1', 'done', 1, 1, 2, 'succeeded', '{}', 1, 31, 31, 1),
    ('a2', 'busy', 1, 3, NULL, 'running', '{}', 3, 33, 33, 0),
    ('unattributed', 'unattributed', 1, 5, 5, 'succeeded', '{}', 5, 5, 5, 0);
INSERT INTO spans (attempt, span_id, sequence_id, trace_id, name, start_time, end_time, status_code, attributes)
VALUES (1, 's', 1, 't', 'n', 1, 2, 'OK', '{"agentlightning.reward.0.value":0.3}');
INSERT INTO resources (version, resources_id, resources, create_time, metadata) VALUES (1, 'rs', '{}', 1, '{}');
INSERT INTO meta (name, value) VALUES ('secret', ?)
"""


def lay_out_first(connection: Connection) -> None:
    """Make a store as the first release did."""
    connection.execute("BEGIN")
    for statement in schema.STEPS[0].format_map(schema._TYPES[connection.dialect]).split(";"):
        if statement.strip():
            connection.execute(statement)
    for statement in FIRST_LAYOUT_ROWS.split(";"):
        connection.execute(statement, (b"\1" * 32,) if "?" in statement else ())


@pytest.fixture(params=["sqlite", "postgres"])
def old_store(request, tmp_path) -> Iterator[tuple[str, Callable[[int], None]]]:
    """The address of a store of the first layout, and what writes another number of a layout into it."""
    if request.param == "sqlite":
        path = tmp_path / "store.db"
        with contextlib.closing(sqlite._open(str(path))) as connection:
            lay_out_first(connection)
            connection.execute(f"PRAGMA application_id = {sqlite.APPLICATION_ID}")
            connection.execute("PRAGMA user_version = 1")
            connection.execute("COMMIT")

        def number(layout: int) -> None:
            with contextlib.closing(sqlite._open(str(path))) as connection:
                connection.execute(f"PRAGMA user_version = {layout}")

        yield str(path), number
        return
    url = request.getfixturevalue("postgres_database")
    connection = postgres.PostgresConnection(url, writing="FULL")
    lay_out_first(connection)
    connection.execute("INSERT INTO meta (name, value) VALUES ('layout', ?)", (b"1",))
    connection.execute("COMMIT")
    yield url, lambda layout: connection.execute("UPDATE meta SET value = ? WHERE name = 'layout'", (b"%d" % layout,))
    connection.close()


async def test_a_store_of_the_first_layout_is_brought_to_the_present_one(old_store):
    address, _ = old_store
    for _ in range(2):
        async with opened(address) as store:
            assert await store.perform(calls.CheckStore()) == []
            stored = await store.query_rollouts()
            assert [(one.rollout_id, one.input, one.project, one.priority) for one in stored] == [
                ("done", "a", "default", 0),
                ("busy", "b", "default", 0),
                ("waits", "c", "default", 0),
                ("unattributed", None, "default", 0),
            ]
            (span,) = await store.query_spans("done")
            assert span.attributes == {"agentlightning.reward.0.value": 0.3}
            assert [group.group_id for group in await store.complete_groups_after("run", 0)] == ["g"]
            assert [one.rollout_id for one in (await store.finished_after()).rollouts] == ["done"]
            assert (await store.get_latest_attempt("busy")).held_seconds == 0.0
            assert (await store.get_latest_resources()).resources_id == "rs"
    async with opened(address) as store:
        assert (await store.dequeue_rollout()).rollout_id == "waits"
        await store.update_attempt("busy", "a2", status="succeeded")
        assert [one.rollout_id for one in (await store.finished_after()).rollouts] == ["done", "busy"]
        assert await store.next_policy_version("run") == 8


async def test_the_groups_of_an_older_store_are_counted_on(old_store):
    address, _ = old_store
    async with opened(address) as store:
        await store.perform(calls.DeleteRollouts(where=Condition("group_id", "eq", "g")))
        await store.create_group(1, "run", "next")
        (rollout,) = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=1, group_id="next", group_index=0)])
        await store.cancel_rollout(rollout.rollout_id)
        assert [group.group_id for group in await store.complete_groups_after("run", 1)] == ["next"]


async def test_a_store_of_a_later_layout_is_refused(old_store):
    address, number = old_store
    await to_thread.run_sync(number, schema.VERSION + 1)
    with pytest.raises(ConfigError, match=f"layout {schema.VERSION + 1}"):
        await SqlStore.open(address)
    await to_thread.run_sync(number, 1)
    await (await SqlStore.open(address)).close()
