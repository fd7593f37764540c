"""Two servers on one PostgreSQL database: each hears of what the other writes, and neither gets in the other's way."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable

import psycopg
import pytest
from anyio import to_thread

from agentlightning.errors import ConflictError
from agentlightning.store import attempts, calls, postgres
from agentlightning.store.sql import SqlStore
from agentlightning.store.transaction import Changes
from agentlightning.types import EnqueueRolloutRequest, RolloutConfig
from tests.store.storm import follow

pytestmark = pytest.mark.anyio

LONG = 60.0  # nobody waits for it: who is not woken fails the test


@contextlib.asynccontextmanager
async def two_stores(url: str, lease_seconds: float = 30.0) -> AsyncIterator[tuple[SqlStore, SqlStore]]:
    one = await SqlStore.open(url, lease_seconds=lease_seconds)
    try:
        other = await SqlStore.open(url, lease_seconds=lease_seconds)
        try:
            yield one, other
        finally:
            await other.close()
    finally:
        await one.close()


@pytest.fixture
async def stores(postgres_database, anyio_backend) -> AsyncIterator[tuple[SqlStore, SqlStore]]:
    async with two_stores(postgres_database) as both:
        yield both


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for what must become true soon, without anybody being told."""
    async with asyncio.timeout(60):
        while not await condition():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)


def requests(count: int, **fields) -> list[EnqueueRolloutRequest]:
    return [EnqueueRolloutRequest(input=i, **fields) for i in range(count)]


async def test_a_rollout_is_leased_by_one_of_them(stores):
    await stores[0].enqueue_many_rollouts(requests(120))

    async def work(store: SqlStore) -> list[str]:
        mine: list[str] = []
        while leased := await store.dequeue_many_rollouts(2):
            mine += [rollout.rollout_id for rollout in leased]
        return mine

    shares = await asyncio.gather(*(work(stores[number % 2]) for number in range(8)))
    leased = [rollout_id for share in shares for rollout_id in share]
    # A queue that looks empty only because the other server is just taking the rest may leave some of it.
    leased += [rollout.rollout_id for rollout in await stores[0].dequeue_many_rollouts(120)]
    assert len(leased) == len(set(leased)) == 120


async def test_who_waits_on_one_is_woken_by_the_other(stores):
    one, other = stores
    run = await one.start_run("train", {})
    group = await one.create_group(1, run.run_id)
    member = EnqueueRolloutRequest(input=1, group_id=group.group_id, group_index=0)

    working = asyncio.create_task(one.dequeue_rollout(timeout=LONG))
    (rollout,) = await other.enqueue_many_rollouts([member])
    async with asyncio.timeout(60):
        leased = await working
    assert leased.rollout_id == rollout.rollout_id

    waiting = [
        asyncio.create_task(one.wait_for_rollouts([rollout.rollout_id], LONG)),
        asyncio.create_task(one.finished_after(0, timeout=LONG)),
        asyncio.create_task(one.complete_groups_after(run.run_id, 0, timeout=LONG)),
    ]
    await other.update_attempt(rollout.rollout_id, leased.attempt.attempt_id, status="succeeded")
    async with asyncio.timeout(60):
        finished, feed, groups = await asyncio.gather(*waiting)
    assert [one.rollout_id for one in finished] == [rollout.rollout_id]
    assert [one.rollout_id for one in feed.rollouts] == [rollout.rollout_id]
    assert [one.group_id for one in groups] == [group.group_id]


async def test_what_one_remembers_is_forgotten_when_the_other_changes_it(stores):
    one, other = stores
    leased = await one.start_rollout(1)
    assert (await one.get_rollout_by_id(leased.rollout_id)).status == "preparing"
    assert (await one.get_latest_attempt(leased.rollout_id)).status == "preparing"
    await other.cancel_rollout(leased.rollout_id)

    async def cancelled() -> bool:
        rollout = await one.get_rollout_by_id(leased.rollout_id)
        attempt = await one.get_latest_attempt(leased.rollout_id)
        return (rollout.status, attempt.status) == ("cancelled", "cancelled")

    await until(cancelled)
    key = await one.perform(calls.IssueKey(name="k", scopes=["read"]))
    assert await one.perform(calls.FindKey(api_key=key.api_key)) is not None
    await other.perform(calls.RevokeKey(key_id=key.key_id))

    async def revoked() -> bool:
        return await one.perform(calls.FindKey(api_key=key.api_key)) is None

    await until(revoked)


async def test_a_feed_that_both_number_has_no_gap_behind_a_cursor(stores):
    count = 200
    queued = await stores[0].enqueue_many_rollouts(requests(count))
    seen: list[str] = []

    async def reader() -> None:
        async for rollout in follow(stores[1], lambda: len(seen) == count):
            seen.append(rollout.rollout_id)

    async def finisher(store: SqlStore, mine: list[str]) -> None:
        for rollout_id in mine:
            await store.update_rollout(rollout_id, status="cancelled")

    ids = [rollout.rollout_id for rollout in queued]
    async with asyncio.timeout(60):
        await asyncio.gather(reader(), *(finisher(stores[part % 2], ids[part::8]) for part in range(8)))
    assert sorted(seen) == sorted(ids)
    assert await stores[0].perform(calls.CheckStore()) == []


async def test_groups_whose_last_members_finish_at_once_on_both_are_complete(stores):
    one, other = stores
    run = await one.start_run("train", {})
    groups = [await one.create_group(2, run.run_id) for _ in range(30)]
    pairs = [
        await one.enqueue_many_rollouts(
            [EnqueueRolloutRequest(input=index, group_id=group.group_id, group_index=index) for index in range(2)]
        )
        for group in groups
    ]
    await asyncio.gather(
        *(
            store.cancel_rollout(rollout.rollout_id)
            for pair in pairs
            for store, rollout in zip(stores, pair, strict=True)
        )
    )
    complete = await other.complete_groups_after(run.run_id, 0)
    assert {group.group_id for group in complete} == {group.group_id for group in groups}
    assert [group.finished_index for group in complete] == list(range(1, 31))


async def test_servers_that_lock_the_same_rollouts_in_other_orders_try_again(stores):
    queued = [rollout.rollout_id for rollout in await stores[0].enqueue_many_rollouts(requests(40))]
    for number in range(3):
        await asyncio.gather(
            *(stores[0].update_rollout(name, metadata={"by": f"one {number}"}) for name in queued),
            *(stores[1].update_rollout(name, metadata={"by": f"other {number}"}) for name in reversed(queued)),
        )
    assert {rollout.metadata["by"] for rollout in await stores[0].query_rollouts()} <= {"one 2", "other 2"}


async def test_the_same_names_given_to_both_at_once_are_stored_once(stores):
    same = [EnqueueRolloutRequest(input=i, rollout_id=f"r-{i}") for i in range(20)]
    answers = await asyncio.gather(*(stores[n % 2].enqueue_many_rollouts(same) for n in range(6)))
    assert all([rollout.rollout_id for rollout in answer] == [r.rollout_id for r in same] for answer in answers)
    asked = [calls.StartAttempt(rollout_id="r-0", attempt_id="a")] * 4
    started = await asyncio.gather(*(stores[n % 2].perform(call) for n, call in enumerate(asked)))
    assert {(one.attempt.attempt_id, one.lease.token) for one in started} == {("a", started[0].lease.token)}
    with pytest.raises(ConflictError, match="stored already"):
        await stores[1].perform(calls.StartAttempt(rollout_id="r-1", attempt_id="a"))
    assert await stores[0].perform(calls.CheckStore()) == []


async def test_resources_added_by_many_servers_at_once_all_get_a_version(postgres_database):
    async with contextlib.AsyncExitStack() as stack:
        several = [await stack.enter_async_context(two_stores(postgres_database)) for _ in range(2)]

        async def add(store: SqlStore) -> list[int]:
            return [(await store.add_resources({})).version for _ in range(20)]

        versions = await asyncio.gather(*(add(store) for pair in several for store in pair))
    assert all(own == sorted(own) for own in versions)
    assert sorted(itertools.chain(*versions)) == list(range(1, 81))


async def test_no_attempt_is_started_on_a_rollout_that_is_just_being_ended(postgres_database, stores):
    asked = EnqueueRolloutRequest(input=1, rollout_id="r")
    await stores[0].enqueue_many_rollouts([asked])
    with await to_thread.run_sync(psycopg.connect, postgres_database) as other:
        other.execute("UPDATE rollouts SET status = 'cancelled', end_time = 1 WHERE rollout_id = 'r'")
        starting = asyncio.create_task(stores[0].perform(calls.StartRollout(request=asked)))
        await until(lambda: to_thread.run_sync(_somebody_waits_for_a_lock, postgres_database))
        other.commit()
    with pytest.raises(ConflictError, match="cancelled"):
        await starting
    assert (await stores[1].get_rollout_by_id("r")).status == "cancelled"


def _somebody_waits_for_a_lock(url: str) -> bool:
    with psycopg.connect(url) as connection:
        return connection.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchone() is not None


async def test_an_attempt_that_another_holds_on_to_is_not_looked_at_without_a_pause(postgres_database):
    async with two_stores(postgres_database, lease_seconds=0.2) as (one, _):
        await one.start_rollout(1)
        with await to_thread.run_sync(psycopg.connect, postgres_database) as other:
            other.execute("SELECT 1 FROM attempts FOR UPDATE")
            before = one._clock()
            while one._clock() < before + 0.5:  # longer than the lease
                await one.statistics()
            now = await one._write(lambda tx: (attempts.expire(tx), tx.changes.deadline > tx.now))
        assert now == (0, True)
        async with asyncio.timeout(60):
            (ended,) = await one.wait_for_rollouts([(await one.query_rollouts())[0].rollout_id], LONG)
        assert ended.status == "failed"


async def until_they_listen(url: str, servers: int) -> None:
    def count() -> int:
        with psycopg.connect(url) as connection:
            sql = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN %'"
            return connection.execute(sql).fetchone()[0]

    async def all_listen() -> bool:
        return await to_thread.run_sync(count) == servers

    await until(all_listen)


async def hear_until(heard: asyncio.Queue[Changes | None], what: Callable[[Changes], bool]) -> list[Changes]:
    """The changes that are heard up to the one that is meant."""
    several: list[Changes] = []
    async with asyncio.timeout(60):
        while not several or not what(several[-1]):
            changes = await heard.get()
            several += [] if changes is None else [changes]
    return several


async def test_stores_in_two_schemas_of_a_database_do_not_hear_each_other(postgres_database):
    def make_schemas() -> None:
        with psycopg.connect(postgres_database) as connection:
            connection.execute("CREATE SCHEMA a; CREATE SCHEMA b")

    await to_thread.run_sync(make_schemas)
    in_a, in_b = (f"{postgres_database}?options=-csearch_path%3D{name}" for name in "ab")
    async with two_stores(in_a) as (one, _), two_stores(in_b) as (near, far):
        with far.events() as heard:
            await until_they_listen(postgres_database, 4)
            await one.enqueue_rollout(1)
            rollout = await near.enqueue_rollout(2)
            await near.cancel_rollout(rollout.rollout_id)
            changes = await hear_until(heard, lambda changes: changes.finished == [rollout.rollout_id])
        assert sum(one.queued.get("default", 0) for one in changes) == 1


async def test_what_another_release_tells_and_this_one_cannot_read_may_be_anything(postgres_database, stores):
    one, other = stores
    with one.events() as heard:
        await until_they_listen(postgres_database, 2)
        await other.enqueue_rollout(1)
        await hear_until(heard, lambda changes: bool(changes.queued))

        def tell() -> None:
            with psycopg.connect(postgres_database) as connection:
                channel = postgres.channel_of(one._opened.secret)
                connection.execute("SELECT pg_notify(%s, 'server-x in-words-of-its-own')", (channel,))

        await to_thread.run_sync(tell)
        async with asyncio.timeout(60):
            while await heard.get() is not None:
                pass


async def test_the_clocks_of_a_server_that_is_gone_run_out_at_the_other(postgres_database):
    gone = await SqlStore.open(postgres_database, lease_seconds=0.5)
    stays = await SqlStore.open(postgres_database, lease_seconds=0.5)
    config = RolloutConfig(max_attempts=2, retry_condition=("unresponsive",))
    await gone.start_rollout(1, config=config)
    await gone.close()
    async with asyncio.timeout(60):
        again = await stays.dequeue_rollout(timeout=LONG)
    assert again.attempt.sequence_id == 2
    await stays.close()


async def test_work_that_nobody_was_told_of_is_found_within_the_time_of_a_lease(postgres_database):
    """As when a server dies while it takes a rollout that all others then pass over."""
    store = await SqlStore.open(postgres_database, lease_seconds=1.0)
    waiting = asyncio.create_task(store.dequeue_rollout(timeout=LONG))
    await store.statistics()

    def enqueue_silently() -> None:
        with psycopg.connect(postgres_database) as connection:
            connection.execute(
                "INSERT INTO rollouts (rollout_id, input, start_time, status, mode, config, metadata, attempts) "
                "VALUES ('r', '1', 0, 'queuing', 'val', '{}', '{}', 0)"
            )

    await to_thread.run_sync(enqueue_silently)
    async with asyncio.timeout(60):
        assert (await waiting).rollout_id == "r"
    await store.close()
