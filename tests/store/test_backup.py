"""A backup holds every write that was answered before it began, whoever writes meanwhile, and becomes a store again."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from agentlightning.errors import ConfigError, InUseError
from agentlightning.store import calls
from agentlightning.store.backup import POSTGRES_ADVICE, back_up, restore
from agentlightning.store.sql import SqlStore
from agentlightning.types import Span
from tests.postgres import find_binaries

pytestmark = pytest.mark.anyio


async def make(path: Path, *inputs: object) -> None:
    async with opened(path) as store:
        for input in inputs:
            await store.enqueue_rollout(input)


@contextlib.asynccontextmanager
async def opened(address: object):
    store = await SqlStore.open(address)
    try:
        yield store
    finally:
        await store.close()


async def inputs(path: Path) -> list[object]:
    async with opened(path) as store:
        assert await store.perform(calls.CheckStore()) == []
        return [rollout.input for rollout in await store.query_rollouts()]


async def test_every_write_answered_before_a_backup_is_in_it(tmp_path):
    path = tmp_path / "store.db"
    answered: list[str] = []
    more = asyncio.Event()
    copies: list[tuple[Path, list[str]]] = []
    async with opened(path) as store:

        async def write(name: int) -> None:
            rollout = await store.start_rollout(name)
            number = 0
            while len(copies) < 4:
                span = Span(
                    rollout_id=rollout.rollout_id,
                    attempt_id=rollout.attempt.attempt_id,
                    sequence_id=0,
                    trace_id="t",
                    span_id=f"{name}.{number}",
                    name="x" * 2000,
                    start_time=0.0,
                    end_time=1.0,
                )
                await store.add_span(span)
                answered.append(span.span_id)
                more.set()
                number += 1

        writers = [asyncio.create_task(write(name)) for name in range(8)]
        for number in range(4):
            while len(answered) < 100 * (number + 1):  # the store is being written all the while
                more.clear()
                await more.wait()
            before = list(answered)
            await asyncio.to_thread(back_up, path, tmp_path / f"copy-{number}.db")
            copies.append((tmp_path / f"copy-{number}.db", before))
        await asyncio.gather(*writers)

    for copy, before in copies:
        restored = tmp_path / "restored" / copy.name
        restore(copy, restored)
        async with opened(restored) as store:
            assert await store.perform(calls.CheckStore()) == []
            spans = {span.span_id for span in (await store.page_spans(limit=1_000_000)).items}
            assert set(before) <= spans
            await store.enqueue_rollout("it goes on")


async def test_a_restored_store_knows_the_keys_of_attempts(tmp_path):
    async with opened(tmp_path / "store.db") as store:
        leased = await store.start_rollout(1)
        back_up(tmp_path / "store.db", tmp_path / "copy.db")
    restore(tmp_path / "copy.db", tmp_path / "restored.db")
    async with opened(tmp_path / "restored.db") as store:
        found = await store.perform(calls.FindKey(api_key=leased.api_key))
        assert found is not None and found.attempt == (leased.rollout_id, leased.attempt.attempt_id)


async def test_a_store_that_nobody_has_open_can_be_backed_up(tmp_path):
    await make(tmp_path / "store.db", 1, 2)
    back_up(tmp_path / "store.db", tmp_path / "deep" / "copy.db")
    assert await inputs(tmp_path / "deep" / "copy.db") == [1, 2]


async def test_a_backup_is_one_file_with_the_mode_of_the_store(tmp_path):
    await make(tmp_path / "store.db", 1)
    (tmp_path / "store.db").chmod(0o640)
    back_up(tmp_path / "store.db", tmp_path / "copies" / "copy.db")
    (copy,) = (tmp_path / "copies").iterdir()
    assert copy.name == "copy.db" and copy.stat().st_mode & 0o777 == 0o640


async def test_nothing_is_overwritten_unasked(tmp_path):
    await make(tmp_path / "store.db", "new")
    await make(tmp_path / "copy.db", "old")
    with pytest.raises(ConfigError, match="exists already"):
        back_up(tmp_path / "store.db", tmp_path / "copy.db")
    with pytest.raises(ConfigError, match="exists already"):
        restore(tmp_path / "copy.db", tmp_path / "store.db")
    back_up(tmp_path / "store.db", tmp_path / "copy.db", overwrite=True)
    assert await inputs(tmp_path / "copy.db") == ["new"]


async def test_a_store_in_use_is_not_replaced(tmp_path):
    await make(tmp_path / "copy.db", "old")
    async with opened(tmp_path / "store.db") as store:
        with pytest.raises(InUseError):
            restore(tmp_path / "copy.db", tmp_path / "store.db", overwrite=True)
        await store.enqueue_rollout("still there")
    assert await inputs(tmp_path / "store.db") == ["still there"]


async def test_the_log_of_the_store_before_is_not_taken_for_the_restored_ones(tmp_path):
    """Such as a killed server leaves behind."""
    await make(tmp_path / "copy.db", "old")
    async with opened(tmp_path / "live.db") as store:
        await store.enqueue_rollout("new")
        for suffix in ("", "-wal", "-shm"):
            shutil.copy(tmp_path / f"live.db{suffix}", tmp_path / f"store.db{suffix}")
    assert (tmp_path / "store.db-wal").stat().st_size > 0
    restore(tmp_path / "copy.db", tmp_path / "store.db", overwrite=True)
    assert await inputs(tmp_path / "store.db") == ["old"]


async def test_a_damaged_copy_is_refused_and_the_store_stays(tmp_path):
    await make(tmp_path / "store.db", "good")
    await make(tmp_path / "copy.db", *(f"{number} " * 500 for number in range(50)))
    data = bytearray((tmp_path / "copy.db").read_bytes())
    for page in range(8, len(data) // 4096, 3):
        data[page * 4096 : page * 4096 + 64] = b"\xa5" * 64
    (tmp_path / "copy.db").write_bytes(data)
    with pytest.raises(ConfigError, match=r"damaged|malformed"):
        restore(tmp_path / "copy.db", tmp_path / "store.db", overwrite=True)
    assert await inputs(tmp_path / "store.db") == ["good"]
    assert not list(tmp_path.glob("*-part*"))


async def test_what_is_no_store_is_neither_backed_up_nor_restored(tmp_path):
    (tmp_path / "notes.txt").write_text("not a store")
    with pytest.raises(ConfigError, match="not an Agent Lightning store"):
        restore(tmp_path / "notes.txt", tmp_path / "store.db")
    with pytest.raises(ConfigError, match="no store at"):
        back_up(tmp_path / "missing.db", tmp_path / "copy.db")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


async def test_the_advice_for_postgres_works(tmp_path, postgres_server, postgres_database):
    binaries = find_binaries()
    assert binaries is not None
    if not (binaries / "pg_dump").exists():
        pytest.skip("PostgreSQL's client programs are not installed")
    async with opened(postgres_database) as store:
        rollout = await store.start_rollout({"a": 1})
    with postgres_server.new_database() as other:
        for target, command in zip(
            (postgres_database, other), _commands(postgres_database, other, tmp_path / "copy.dump"), strict=True
        ):
            environment = {"PGPASSWORD": urlsplit(target).password or "", "PATH": str(binaries)}
            done = await asyncio.to_thread(
                subprocess.run, command, shell=True, env=environment, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr
        async with opened(other) as store:
            assert await store.perform(calls.CheckStore()) == []
            found = await store.perform(calls.FindKey(api_key=rollout.api_key))
            assert found is not None and found.attempt == (rollout.rollout_id, rollout.attempt.attempt_id)
            await store.enqueue_rollout("it goes on")


def _commands(url: str, other: str, copy: Path) -> list[str]:
    """As the advice says, from one database to another."""
    dump, load = (line for line in POSTGRES_ADVICE.splitlines() if line.startswith("  "))
    return [line.replace("URL", target).replace("FILE", str(copy)) for line, target in ((dump, url), (load, other))]


async def test_a_restored_store_has_its_log_ahead_again(tmp_path):
    await make(tmp_path / "store.db", 1)
    back_up(tmp_path / "store.db", tmp_path / "copy.db")
    restore(tmp_path / "copy.db", tmp_path / "restored.db")
    await inputs(tmp_path / "restored.db")
    with contextlib.closing(sqlite3.connect(tmp_path / "restored.db")) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
