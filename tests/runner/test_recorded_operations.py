"""Where an attempt is walked again, operations give what they gave, or run again."""

from __future__ import annotations

from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import ConfigError, NotRecordedError
from agentlightning.runner.runner import Runner
from agentlightning.semconv import OPERATION_NAME, OPERATION_ONCE, OPERATION_REPLAYED
from agentlightning.store.sql import SqlStore
from agentlightning.tracing.context import recording
from agentlightning.tracing.recorded import RecordedOperations, fullest, read_operations, whole
from agentlightning.types import EnqueueRolloutRequest, Rollout, RolloutConfig, Span

pytestmark = pytest.mark.anyio

ran: list[str] = []


@agl.operation(once=True)
async def charge(card: str) -> Any:
    ran.append(card)
    return {"receipt": len(ran)} if card != "no JSON" else (1, 2)


@agl.operation
def price(city: str) -> float:
    ran.append(city)
    return 99.5


async def run_twice(store: SqlStore, card: str, **config: Any) -> tuple[Rollout, list[Span]]:
    """A rollout whose first attempt fails at its end."""
    attempts: list[str] = []

    async def agent(task: str, rollout: agl.AttemptedRollout) -> float:
        attempts.append(rollout.attempt.attempt_id)
        price("Oslo")
        got = [await charge(task), await charge(task)]
        if len(attempts) == 1:
            raise OSError("the network is down")
        return float(got[0] != got[1])

    ran.clear()
    settings = RolloutConfig(max_attempts=2, retry_condition=("failed",), **config)
    (rollout,) = await store.enqueue_many_rollouts(
        [EnqueueRolloutRequest(input=card, config=settings)]
    )
    runner = Runner(store, agent, idle_seconds=0.5)
    await runner.run()
    spans = await store.query_spans(rollout.rollout_id, "latest")
    ended = await store.get_rollout_by_id(rollout.rollout_id)
    assert ended is not None
    return ended, spans


@pytest.mark.parametrize(
    ("config", "again"),
    [
        ({"retry": "rerun"}, ["Oslo", "card", "card"]),
        ({"retry": "replay"}, ["Oslo"]),
        ({"retry": "replay", "tools": "recorded"}, []),
    ],
)
async def test_a_retry_charges_nobody_twice(
    store: SqlStore, config: dict[str, Any], again: list[str]
) -> None:
    rollout, spans = await run_twice(store, "card", **config)
    assert ran == ["Oslo", "card", "card", *again]
    assert (rollout.status, rollout.reward) == ("succeeded", 1.0)
    given = [
        span.attributes[OPERATION_NAME] for span in spans if OPERATION_REPLAYED in span.attributes
    ]
    assert len(given) + len(again) == 3


async def test_an_operation_that_must_not_run_twice_and_cannot_be_given_fails(
    store: SqlStore,
) -> None:
    rollout, _ = await run_twice(store, "no JSON", retry="replay")
    assert ran == ["Oslo", "no JSON", "no JSON", "Oslo"]
    assert rollout.status == "failed"
    assert "'charge' ran in the attempt that is walked again" in str(rollout.error)


async def test_secrets_are_not_given_and_the_fullest_attempt_counts() -> None:
    def walked(count: int, secret: bool = False) -> list[Span]:
        with recording() as tracer:
            for _ in range(count):
                with agl.operation(name="send", **{OPERATION_ONCE: True}) as running:
                    running.set_input("to")
                    running.set_output("[redacted]" if secret else "sent")
        return tracer.get_last_trace()

    sent = read_operations(walked(2), every=False)
    assert len(fullest([sent, read_operations(walked(1), every=False)])) == 2
    assert len(read_operations(walked(2), every=False, until=0.0)) == 2
    given = RecordedOperations(sent)
    attributes = walked(1)[0].attributes
    taken = [given.take(attributes) for _ in range(3)]
    assert [found and found.value for found in taken] == ["sent", "sent", None]
    hidden = RecordedOperations(read_operations(walked(1, secret=True), every=False))
    with pytest.raises(NotRecordedError, match="without secrets"):
        hidden.take(attributes)


@pytest.mark.parametrize(
    "value", [(1,), {1: 2}, float("nan"), object(), b"", {"a": {"b": [set()]}}, "x" * (1 << 20)]
)
def test_what_json_does_not_give_back_is_not_recorded(value: Any) -> None:
    assert whole(value) is None


def test_a_block_always_runs_so_once_is_refused() -> None:
    with recording(), pytest.raises(ConfigError, match="decorate one"), agl.operation(once=True):
        pass
