"""What an agent returns is its last word: a reward in any form that programs have one in, or a
typed refusal."""

from __future__ import annotations

import os
import time
from decimal import Decimal
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import agentlightning as agl
from agentlightning.errors import InvalidError
from agentlightning.runner.runner import Runner
from agentlightning.store.sql import SqlStore
from agentlightning.tracing.context import require_binding
from agentlightning.tracing.rewards import reward_attributes
from agentlightning.types import Span

pytestmark = pytest.mark.anyio


async def result_of(store: SqlStore, result: Any) -> list[Span]:
    rollout = await Runner(store, lambda task: result).run_one("x")
    return await store.query_spans(rollout.rollout_id)


@pytest.mark.parametrize(
    ("result", "value"),
    [
        (1, 1.0),
        (Fraction(1, 4), 0.25),
        (np.float32(0.25), 0.25),
        (np.int64(3), 3.0),
        (np.array(0.5), 0.5),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (torch.tensor(2), 2.0),
        ({"correct": 1}, 1.0),
        ({"short": 0.2, "reward": 0.5}, 0.5),
        ({"short": torch.tensor(0.2), "correct": np.float64(1), "primary_key": "correct"}, 1.0),
        (None, None),
        ([], None),
    ],
)
async def test_what_counts_as_a_reward(store: SqlStore, result: Any, value: float | None) -> None:
    assert agl.find_final_reward(await result_of(store, result)) == value


@pytest.mark.parametrize(
    "result",
    [
        "0.7",
        b"1",
        torch.tensor([1.0]),
        np.array([1.0]),
        Decimal(1),
        1j,
        {},
        {"a": 1, "b": 2},
        {"a": "1"},
        {"a": float("nan")},
        np.float32("inf"),
        torch.tensor(float("nan")),
        10**400,
        {"reward": 1, "final": False},
        {"reward": 1, "primary_key": 3},
        ...,
    ],
    ids=repr,
)
async def test_anything_else_fails_its_attempt_and_says_why(store: SqlStore, result: Any) -> None:
    with pytest.raises(InvalidError, match=r"the agent('s result| returned)"):
        await result_of(store, result)


async def test_all_named_rewards_and_returned_spans_are_kept(store: SqlStore) -> None:
    (span,) = await result_of(store, {"short": 0.2, "correct": 1, "primary_key": "correct"})
    assert (
        reward_attributes({"correct": 1.0, "short": 0.2}, "correct").items()
        <= span.attributes.items()
    )
    foreign = msgspec.structs.replace(
        span, rollout_id="?", attempt_id="?", span_id="2" * 16, name="mine"
    )
    (span,) = await result_of(store, [foreign])
    assert span.name == "mine" and span.rollout_id != "?"


async def test_a_returned_reward_is_the_last_word_and_an_intermediate_one_displaces_none(
    store: SqlStore,
) -> None:
    def emitting(task: float | None) -> float | None:
        ahead = time.time() + 60  # a clock that is ahead
        tracer = require_binding("the test").tracer
        tracer.record("posted", reward_attributes(0.5), start_time=ahead, end_time=ahead)
        agl.emit_reward(0.9, final=False)
        return task

    for returned, value in ((None, 0.5), (0.25, 0.25)):
        rollout = await Runner(store, emitting).run_one(returned)
        assert agl.find_final_reward(await store.query_spans(rollout.rollout_id)) == value


async def reason_of(store: SqlStore, agent: Any, task: Any, **options: Any) -> str:
    """Why the attempt of an agent on a task failed."""
    llm = agl.LLM(endpoint="http://127.0.0.1:9/v1", model="policy")
    await store.add_resources({"llm": llm})
    runner = Runner(store, agent, **options)
    with pytest.raises(Exception):  # noqa: B017 - whatever it is, the store has the reason
        await runner.run_one(task)
    [rollout] = await store.query_rollouts()
    attempt = await store.get_latest_attempt(rollout.rollout_id)
    assert attempt is not None
    return str(attempt.metadata["reason"])


@pytest.mark.parametrize("isolation", ["none", "process"])
async def test_a_field_that_the_task_lacks_is_told_with_those_it_has(
    store: SqlStore, isolation: str
) -> None:
    task = {"question": "?", "answer": 1}
    reason = await reason_of(store, "tests.runner.agents.mistaken:field", task, isolation=isolation)
    assert "qestion" in reason and reason.endswith("; the task has: question, answer")


async def test_a_key_that_something_else_lacks_is_told_alone(store: SqlStore) -> None:
    def agent(task: Any, llm: agl.LLM) -> float:
        return float(os.environ["NO_SUCH_VARIABLE"])

    assert await reason_of(store, agent, {"question": "?"}) == "KeyError: 'NO_SUCH_VARIABLE'"


async def test_a_call_to_another_address_than_the_runs_is_told_with_both(store: SqlStore) -> None:
    reason = await reason_of(
        store, "tests.runner.agents.mistaken:address", {"question": "?"}, isolation="none"
    )
    assert (
        "this call went to http://127.0.0.1:1, and the model of this run is at http://127.0.0.1:9"
        in reason
    )
