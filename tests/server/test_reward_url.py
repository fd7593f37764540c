"""Whoever can make an HTTP request can give an attempt its reward, and nothing but a reward is
taken for one."""

from __future__ import annotations

import hashlib

import pytest

from agentlightning.runner.environment import agent_environment
from agentlightning.tracing.context import AttemptTracer
from agentlightning.tracing.rewards import (
    find_final_reward,
    find_reward_spans,
    get_reward_value,
    is_final_reward,
)
from agentlightning.types import AttemptedRollout
from tests.server.conftest import ADMIN_KEY

pytestmark = pytest.mark.anyio


@pytest.fixture
async def attempted(store) -> AttemptedRollout:
    return await store.start_rollout("a task")


def url_of(attempted: AttemptedRollout, server) -> str:
    ids = attempted.rollout_id, attempted.attempt.attempt_id
    return agent_environment(None, *ids, server.url, "key", reward_key=attempted.reward_key)[
        "AGL_REWARD_URL"
    ]


async def given(store, attempted: AttemptedRollout):
    return find_reward_spans(await store.query_spans(attempted.rollout_id))


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ("0.7", 0.7),
        ('{"event_type": "reward", "data": {"value": 0.7, "source": "agent"}}', 0.7),
        ('{"correct": 1}', 1.0),
        ('{"short": 0.2, "correct": 1, "primary_key": "correct"}', 1.0),
        ('{"reward": {"short": 0.2, "correct": 1}, "primary_key": "correct"}', 1.0),
    ],
)
async def test_a_reward_is_a_number_or_named_numbers(store, server, http, attempted, body, value):
    async with http.post(url_of(attempted, server), data=body) as answer:
        assert answer.status == 200, await answer.text()
    assert find_final_reward(await given(store, attempted)) == value


async def test_an_intermediate_reward_never_displaces_the_final_one(store, server, http, attempted):
    for body in ("1", '{"reward": 0.25, "final": false}'):
        assert (await http.post(url_of(attempted, server), data=body)).status == 200
    spans = await given(store, attempted)
    assert [(get_reward_value(span), is_final_reward(span)) for span in spans] == [
        (1.0, True),
        (0.25, False),
    ]
    assert find_final_reward(spans) == 1.0


@pytest.mark.parametrize(
    "body",
    [
        "",
        "good",
        "NaN",
        "1e999",
        '"0.7"',
        "{}",
        "9" * 400,
        '{"a": 1, "b": 2}',
        '{"a": 1, "primary_key": "b"}',
        '{"reward": 1, "final": "no"}',
        b"\xff",
        "[" * 60_000,
        '{"event_type": "log", "data": {"value": 1}}',
    ],
)
async def test_anything_else_is_refused_and_told_what_to_send(store, server, http, attempted, body):
    async with http.post(url_of(attempted, server), data=body) as answer:
        assert answer.status == 400
        message = (await answer.json())["error"]["message"]
        assert (
            "expected" in message
            or "must be" in message
            or "give" in message
            or "too large" in message
        )
    assert await given(store, attempted) == []


async def test_an_agent_that_guesses_the_header_cannot_take_its_rewards_place(
    store, server, http, attempted
):
    ids = attempted.rollout_id, attempted.attempt.attempt_id
    for said in ("step 1", f"{ids[1]} step 1", f"{attempted.api_key} step 1"):
        tracer = AttemptTracer(*ids)
        tracer.record(
            "mine",
            {},
            start_time=1,
            end_time=1,
            span_id=hashlib.sha256(said.encode()).hexdigest()[:16],
        )
        await store.add_many_spans(tracer.drain())
    headers = {"Idempotency-Key": "step 1"}
    for _ in range(2):  # a repeated request counts once
        assert (
            await http.post(url_of(attempted, server), data="0.25", headers=headers)
        ).status == 200
    (reward,) = await given(store, attempted)
    assert find_final_reward([reward]) == 0.25


async def test_only_a_key_for_rewards_opens_it(store, server, http, attempted):
    for key, status in [
        ("agl-made.up", 401),
        ("x", 401),
        (attempted.api_key, 403),
        (ADMIN_KEY.replace(" ", ""), 401),
    ]:
        async with http.post(
            f"/rewards/{key}", data="1", headers={"authorization": f"Bearer {ADMIN_KEY}"}
        ) as answer:
            assert answer.status == status
    async with http.post(url_of(attempted, server), data="1" * 70_000) as answer:
        assert answer.status == 413
    async with http.get(url_of(attempted, server)) as answer:
        assert answer.status == 405
    assert await given(store, attempted) == []
