"""What is removed is gone and forgotten everywhere; what is kept, and what is brought in, is
whole."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import time
from pathlib import Path

import anyio
import msgspec
import pytest

from agentlightning.errors import ConflictError, InvalidError, NotFoundError
from agentlightning.semconv import CALL_FLAG, REWARD, reward_value
from agentlightning.store.base import CALLS, LightningStore
from agentlightning.store.calls import StoreCall
from agentlightning.store.retention import ended_before
from agentlightning.store.sql import SqlStore
from agentlightning.types import (
    UNATTRIBUTED,
    And,
    Attempt,
    AttemptedRollout,
    Condition,
    Deleted,
    EnqueueRolloutRequest,
    Filter,
    Rollout,
    RolloutConfig,
    SampledChoice,
    TokenCapture,
)
from tests.store.conftest import span_of

pytestmark = pytest.mark.anyio

EVERYTHING = And([])
SECRET = 'Jürgen\'s secret "diary"'


async def start(store: LightningStore, input: object = "a task", **fields) -> AttemptedRollout:
    """A rollout at work, with a call and a reward."""
    (queued,) = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=input, **fields)])
    rollout = await store.start_attempt(queued.rollout_id)
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    await store.add_many_spans(
        [
            span_of(ids, "call", attributes={"prompt": str(input)}),
            span_of(ids, "reward", name=REWARD, attributes={reward_value(0): 0.3}),
        ]
    )
    return rollout


async def finish(store: LightningStore, input: object = "a task", **fields) -> Rollout:
    rollout = await start(store, input, **fields)
    await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")
    found = await store.get_rollout_by_id(rollout.rollout_id)
    assert found is not None
    return found


async def delete(store: LightningStore, where: Filter = EVERYTHING, **fields) -> Deleted:
    return await store.delete_rollouts(where=where, **fields)


async def test_a_removed_rollout_is_gone_with_all_that_belongs_to_it(store):
    one, other = await finish(store), await finish(store)
    assert await delete(store, Condition("rollout_id", "eq", one.rollout_id)) == Deleted(
        rollouts=1, attempts=1, spans=2
    )
    assert await store.get_rollout_by_id(one.rollout_id) is None
    assert await store.get_latest_attempt(one.rollout_id) is None
    with pytest.raises(NotFoundError):
        await store.query_spans(one.rollout_id)
    with pytest.raises(NotFoundError):
        await store.query_attempts(one.rollout_id)
    assert [rollout.rollout_id for rollout in (await store.finished_after(0)).rollouts] == [
        other.rollout_id
    ]
    assert await store.check_store() == []


async def test_what_nobody_could_attribute_does_not_grow_old(store):
    await store.add_span(span_of((UNATTRIBUTED, UNATTRIBUTED), "lost"))
    assert await delete(store, ended_before(2e9)) == Deleted()
    assert len(await store.query_spans(UNATTRIBUTED)) == 1
    assert (await delete(store, Condition("rollout_id", "eq", UNATTRIBUTED))).spans == 1


async def test_more_rollouts_than_a_transaction_holds_are_all_removed(store):
    requests = [EnqueueRolloutRequest(input=number) for number in range(450)]
    await store.enqueue_many_rollouts(requests)
    assert await delete(store, unfinished=True) == Deleted(rollouts=450)
    assert (await store.statistics())["rollouts"] == 0


async def test_unfinished_rollouts_are_left_unless_asked_for(store):
    queued, running = await store.enqueue_rollout(1), await start(store)
    assert await delete(store) == Deleted()
    assert (
        await delete(store, Condition("status", "eq", "queuing"), unfinished=True)
    ).rollouts == 1
    assert [rollout.rollout_id for rollout in await store.query_rollouts()] == [running.rollout_id]
    assert (await delete(store, unfinished=True)).rollouts == 1
    with pytest.raises(NotFoundError):
        await store.heartbeat(running.rollout_id, running.attempt.attempt_id, running.lease.token)
    assert await store.get_rollout_by_id(queued.rollout_id) is None
    assert await store.dequeue_rollout() is None


async def test_a_group_goes_with_its_last_rollout(store):
    group = await store.create_group(2)
    members = [
        await finish(store, group_id=group.group_id, group_index=index) for index in range(2)
    ]
    await delete(store, Condition("rollout_id", "eq", members[0].rollout_id))
    left = await store.get_group(group.group_id)
    assert left is not None and left.rollout_ids == (members[1].rollout_id,)
    await delete(store)
    assert await store.get_group(group.group_id) is None


async def test_a_group_of_which_a_member_is_removed_at_work_becomes_complete(store):
    run = await store.start_run("train", {})
    group = await store.create_group(2, run.run_id)
    done = await finish(store, group_id=group.group_id, group_index=0)
    working = await start(store, group_id=group.group_id, group_index=1)
    waiting = asyncio.create_task(store.complete_groups_after(run.run_id, 0, timeout=60))
    await delete(store, Condition("rollout_id", "eq", working.rollout_id), unfinished=True)
    with anyio.fail_after(60):
        (complete,) = await waiting
    assert complete.group_id == group.group_id and done.rollout_id in complete.rollout_ids
    assert await store.check_store() == []


async def test_the_number_of_a_removed_group_is_not_given_again(store):
    run, other = await store.start_run("train", {}), await store.start_run("train", {})

    async def complete(run_id: str) -> str:
        group = await store.create_group(1, run_id)
        await finish(store, group_id=group.group_id, group_index=0)
        return group.group_id

    for _ in range(3):
        newest = await complete(run.run_id)
    await delete(store, Condition("group_id", "eq", newest))
    next_one = await complete(run.run_id)
    assert [group.group_id for group in await store.complete_groups_after(run.run_id, 3)] == [
        next_one
    ]
    await delete(store, Condition("run_id", "eq", run.run_id))
    next_one = await complete(run.run_id)
    (found,) = await store.complete_groups_after(run.run_id, 4)
    assert (found.group_id, found.finished_index) == (next_one, 5)
    await complete(other.run_id)
    assert [
        group.finished_index for group in await store.complete_groups_after(other.run_id, 0)
    ] == [1]


async def test_a_rollout_is_not_old_while_one_of_its_group_is_not(store):
    group = await store.create_group(2)
    done = await finish(store, group_id=group.group_id, group_index=0)
    working = await start(store, group_id=group.group_id, group_index=1)
    alone = await finish(store)
    young = ended_before(await store.get_time() + 60)
    assert (await delete(store, young)).rollouts == 1
    assert await store.get_rollout_by_id(alone.rollout_id) is None
    assert (await store.get_group(group.group_id)).rollout_ids == (
        done.rollout_id,
        working.rollout_id,
    )
    assert await delete(store, young) == Deleted()
    await store.update_attempt(working.rollout_id, working.attempt.attempt_id, status="failed")
    last = await store.get_rollout_by_id(working.rollout_id)
    assert await delete(store, ended_before(last.end_time)) == Deleted()
    assert (await delete(store, young)).rollouts == 2


async def test_whoever_waits_for_several_rollouts_is_told_that_one_was_removed(store):
    removed, working = await start(store, "removed"), await start(store)
    waiting = asyncio.create_task(
        store.wait_for_rollouts([removed.rollout_id, working.rollout_id], timeout=60)
    )
    await asyncio.sleep(0)
    await delete(store, Condition("input", "contains", "removed"), unfinished=True)
    await store.update_attempt(working.rollout_id, working.attempt.attempt_id, status="succeeded")
    with anyio.fail_after(30), pytest.raises(NotFoundError):
        await waiting


@pytest.mark.parametrize("store", ["http"], indirect=True)
async def test_the_log_says_who_asked_for_what_and_nothing_that_users_wrote(store, caplog):
    caplog.set_level(logging.INFO, "agentlightning.audit")
    await finish(store, {"question": SECRET})
    await delete(
        store, And([Condition("input", "contains", SECRET), Condition("mode", "eq", "train")])
    )
    await store.perform(elsewhere())
    erased, imported = caplog.messages
    assert erased == 'delete_rollouts by the admin key: {"unfinished":false,"scrub":false}'
    assert imported == "import_rollout by the admin key: {}"


def traces(folder: Path, word: bytes) -> list[str]:
    return [path.name for path in folder.iterdir() if word in path.read_bytes()]


async def test_nothing_of_an_erased_rollout_is_left_in_the_files(tmp_path):
    """Rows of all sizes, changed now and then: such as make a database move them about within its
    pages."""
    store = await SqlStore.open(tmp_path / "store.db")

    async def live(number: int) -> None:
        words = ("ZEBRA " if number % 7 == 0 else "horse ") * (1, 3, 30, 300)[number % 4]
        rollout = await start(store, words, rollout_id=f"{words[0]}{number}")
        await store.update_rollout(
            rollout.rollout_id, metadata={"note": words[: 10 * (number % 50)]}
        )
        await store.update_attempt(
            rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded"
        )

    await asyncio.gather(*map(live, range(300)))
    assert traces(tmp_path, b"ZEBRA")
    deleted = await delete(store, Condition("input", "contains", "ZEBRA"), scrub=True)
    assert deleted.rollouts == 43
    # Seen while the store is open, its log beside it.
    assert traces(tmp_path, b"ZEBRA") == []
    assert await store.check_store() == []
    await store.enqueue_rollout("still at work")
    await store.close()
    assert traces(tmp_path, b"ZEBRA") == []


async def test_queries_that_overlap_do_not_keep_the_log_from_being_emptied(tmp_path):
    store = await SqlStore.open(tmp_path / "store.db")
    await finish(store, "ZEBRA")

    def slow(tx):
        tx.connection.execute("SELECT count(*) FROM rollouts").fetchone()
        time.sleep(0.2)

    async def ask():
        while True:
            await store._read(slow, "search")

    asking = [asyncio.create_task(ask()) for _ in range(8)]
    await asyncio.sleep(0.1)
    assert (await delete(store, Condition("input", "contains", "ZEBRA"), scrub=True)).rollouts == 1
    assert traces(tmp_path, b"ZEBRA") == []
    for one in asking:
        one.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    await store.close()


async def test_every_kind_of_store_can_be_asked_to_leave_no_trace(store):
    await finish(store, "ZEBRA")
    kept = await finish(store)
    assert (await delete(store, Condition("input", "contains", "ZEBRA"), scrub=True)).rollouts == 1
    assert [rollout.rollout_id for rollout in await store.query_rollouts()] == [kept.rollout_id]


@pytest.mark.slow
async def test_writing_a_large_file_anew_costs_nobody_their_lease_or_time(tmp_path):
    """A clock that runs sixty times as fast makes 200 MB as long as 12 GB. Somebody writes all the
    time."""
    began = time.monotonic()
    store = await SqlStore.open(
        tmp_path / "store.db", clock=lambda: 1e6 + 60 * (time.monotonic() - began)
    )
    for number in range(20):
        rollout = await store.start_rollout(
            "ZEBRA" if number % 2 else "horse", rollout_id=f"r-{number}"
        )
        ids = rollout.rollout_id, rollout.attempt.attempt_id
        texts = [os.urandom(500_000).hex(" ", 4) for _ in range(10)]
        await store.add_many_spans(
            [
                span_of(ids, f"{number}-{n}", attributes={"text": text})
                for n, text in enumerate(texts)
            ]
        )
        await store.update_attempt(*ids, status="succeeded")
    attempted = await store.start_rollout("at work")
    ids = attempted.rollout_id, attempted.attempt.attempt_id

    async def work() -> None:
        while True:  # as a runner does: every third of a lease, and not again before the answer
            assert attempted.lease is not None
            await store.heartbeat(*ids, attempted.lease.token)
            await asyncio.sleep(30 / 60 / 3)

    async def write() -> None:
        while True:
            await store.enqueue_rollout("x" * 100_000)

    tasks = [asyncio.create_task(work()), asyncio.create_task(write())]
    deleted = await delete(store, Condition("input", "contains", "ZEBRA"), scrub=True)
    await store.expire_overdue()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    attempt = await store.get_latest_attempt(ids[0])
    assert deleted.rollouts == 10 and attempt is not None
    assert attempt.status == "preparing" and attempt.held_seconds > 10
    assert traces(tmp_path, b"ZEBRA") == []
    await store.close()


def elsewhere(**changes) -> StoreCall:
    """A rollout of another store that was tried twice."""
    rollout = Rollout(
        rollout_id="ro-1",
        input={"say": "hello"},
        start_time=1.5,
        end_time=9.25,
        status="succeeded",
        config=RolloutConfig(max_attempts=2, retry_condition=("failed",)),
        metadata={"score": 0.3},
    )
    attempts = [
        Attempt(
            rollout_id="ro-1",
            attempt_id="at-1",
            sequence_id=1,
            start_time=2.0,
            end_time=3.0,
            status="failed",
        ),
        Attempt(
            rollout_id="ro-1",
            attempt_id="at-2",
            sequence_id=2,
            start_time=4.0,
            end_time=9.0,
            status="succeeded",
        ),
    ]
    spans = [span_of(("ro-1", "at-2"), "s", sequence_id=5)]
    return CALLS["import_rollout"](
        **{"rollout": rollout, "attempts": attempts, "spans": spans, **changes}
    )


def changed(noun, **fields):
    return msgspec.structs.replace(noun, **fields)


async def test_an_imported_rollout_is_as_it_was_and_stored_once(store):
    call = elsewhere()
    assert await store.perform(call) is True
    assert await store.perform(call) is False
    assert await store.get_rollout_by_id("ro-1") == call.rollout
    assert await store.query_attempts("ro-1") == call.attempts
    assert await store.query_spans("ro-1") == call.spans
    assert [rollout.rollout_id for rollout in (await store.finished_after(0)).rollouts] == ["ro-1"]
    assert await store.check_store() == []


async def test_an_import_completes_a_group_that_is_here(store):
    run = await store.start_run("train", {})
    group = await store.create_group(1, run.run_id)
    rollout = changed(
        elsewhere().rollout, group_id=group.group_id, group_index=0, run_id=run.run_id
    )
    await store.perform(elsewhere(rollout=rollout))
    (complete,) = await store.complete_groups_after(run.run_id, 0)
    assert complete.rollout_ids == ("ro-1",)
    assert await store.check_store() == []


async def test_unattributed_spans_are_imported_beside_those_that_are_here(store):
    await store.add_span(span_of((UNATTRIBUTED, UNATTRIBUTED), "here"))
    rollout = await store.get_rollout_by_id(UNATTRIBUTED)
    attempts = await store.query_attempts(UNATTRIBUTED)
    there = span_of((UNATTRIBUTED, UNATTRIBUTED), "there")
    await store.import_rollout(rollout=rollout, attempts=attempts, spans=[there])
    assert {span.span_id for span in await store.query_spans(UNATTRIBUTED)} == {"here", "there"}


FIRST, SECOND = elsewhere().attempts


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"rollout": changed(elsewhere().rollout, status="running", end_time=None)},
            "only finished rollouts",
        ),
        ({"rollout": changed(elsewhere().rollout, end_time=None)}, "only finished rollouts"),
        ({"rollout": changed(elsewhere().rollout, rollout_id="a/b")}, "rollout_id"),
        ({"rollout": changed(elsewhere().rollout, group_index=1)}, "group_id and a group_index"),
        ({"attempts": [FIRST, changed(SECOND, status="running")]}, "not a finished attempt"),
        ({"attempts": [SECOND]}, "attempt 1 of ro-1 is missing"),
        ({"attempts": [FIRST], "spans": elsewhere().spans}, "not of an attempt"),
        ({"spans": [span_of(("ro-1", "somebody-elses"), "s")]}, "not of an attempt"),
    ],
)
async def test_what_is_not_a_whole_finished_rollout_is_refused(store, changes, reason):
    with pytest.raises(InvalidError, match=reason):
        await store.perform(elsewhere(**changes))
    assert (await store.statistics())["rollouts"] == 0


async def test_an_import_takes_nothing_from_another_rollout(store):
    other = await start(store)
    attempt = changed(FIRST, attempt_id=other.attempt.attempt_id)
    with pytest.raises(ConflictError, match="is stored already"):
        await store.perform(elsewhere(attempts=[attempt, SECOND]))
    group = await store.create_group(1)
    await finish(store, group_id=group.group_id, group_index=0)
    with pytest.raises(ConflictError, match="is stored already"):
        await store.perform(
            elsewhere(rollout=changed(elsewhere().rollout, group_id=group.group_id, group_index=0))
        )
    assert await store.get_rollout_by_id("ro-1") is None


async def test_a_call_without_a_logprob_for_each_token_must_be_flagged(store):
    rollout = await store.start_rollout("a task")
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    choice = SampledChoice(token_ids=(1, 2), logprobs=(-0.5,), finish_reason="stop")
    tokens = TokenCapture(prompt_token_ids=(), choices=(choice,))
    flag = {CALL_FLAG: "ids and logprobs differ in length"}
    await store.add_span(span_of(ids, "flagged", attributes=flag, tokens=tokens))
    assert await store.check_store() == []
    await store.add_span(span_of(ids, "not-flagged", tokens=tokens))
    (problem,) = await store.check_store()
    assert problem.endswith(": not-flagged")


async def test_a_check_says_what_is_wrong(tmp_path):
    store = await SqlStore.open(tmp_path / "store.db")
    rollout = await finish(store)
    with contextlib.closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as vandal:
        vandal.execute("UPDATE rollouts SET end_time = NULL, attempts = 3")
    problems = await store.check_store()
    assert len(problems) == 2 and all(rollout.rollout_id in problem for problem in problems)
    await store.close()
