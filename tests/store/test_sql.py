"""What a store in a file promises: it lasts, it is one process's, and it never touches what is not
its own."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from agentlightning.errors import ConfigError, InvalidError, UnavailableError
from agentlightning.store import attempts
from agentlightning.store.reader import StoreReader
from agentlightning.store.sql import SqlStore
from agentlightning.types import Condition, EnqueueRolloutRequest, Span
from tests.store.conftest import span_of

pytestmark = pytest.mark.anyio


async def test_everything_is_there_after_closing_and_opening_again(tmp_path):
    path = tmp_path / "deep" / "er" / "store.db"
    store = await SqlStore.open(path)
    run = await store.start_run("train", {"seed": 1})
    await store.next_policy_version(run.run_id)
    leased = await store.start_rollout({"question": "2+2"})
    span = await store.add_span(span_of(leased))
    before = await store.statistics()
    await store.close()
    await store.close()

    store = await SqlStore.open(path, synchronous="NORMAL")
    assert await store.statistics() == before
    assert await store.query_spans(leased.rollout_id) == [span]
    found = await store.find_key(api_key=leased.api_key)
    assert found is not None and found.attempt == (leased.rollout_id, leased.attempt.attempt_id)
    assert await store.next_policy_version(run.run_id) == 2
    assert await store.get_next_span_sequence_id(leased.rollout_id, leased.attempt.attempt_id) == 2
    await store.close()


async def test_operations_that_share_a_commit_fail_alone():
    store = await SqlStore.open(":memory:")
    leased = await store.start_rollout(1)
    good = [store.add_span(span_of(leased)) for number in range(5)]
    bad = [
        store.enqueue_many_rollouts(
            [EnqueueRolloutRequest(input=1), EnqueueRolloutRequest(input=2, rollout_id="a b")]
        )
        for _ in range(3)
    ]
    results = await asyncio.gather(*good, *bad, return_exceptions=True)
    assert [type(result) for result in results] == [Span] * 5 + [InvalidError] * 3
    counts = await store.statistics()
    assert (counts["spans"], counts["rollouts"]) == (5, 1)
    await store.close()


async def test_the_leases_of_a_cancelled_call_are_put_back():
    store = await SqlStore.open(":memory:")
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=i) for i in range(3)])
    waiting = asyncio.create_task(store.dequeue_many_rollouts(2))
    await asyncio.sleep(0)  # handed over to the writer, not answered yet
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    async with asyncio.timeout(60):
        leased = await store.dequeue_many_rollouts(3, timeout=5)
        while len(leased) < 3:
            leased += await store.dequeue_many_rollouts(3, timeout=5)
    assert sorted((rollout.input, rollout.attempt.sequence_id) for rollout in leased) == [
        (0, 1),
        (1, 1),
        (2, 1),
    ]
    await store.close()


async def test_leases_are_put_back_although_one_of_the_rollouts_was_removed_meanwhile():
    store = await SqlStore.open(":memory:")
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=i) for i in range(3)])
    leased = await store.dequeue_many_rollouts(3)
    removed = Condition("rollout_id", "eq", leased[0].rollout_id)
    await store.delete_rollouts(where=removed, unfinished=True)
    await store._writer.submit(lambda tx: attempts.withdraw(tx, leased))
    assert [rollout.input for rollout in await store.dequeue_many_rollouts(3)] == [1, 2]
    await store.close()


async def test_a_store_has_one_owner_whatever_name_leads_to_it(tmp_path):
    path, symbolic, hard = (tmp_path / name for name in ("store.db", "symbolic.db", "hard.db"))
    symbolic.symlink_to(path.name)
    store = await SqlStore.open(symbolic)  # which makes the file that the link names
    await store.enqueue_rollout("task")
    for name in (path, symbolic):
        with pytest.raises(ConfigError, match="in use by another process"):
            await SqlStore.open(name)
    reader = await StoreReader.open(symbolic)
    assert [one.input for one in await reader.query_rollouts()] == ["task"]
    await reader.close()
    hard.hardlink_to(path)
    with pytest.raises(ConfigError, match="2 names"):
        await SqlStore.open(hard)
    with pytest.raises(ConfigError, match="2 names"):
        await StoreReader.open(hard)
    await store.close()
    hard.unlink()
    await (await SqlStore.open(path)).close()
    assert symbolic.is_symlink()


@pytest.mark.parametrize("kind", ["memory", "postgres"])
async def test_workers_that_are_long_gone_are_forgotten(request, kind):
    now = 1e9
    address = ":memory:" if kind == "memory" else request.getfixturevalue("postgres_database")
    store = await SqlStore.open(address, clock=lambda: now, lease_seconds=1e6)
    await store.enqueue_rollout(1)
    await store.dequeue_rollout("holds a rollout")
    await store.update_worker("comes back", {"load": 1})
    await store.update_worker("gone")
    now += 80_000
    await store.update_worker("comes back")
    now += 10_000
    assert len(await store.query_workers()) == 3
    await store.update_worker("new")
    workers = {worker.worker_id: worker.heartbeat_stats for worker in await store.query_workers()}
    assert workers == {"holds a rollout": {}, "comes back": {"load": 1}, "new": {}}
    await store.close()


async def test_a_lease_is_of_a_thousand_rollouts_at_most():
    store = await SqlStore.open(":memory:")
    await store.enqueue_many_rollouts(
        [EnqueueRolloutRequest(input=number) for number in range(1001)]
    )
    leased = await store.dequeue_many_rollouts(10**9, lease_id="much")
    assert len(leased) == 1000
    again = await store.dequeue_many_rollouts(10**9, lease_id="much")
    assert [one.attempt.attempt_id for one in again] == [one.attempt.attempt_id for one in leased]
    await store.close()


async def test_closing_a_store_tells_everybody_who_waits():
    store = await SqlStore.open(":memory:")
    run = await store.start_run("train", {})
    queued = await store.start_rollout(1)
    waiting = [
        asyncio.create_task(store.dequeue_rollout(timeout=60)),
        asyncio.create_task(store.wait_for_rollouts([queued.rollout_id])),
        asyncio.create_task(store.complete_groups_after(run.run_id, 0, timeout=60)),
    ]
    await store.statistics()  # answered behind what the three have asked for
    await store.close()
    results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 60)
    assert [type(result) for result in results] == [UnavailableError] * 3


async def _make_store(path: Path) -> None:
    await (await SqlStore.open(path)).close()
    path.with_name(f"{path.name}-owner").unlink()


@pytest.mark.parametrize("place", ["/proc/nowhere/store.db", "{tmp}/a-file/store.db", "{tmp}"])
async def test_a_place_that_cannot_be_written_is_refused(tmp_path, place):
    (tmp_path / "a-file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        await SqlStore.open(place.format(tmp=tmp_path))


@pytest.mark.parametrize(
    "url", ["mysql://me:geheim1@db/agl", "sqlite:///store.db", "file:///store.db"]
)
async def test_a_url_of_something_else_is_not_made_a_directory(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="give a path") as refused:
        await SqlStore.open(url)
    assert "geheim1" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


async def test_a_new_store_is_for_its_owner_alone(tmp_path):
    await _make_store(tmp_path / "store.db")
    assert (tmp_path / "store.db").stat().st_mode & 0o777 == 0o600


async def test_the_queue_and_the_clocks_are_found_by_an_index(tmp_path):
    await _make_store(tmp_path / "store.db")
    connection = sqlite3.connect(tmp_path / "store.db")
    queued = "status IN ('queuing', 'requeuing')"
    for query, index in (
        (
            f"SELECT * FROM rollouts WHERE {queued} ORDER BY priority DESC, number",
            "rollouts_queued",
        ),
        (
            "SELECT * FROM attempts WHERE status IN ('preparing', 'running') AND check_time <= 1",
            "attempts_watched",
        ),
        (
            "SELECT MIN(check_time) FROM attempts WHERE status IN ('preparing', 'running')",
            "attempts_watched",
        ),
    ):
        plan = " ".join(row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {query}"))
        assert index in plan
    connection.close()
