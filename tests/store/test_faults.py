"""What the store survives: each fault is brought about for real, in the middle of work."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import aiohttp
import psycopg
import pytest
from anyio import to_thread

import agentlightning as agl
from agentlightning import semconv
from agentlightning.errors import ConfigError, InUseError, UnavailableError
from agentlightning.store import postgres, sqlite
from agentlightning.store.base import LightningStore
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.postgres import PostgresConnection
from agentlightning.store.reader import StoreReader
from agentlightning.store.sql import SqlStore
from agentlightning.types import And, AttemptedRollout, EnqueueRolloutRequest, RolloutConfig
from tests.gateway.upstream import Server, until
from tests.postgres import PostgresServer
from tests.store.away import cutting
from tests.store.conftest import opened, span_of
from tests.store.server_process import LONGEST_FILE, ServerProcess
from tests.store.storm import BATCH, Storm

pytestmark = pytest.mark.anyio


@contextlib.asynccontextmanager
async def served(
    address: Path | str, tmp_path: Path, **options: str
) -> AsyncIterator[ServerProcess]:
    server = ServerProcess(address, tmp_path / "server.log", **options)
    try:
        await to_thread.run_sync(server.start)
        yield server
    finally:
        await to_thread.run_sync(server.kill)


@contextlib.asynccontextmanager
async def connected(
    server: ServerProcess, *, patience: float = 60.0
) -> AsyncIterator[LightningStoreClient]:
    client = LightningStoreClient(server.url, patience=patience)
    try:
        yield client
    finally:
        await client.close()


@pytest.mark.parametrize(
    ("kind", "rounds", "writes"),
    [
        ("sqlite", 2, 150),
        *(pytest.param(kind, 5, 400, marks=pytest.mark.slow) for kind in ("sqlite", "postgres")),
        *(pytest.param(kind, 60, 1000, marks=pytest.mark.soak) for kind in ("sqlite", "postgres")),
    ],
)
async def test_a_server_killed_in_a_write_storm_loses_and_doubles_nothing(
    kind, rounds, writes, tmp_path, request
):
    address = (
        tmp_path / "store.db" if kind == "sqlite" else request.getfixturevalue("postgres_database")
    )
    async with (
        served(address, tmp_path) as server,
        connected(server) as client,
        Storm([client]) as storm,
    ):
        for round in range(rounds):
            await storm.blow(writes + 7 * round)
            await to_thread.run_sync(server.restart)
        await storm.calm()
        await to_thread.run_sync(server.kill)
        async with opened(address) as store:
            await storm.check(store)
        assert sorted(storm.feed) == sorted(storm.ended)
        assert len(storm.ended) == BATCH * len(storm.asked)


@pytest.mark.parametrize(
    ("rounds", "writes"),
    [
        pytest.param(2, 150),
        pytest.param(10, 400, marks=pytest.mark.slow),
        pytest.param(60, 800, marks=pytest.mark.soak),
    ],
)
async def test_postgresql_killed_and_restarted_under_load_loses_and_doubles_nothing(
    rounds, writes, postgres_server: PostgresServer, postgres_database
):
    async with opened(postgres_database) as one, Storm([one]) as storm:
        for round in range(rounds):
            await storm.blow(writes + 7 * round)
            if round % 2:
                await to_thread.run_sync(postgres_server.restart, "immediate")
            else:
                await to_thread.run_sync(postgres_server.kill)
                await to_thread.run_sync(postgres_server.start)
        await storm.blow(writes)
        await storm.calm()
        await storm.check(one)
        assert sorted(storm.feed) == sorted(storm.ended)


async def test_a_transaction_that_postgresql_forgot_is_not_taken_for_stored(
    postgres_server: PostgresServer, postgres_database
):
    with database(postgres_database) as one:
        begin(one, "kept")
        one.commit()
        begin(one, "forgotten")
        forgotten = one._write_commit_mark()
        await to_thread.run_sync(postgres_server.kill)
        await to_thread.run_sync(postgres_server.start)
        one.close()
        assert not one._was_committed(forgotten)
        assert workers_in(one) == ["kept"]


async def test_a_commit_whose_connection_is_cut_is_ended_before_it_is_said_to_be_lost(
    postgres_database,
):
    with database(postgres_database) as connection:
        connection.execute(SLOW_COMMIT)
        begin(connection, "slow")
        settling = asyncio.create_task(to_thread.run_sync(connection.commit))
        await asyncio.sleep(0.2)
        assert not settling.done()
        with socket.socket(fileno=os.dup(connection._raw.fileno())) as wire:
            wire.shutdown(socket.SHUT_RDWR)
        with pytest.raises(psycopg.OperationalError):  # it may be done again
            await asyncio.wait_for(settling, 60)
        assert workers_in(connection) == []


SLOW_COMMIT = """
CREATE FUNCTION linger() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(1); RETURN NULL; END';
CREATE CONSTRAINT TRIGGER lingering AFTER INSERT ON workers DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW WHEN (NEW.worker_id = 'slow') EXECUTE FUNCTION linger();
"""


@contextlib.contextmanager
def database(url: str) -> Iterator[PostgresConnection]:
    connection = postgres.open_owner(url, "FULL")
    try:
        yield connection
    finally:
        connection.close()


def begin(connection: PostgresConnection, worker: str) -> None:
    connection.execute("BEGIN")
    connection.execute(
        "INSERT INTO workers (worker_id, last_heartbeat_time, heartbeat_stats) VALUES (?, 0, '')",
        (worker,),
    )


def workers_in(connection: PostgresConnection) -> list[str]:
    connection.revive()
    return [name for (name,) in connection.execute("SELECT worker_id FROM workers")]


@pytest.mark.parametrize("delivered", [True, False])
async def test_a_commit_whose_answer_is_lost_is_neither_lost_nor_doubled(
    delivered, postgres_database
):
    async with cutting(postgres_database, b"COMMIT", delivered) as wire, opened(wire.url) as store:
        wire.cuts = 1
        queued = await store.enqueue_many_rollouts(
            [EnqueueRolloutRequest(input=i) for i in range(3)]
        )
        assert wire.cut == 1
        reader = await StoreReader.open(postgres_database)
        assert await reader.query_rollouts() == queued
        await reader.close()


async def test_while_postgresql_is_away_callers_wait_and_then_are_told(
    postgres_server: PostgresServer, postgres_database, monkeypatch
):
    monkeypatch.setattr(postgres, "_PATIENCE_SECONDS", 0.5)
    async with opened(postgres_database) as store:
        await to_thread.run_sync(postgres_server.stop, "immediate")
        calls = [
            store.enqueue_rollout(1),
            store.start_rollout(2),
            *(store.statistics() for _ in range(20)),
        ]
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(answer) for answer in answers} == {UnavailableError}
        waiting = asyncio.create_task(store.enqueue_rollout(3))
        await to_thread.run_sync(postgres_server.start)
        with contextlib.suppress(UnavailableError):
            await waiting
        await store.enqueue_rollout(4)
        kept = {rollout.input for rollout in await store.query_rollouts()}
        assert kept in ({4}, {3, 4})


async def test_a_lease_that_was_asked_for_again_is_not_taken_back():
    """Its first caller was cut off, which the store learns only after the caller has asked
    again."""
    async with opened(":memory:") as store:
        await store.enqueue_rollout(1)
        first = asyncio.create_task(store.dequeue_many_rollouts(1, lease_id="l"))
        await asyncio.sleep(0)
        first.cancel()
        (leased,) = await store.dequeue_many_rollouts(1, lease_id="l")
        await store.statistics()
        beat = await store.heartbeat(
            leased.rollout_id, leased.attempt.attempt_id, leased.lease.token
        )
        assert beat.status == "preparing"
        assert await store.check_store() == []


@pytest.fixture(params=[-86_400.0, 86_400.0], ids=["back", "forward"])
def jump(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Sets the clock of the machine by a day, as far as this process can see."""
    real = time.time
    return lambda: monkeypatch.setattr(time, "time", lambda: real() + request.param)


async def test_no_lease_ends_early_when_the_clock_jumps(jump, tmp_path):
    async with opened(tmp_path / "store.db", lease_seconds=60.0) as store:
        config = RolloutConfig(timeout_seconds=10_000, unresponsive_seconds=10_000)
        leased = await store.start_rollout(1, config=config)
        jump()
        assert await store.expire_overdue() == 0
        beat = await store.heartbeat(
            leased.rollout_id, leased.attempt.attempt_id, leased.lease.token
        )
        assert beat.status == "preparing"
        assert beat.lease_expires - leased.lease.expires < 3600, "the store's time does not jump"


async def test_no_lease_lives_for_ever_when_the_clock_jumps(jump, tmp_path):
    async with opened(tmp_path / "store.db", lease_seconds=0.5) as store:
        left = await store.start_rollout(1)
        jump()
        (failed,) = await store.wait_for_rollouts([left.rollout_id], timeout=60)
        assert failed.status == "failed"


async def fill(store: LightningStoreClient) -> tuple[set[str], list[str]]:
    """Enqueue until the store refuses; what was acknowledged, and the ids of the batch that was
    not."""
    acknowledged: set[str] = set()
    for number in range(10_000):
        batch = [f"{number}-{i}" for i in range(BATCH)]
        requests = [EnqueueRolloutRequest(input="x" * 5000, rollout_id=name) for name in batch]
        try:
            await store.enqueue_many_rollouts(requests)
        except UnavailableError as error:
            assert "could not be written" in str(error)
            return acknowledged, batch
        acknowledged.update(batch)
    raise AssertionError("the disk was never full")


def looked_at(server: ServerProcess) -> tuple[int, float]:
    """The status of `/ready`, and what `/metrics` says of the store."""
    try:
        with urllib.request.urlopen(f"{server.url}/ready", timeout=10) as answer:
            status = answer.status
    except urllib.error.HTTPError as error:
        status = error.code
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
        found = re.search(r"^agl_store_away ([\d.]+)$", answer.read().decode(), re.MULTILINE)
    assert found
    return status, float(found[1])


async def check_recovery(
    client: LightningStoreClient, acknowledged: set[str], refused: list[str]
) -> None:
    """With space again, and without a restart: everything acknowledged is there, nothing else, and
    work goes on."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(UnavailableError):
                assert await client.check_store() == []
                break
    assert {rollout.rollout_id for rollout in await client.query_rollouts()} == acknowledged
    await client.enqueue_many_rollouts(
        [EnqueueRolloutRequest(input="y" * 5000, rollout_id=name) for name in refused]
    )
    leased = await client.dequeue_rollout()
    await client.add_span(span_of(leased, "s"))
    await client.update_attempt(leased.rollout_id, leased.attempt.attempt_id, status="succeeded")


@pytest.mark.slow
async def test_a_full_disk_is_said_and_survived(tmp_path):
    path = tmp_path / "store.db"
    async with served(path, tmp_path) as server, connected(server, patience=0.3) as client:
        await client.enqueue_rollout(0)
        await client.update_rollout(
            (await client.query_rollouts())[0].rollout_id, status="cancelled"
        )
        server.limit_files(300_000)
        acknowledged, refused = await fill(client)
        assert await to_thread.run_sync(looked_at, server) == (503, 1.0)
        done = (await client.finished_after()).rollouts[0].rollout_id
        assert {rollout.rollout_id for rollout in await client.query_rollouts()} == {
            *acknowledged,
            done,
        }, "readable"
        server.limit_files(LONGEST_FILE)
        await check_recovery(client, {*acknowledged, done}, refused)
        assert await to_thread.run_sync(looked_at, server) == (200, 0.0)
        lines = [
            line for line in server.log().splitlines() if "can" in line and "be written" in line
        ]
        assert (
            len(lines) == 2
            and "cannot be written; calls are refused until it is back: " in lines[0]
        )
        assert re.search(r"can be written again after [\d.]+ s; \d+ calls failed$", lines[1])
        await to_thread.run_sync(server.restart)
        assert acknowledged < {rollout.rollout_id for rollout in await client.query_rollouts()}


SHORT_LEASE = """
from agentlightning.store.sql import SqlStore
SqlStore.open.__func__.__kwdefaults__["lease_seconds"] = 1.0
"""


@pytest.mark.slow
async def test_a_disk_that_is_full_for_longer_than_a_lease_fails_no_attempt_whose_worker_sends_heartbeats(
    tmp_path,
):
    async with (
        served(tmp_path / "store.db", tmp_path, before=SHORT_LEASE) as server,
        connected(server, patience=0.1) as client,
    ):
        timed = RolloutConfig(timeout_seconds=3, unresponsive_seconds=2)
        running = [await client.start_rollout(number, config=timed) for number in range(5)]
        server.limit_files(1)
        refused = 0
        for _ in range(20):
            beats = (
                client.heartbeat(one.rollout_id, one.attempt.attempt_id, one.lease.token)
                for one in running
            )
            answers = await asyncio.gather(*beats, return_exceptions=True)
            refused += sum(isinstance(answer, UnavailableError) for answer in answers)
            await asyncio.sleep(0.25)
        assert refused == 100
        server.limit_files(LONGEST_FILE)
        await check_grace(client, running)


@pytest.mark.slow
async def test_postgresql_away_for_longer_than_a_lease_fails_no_attempt(
    postgres_server: PostgresServer, postgres_database, monkeypatch
):
    monkeypatch.setattr(postgres, "_PATIENCE_SECONDS", 0.2)
    async with opened(postgres_database, lease_seconds=1.0) as store:
        running = [await store.start_rollout(number) for number in range(5)]
        await to_thread.run_sync(postgres_server.stop, "immediate")
        await asyncio.sleep(3)
        await to_thread.run_sync(postgres_server.start)
        await check_grace(store, running)


async def check_grace(store: LightningStore, running: Sequence[AttemptedRollout]) -> None:
    """The store is back: attempts have a lease from now on, and end as ever if nobody keeps
    them."""
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(UnavailableError):
                await store.add_resources({})
                break
    await asyncio.sleep(0.5)
    kept, *left = running
    for _ in range(4):
        beat = await store.heartbeat(kept.rollout_id, kept.attempt.attempt_id, kept.lease.token)
        assert beat.status == "preparing"
        await asyncio.sleep(0.25)
    ended = await store.wait_for_rollouts([one.rollout_id for one in left], timeout=30)
    assert [rollout.status for rollout in ended] == ["failed"] * len(left)


def cut(path: Path) -> None:
    os.truncate(path, 0)


def replace(path: Path) -> None:
    copy = path.with_name("copy")
    shutil.copy(path, copy)
    copy.replace(path)


@pytest.mark.parametrize("ending", ["", "-wal", "-shm", "-owner"])
@pytest.mark.parametrize("spoil", [Path.unlink, replace, cut])
async def test_nothing_is_acknowledged_once_a_file_of_the_store_is_gone_replaced_or_cut(
    spoil, ending, tmp_path
):
    path = tmp_path / "store.db"
    async with opened(path) as store:
        kept = await store.enqueue_rollout(1)
        file = path.with_name(path.name + ending)
        if spoil is cut and ending in ("-shm", "-owner"):
            pytest.skip("the one ends the process, the other is empty")
        spoil(file)
        with pytest.raises(UnavailableError, match=f"{file.name} .*; put the file back, or export"):
            await store.enqueue_rollout(2)
        with pytest.raises(UnavailableError):
            await store.enqueue_rollout(2)
        with pytest.raises(UnavailableError):
            await store.availability.check()
        if ending != "-shm" and spoil is not cut:
            assert [rollout.rollout_id for rollout in await store.query_rollouts()] == [
                kept.rollout_id
            ]


async def test_a_store_that_is_moved_away_under_its_server_is_told_once_and_goes_on_when_it_is_back(
    tmp_path,
):
    path, elsewhere = tmp_path / "store.db", tmp_path / "elsewhere.db"
    async with served(path, tmp_path) as server, connected(server, patience=0.1) as client:
        await client.enqueue_rollout(1)
        path.rename(elsewhere)
        for _ in range(3):
            with pytest.raises(UnavailableError, match=r"store\.db is not there"):
                await client.enqueue_rollout(2)
        assert await to_thread.run_sync(looked_at, server) == (503, 1.0)
        elsewhere.rename(path)
        async with asyncio.timeout(30):
            while await to_thread.run_sync(looked_at, server) != (200, 0.0):
                pass
        await client.enqueue_rollout(3)
        assert {rollout.input for rollout in await client.query_rollouts()} == {1, 3}
        told = [line for line in server.log().splitlines() if "be written" in line]
        assert len(told) == 2 and "cannot be written; calls are refused" in told[0]


async def test_a_store_that_deletes_and_rewrites_its_own_file_goes_on(tmp_path):
    async with opened(tmp_path / "store.db") as store:
        for number in range(200):
            await store.enqueue_rollout("x" * 20_000 + str(number))
        await store.delete_rollouts(And([]), unfinished=True, scrub=True)
        await store.enqueue_rollout(2)
        assert [rollout.input for rollout in await store.query_rollouts()] == [2]


async def test_a_log_without_its_store_is_not_taken_for_that_of_a_new_store(tmp_path):
    path = tmp_path / "store.db"
    async with served(path, tmp_path) as server, connected(server) as client:
        await client.enqueue_rollout(1)
        await to_thread.run_sync(server.kill)
    path.unlink()
    with pytest.raises(ConfigError, match=r"is missing, but its log store\.db-wal is there"):
        await SqlStore.open(path)


READ_IN_ANOTHER_PROCESS = """
import sys
from agentlightning.store import sqlite
connection = sqlite.open_reader(sys.argv[1])
print(connection.execute("SELECT COUNT(*) FROM rollouts").fetchone())
connection.close()
"""


async def test_a_backup_or_a_second_opening_in_a_process_leaves_its_store_locked(tmp_path):
    path = tmp_path / "store.db"
    log = path.with_name("store.db-wal")
    async with opened(path) as store:
        await store.enqueue_rollout(1)
        before = log.stat().st_ino
        await to_thread.run_sync(sqlite.back_up, path, tmp_path / "copy.db")
        with pytest.raises(InUseError):
            await SqlStore.open(path)
        command = [sys.executable, "-c", READ_IN_ANOTHER_PROCESS, str(path)]
        await to_thread.run_sync(lambda: subprocess.run(command, check=True))
        assert log.stat().st_ino == before
        await store.enqueue_rollout(2)


@pytest.mark.slow
async def test_a_database_that_is_dropped_and_made_anew_under_the_server_takes_no_writes(
    postgres_server: PostgresServer, postgres_database, monkeypatch
):
    monkeypatch.setattr(postgres, "_PATIENCE_SECONDS", 0.2)
    name = postgres_database.rpartition("/")[2]
    async with opened(postgres_database) as store:
        await store.enqueue_rollout(1)
        for command in (f'DROP DATABASE "{name}" WITH (FORCE)', f'CREATE DATABASE "{name}"'):
            with psycopg.connect(postgres_server.url, autocommit=True) as connection:
                connection.execute(command.encode())
            for _ in range(2):
                with pytest.raises(
                    UnavailableError, match="PostgreSQL cannot be used; nothing was stored"
                ):
                    await store.enqueue_rollout(2)
            with pytest.raises(UnavailableError):
                await store.availability.check()
        async with opened(postgres_database):
            pass  # another store, under the name of the first
        with pytest.raises(UnavailableError, match="another server has used the store since"):
            await store.enqueue_rollout(3)


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own, which can be filled for real."""
    folder.mkdir()
    mounting = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=False
    )
    if mounting.returncode:
        pytest.skip("this user may not mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill_up(file: Path) -> None:
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as ballast:
        while True:
            ballast.write(bytes(1 << 16))


@pytest.mark.parametrize(
    ("seconds", "count"),
    [pytest.param(15, 20, marks=pytest.mark.slow), pytest.param(120, 200, marks=pytest.mark.soak)],
)
async def test_a_disk_that_is_full_under_running_rollouts_fails_none(seconds, count, tmp_path):
    """Each rollout goes on calling its model, whose answers wait for the disk. Nothing that an
    agent was answered is lost."""
    answers: dict[str, int] = {}
    ends = asyncio.Event()

    @agl.rollout
    async def agent(task: dict, llm: agl.LLM) -> float:
        client = agl.openai_client(llm)
        name = str(task["index"])
        while not ends.is_set():
            await client.chat.completions.create(
                model=llm.model, messages=[{"role": "user", "content": "go on"}]
            )
            answers[name] = answers.get(name, 0) + 1
            await asyncio.sleep(2)
        return 1.0

    upstream = Server()
    with small_disk(tmp_path / "disk", "64m") as disk:
        async with (
            upstream.http,
            served(disk / "store.db", tmp_path) as server,
            connected(server) as client,
        ):
            async with aiohttp.ClientSession(server.url) as http:
                model = {"base_url": upstream.url, "trainable": False}
                assert (await http.put("/api/v1/models/policy", json=model)).status == 200
            llm = agl.LLM(endpoint="/v1", model="policy", gateway=True)
            await client.add_resources({"llm": llm})
            await client.enqueue_many_rollouts(
                [EnqueueRolloutRequest(input={"index": i}) for i in range(count)]
            )
            runner = agl.Runner(client, agent, concurrency=count)
            running = asyncio.create_task(runner.run())
            while len(answers) < count:  # noqa: ASYNC110 - as long as it takes
                await asyncio.sleep(0.1)
            await to_thread.run_sync(fill_up, disk / "ballast")
            began = time.monotonic()
            while time.monotonic() - began < seconds:
                await asyncio.sleep(5)
                assert (await to_thread.run_sync(looked_at, server))[0] == 503
            (disk / "ballast").unlink()
            back, gone = dict(answers), time.monotonic()
            await until(lambda: all(answers[name] > before for name, before in back.items()))
            print(
                f"every agent was answered again {time.monotonic() - gone:.1f} s after the disk "
                "had space"
            )
            ends.set()
            rollouts = await client.wait_for_rollouts(
                [rollout.rollout_id for rollout in await client.query_rollouts()], timeout=60
            )
            runner.stop()
            await running
            assert {rollout.status for rollout in rollouts} == {"succeeded"} and len(
                rollouts
            ) == count
            assert {
                (await client.get_latest_attempt(one.rollout_id)).sequence_id for one in rollouts
            } == {1}
            for rollout in rollouts:
                spans = await client.query_spans(rollout.rollout_id)
                calls = [span for span in spans if semconv.CALL_INDEX in span.attributes]
                assert len(calls) >= answers[str(rollout.input["index"])]
            assert await client.check_store() == []
            print(
                f"{sum(answers.values())} calls were answered, {sum(back.values())} before the "
                "disk had space"
            )
            told = server.log().splitlines()
            assert len([line for line in told if "be written" in line]) == 2 and len(told) < 10, (
                told[-20:]
            )
