"""What a rollout came to, as something to search by: always what `tracing.rewards` says of its last
attempt."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from agentlightning.semconv import ANNOTATION, REWARD_FINAL, REWARD_POSTED, REWARD_RETURNED
from agentlightning.store.sql import SqlStore
from agentlightning.tracing.rewards import find_final_reward, reward_attributes
from agentlightning.types import Condition, EnqueueRolloutRequest, Order, RolloutConfig, Span
from tests.store.conftest import span_of

pytestmark = pytest.mark.anyio
RETRIED = RolloutConfig(max_attempts=2, retry_condition=("failed",))


async def begin(store: SqlStore):
    leased = await store.dequeue_rollout("w")
    assert leased is not None
    return leased


def gives(leased, number: int, reward: float, start_time: float, **attributes) -> Span:
    given = reward_attributes(reward) | attributes
    return span_of(
        leased,
        f"{number:016x}",
        name=ANNOTATION,
        sequence_id=number,
        start_time=start_time,
        attributes=given,
    )


async def rewards(store: SqlStore) -> list[str]:
    """The rollouts with a reward of at least a half."""
    return [
        one.rollout_id for one in (await store.page_rollouts(Condition("reward", "ge", 0.5))).items
    ]


async def test_the_last_final_reward_counts_and_what_the_agent_returned_before_all(store):
    await store.enqueue_rollout("task")
    leased = await begin(store)
    said = [
        gives(leased, 1, 1.0, 10.0, **{REWARD_FINAL: False}),
        gives(leased, 2, 0.75, 20.0),
        gives(leased, 3, 0.0, 15.0),  # it came later, and happened before
        gives(leased, 4, 0.25, 12.0, **{REWARD_RETURNED: True}),
        gives(leased, 5, 1.0, 30.0),
    ]
    expected = [False, True, True, False, False]
    for span, found in zip(said, expected, strict=True):
        await store.add_span(span)
        assert (await rewards(store) != []) is found
        reward = find_final_reward(await store.query_spans(leased.rollout_id))
        assert (reward is not None and reward >= 0.5) is found
        assert (await store.get_rollout_by_id(leased.rollout_id)).reward == reward


async def test_a_reward_counts_no_later_than_it_arrived_however_far_its_clock_is_ahead(store):
    await store.enqueue_rollout("task")
    leased = await begin(store)
    now = await store.get_time()
    await store.add_span(gives(leased, 1, 0.25, now + 3600.0))  # by the agent
    later = await store.get_time()
    await store.add_span(gives(leased, 2, 0.75, later, **{REWARD_POSTED: True}))  # by a grader
    assert (await store.get_rollout_by_id(leased.rollout_id)).reward == 0.75


async def test_a_retry_begins_without_reward_and_error(store):
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input="task", config=RETRIED)])
    first = await begin(store)
    ids = first.rollout_id, first.attempt.attempt_id
    await store.add_span(gives(first, 1, 1.0, 10.0))
    await store.update_attempt(
        *ids, status="failed", metadata={"reason": "ValueError: no such flight"}
    )
    failed = Condition("error", "contains", "flight")
    assert (await rewards(store), (await store.page_rollouts(failed)).items != ()) == (
        [first.rollout_id],
        True,
    )
    stored = await store.get_rollout_by_id(first.rollout_id)
    assert (stored.reward, stored.error) == (1.0, "ValueError: no such flight")
    second = await begin(store)
    assert (second.reward, second.error) == (None, None)
    await store.add_span(gives(first, 2, 1.0, 11.0))  # of the attempt that no longer counts
    assert (await rewards(store), (await store.page_rollouts(failed)).items) == ([], ())
    await store.add_span(gives(second, 1, 0.9, 20.0))
    assert await rewards(store) == [first.rollout_id]


async def test_rollouts_are_sorted_by_reward_and_by_when_they_were_made(store):
    made = [
        one.rollout_id
        for one in await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=1)] * 3)
    ]
    for reward in (0.5, 1.0):
        await store.add_span(gives(await begin(store), 1, reward, 10.0))
    best = await store.page_rollouts(None, [Order(field="reward", descending=True)])
    assert [one.rollout_id for one in best.items] == [made[1], made[0], made[2]]
    newest = await store.page_rollouts(None, [Order(field="number", descending=True)])
    assert [one.rollout_id for one in newest.items] == made[::-1]


@pytest.mark.parametrize("store", ["memory", "postgres"], indirect=True)
async def test_a_lease_that_is_withdrawn_leaves_the_outcome_of_the_attempt_before(store):
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input="task", config=RETRIED)])
    leased = await begin(store)
    ids = leased.rollout_id, leased.attempt.attempt_id
    await store.add_span(gives(leased, 1, 1.0, 10.0))
    await store.update_attempt(*ids, status="failed", metadata={"reason": "out of memory"})
    gone = asyncio.create_task(store.dequeue_rollout("gone"))
    await asyncio.sleep(0)
    gone.cancel()
    for _ in range(2):  # behind the lease, and behind its withdrawal
        await store.update_worker("other", {})
    assert (await store.get_rollout_by_id(leased.rollout_id)).status == "requeuing"
    assert await rewards(store) == [leased.rollout_id]
    assert len((await store.page_rollouts(Condition("error", "eq", "out of memory"))).items) == 1


async def test_an_imported_rollout_has_the_reward_of_its_spans_whatever_its_record_says(store):
    await store.enqueue_rollout("task")
    leased = await begin(store)
    ids = leased.rollout_id, leased.attempt.attempt_id
    await store.end_attempt(*ids, "succeeded", [gives(leased, 1, 0.25, 10.0)])
    rollout = await store.get_rollout_by_id(leased.rollout_id)
    assert rollout.reward == 0.25
    attempts = await store.query_attempts(leased.rollout_id)
    spans = await store.query_spans(leased.rollout_id)
    await store.delete_rollouts(Condition("rollout_id", "eq", leased.rollout_id))
    claimed = msgspec.structs.replace(rollout, reward=1.0, error="none of this")
    assert await store.import_rollout(claimed, attempts, spans)
    assert await store.get_rollout_by_id(leased.rollout_id) == rollout
    await store.delete_rollouts(Condition("rollout_id", "eq", leased.rollout_id))
    assert await store.import_rollout(claimed, attempts, [])
    assert (await store.get_rollout_by_id(leased.rollout_id)).reward is None
