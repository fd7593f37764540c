"""Whatever is asked of a store, in whatever order and by however many at once: nothing in it is
wrong afterwards."""

from __future__ import annotations

import asyncio
import random

import pytest

from agentlightning.errors import ConflictError, NotFoundError
from agentlightning.store import retention
from agentlightning.store.base import CALLS
from agentlightning.types import (
    And,
    AttemptStatus,
    Condition,
    EnqueueRolloutRequest,
    RolloutConfig,
    Span,
)
from tests.store.conftest import opened

pytestmark = pytest.mark.anyio

EVERYTHING = And([])
ENDS: list[AttemptStatus] = ["succeeded", "failed", "timeout", "unresponsive", "cancelled"]


@pytest.mark.parametrize("operations", [300, pytest.param(5000, marks=pytest.mark.soak)])
async def test_whatever_happens_at_once_leaves_nothing_wrong(address: str, operations: int) -> None:
    chance = random.Random(operations)
    async with opened(address, lease_seconds=0.2) as store:
        await store.start_run("train", {}, "run")
        names = [f"r{number}" for number in range(operations // 10)]

        async def one() -> None:
            await asyncio.sleep(chance.uniform(0, operations / 1000))
            name, attempt_id = chance.choice(names), f"{chance.choice(names)}-attempt"
            config = RolloutConfig(max_attempts=3, retry_condition=("failed", "unresponsive"))
            group, index = f"g{chance.randrange(5)}", chance.randrange(3)
            latest = await store.get_latest_attempt(name)
            of_latest = {
                "rollout_id": name,
                "attempt_id": "none" if latest is None else latest.attempt_id,
            }
            plain = EnqueueRolloutRequest(input=1, rollout_id=name, config=config)
            member = EnqueueRolloutRequest(
                input=1,
                rollout_id=name,
                config=config,
                group_id=group,
                group_index=index,
                run_id="run",
            )
            span = Span(
                **of_latest,
                sequence_id=0,
                trace_id="t",
                span_id=name,
                name="n",
                start_time=0.0,
                end_time=1.0,
            )
            call = chance.choice(
                [
                    CALLS["create_group"](size=3, run_id="run", group_id=group),
                    CALLS["enqueue_many_rollouts"](requests=[plain]),
                    CALLS["enqueue_many_rollouts"](requests=[member]),
                    CALLS["dequeue_many_rollouts"](
                        limit=3, lease_id=chance.choice(["l1", "l2", None])
                    ),
                    CALLS["start_attempt"](rollout_id=name, attempt_id=attempt_id),
                    CALLS["start_rollout"](
                        input=1, rollout_id=name, config=config, attempt_id=attempt_id
                    ),
                    CALLS["store_spans"](spans=[span]),
                    CALLS["update_attempt"](**of_latest, status=chance.choice(ENDS)),
                    CALLS["update_rollout"](
                        rollout_id=name, status=chance.choice(["requeuing", "succeeded"])
                    ),
                    CALLS["cancel_rollout"](rollout_id=name),
                    CALLS["delete_rollouts"](
                        where=Condition("rollout_id", "eq", name), unfinished=chance.random() < 0.5
                    ),
                ]
            )
            try:
                await store.perform(call)
            except (ConflictError, NotFoundError):
                return
            done.append(call.method)

        done: list[str] = []
        await asyncio.gather(*(one() for _ in range(operations)))
        assert len(done) > operations / 5
        assert await store.check_store() == []


async def test_a_rollout_made_anew_in_the_transaction_that_finished_and_deleted_it_is_not_finished(
    address: str,
) -> None:
    async with opened(address) as store:
        request = EnqueueRolloutRequest(input=1, rollout_id="again")
        await store.enqueue_many_rollouts(requests=[request])

        async def remove() -> None:
            await store._writer.submit(lambda tx: retention.delete_some(tx, EVERYTHING, [1]))

        await asyncio.gather(  # what one turn of the event loop brings shares a commit
            store.cancel_rollout(rollout_id="again"),
            remove(),
            store.enqueue_many_rollouts(requests=[request]),
        )
        assert await store.check_store() == []
        assert (await store.finished_after(cursor=0, timeout=0)).rollouts == ()
