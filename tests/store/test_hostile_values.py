"""Texts and numbers that some database, format or decoder does not hold: taken and given back, or
refused by name, and never a harm to anything else."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import aiohttp
import msgspec
import pytest

from agentlightning.errors import ConflictError, InvalidError, NotFoundError
from agentlightning.store.base import CALLS
from agentlightning.types import (
    LLM,
    Condition,
    EnqueueRolloutRequest,
    Metrics,
    Order,
    SpanEvent,
    SpanLink,
)
from tests.server.places import EVERY, Place, call_about, furnish, span_of
from tests.store.conftest import open_store

pytestmark = pytest.mark.anyio

TEXTS = {
    "NUL": "a\0b",
    "half a pair": "a\udcffb",
    "right to left": "a\u202eb",
    "a megabyte": "ä" * 2**19,
}


def with_each_text(value: Any, text: str) -> Iterator[Any]:
    """The value once for each text in it, with `text` in its place."""
    if isinstance(value, str):
        yield text
    for key, item in value.items() if isinstance(value, dict) else ():
        yield from ({**value, key: other} for other in with_each_text(item, text))
    for index, item in enumerate(value) if isinstance(value, list | tuple) else ():
        yield from (
            [*value[:index], other, *value[index + 1 :]] for other in with_each_text(item, text)
        )


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
async def test_every_call_takes_or_refuses_a_text_and_harms_nothing(store, text):
    place = await furnish(store, "a")
    ids = {"rollout_id": place.rollout_id, "attempt_id": place.attempt_id}
    span = span_of(place, 3, attributes={"a": "b", "c": ["d"]}, events=(SpanEvent(name="e"),))
    details = {
        "update_attempt": {**ids, "metadata": {"reason": "because"}},
        "store_spans": {"spans": [span]},
        "end_attempt": {
            **ids,
            "status": "failed",
            "spans": [span],
            "metadata": {"reason": "because"},
        },
        "page_rollouts": {"where": Condition("error", "eq", "because")},
    }
    for name, make in EVERY.items():
        plain = msgspec.to_builtins(details.get(name) or make(place))
        for changed in with_each_text(plain, text):
            try:
                call = msgspec.convert(changed, CALLS[name])
            except (msgspec.ValidationError, UnicodeEncodeError):
                continue  # not a text of the caller's choice
            try:
                await store.perform(call)
            except (InvalidError, NotFoundError, ConflictError) as error:
                assert len(str(error)) < 2**21
    assert await store.check_store() == []
    for name in (
        *("get_rollout_by_id", "query_attempts", "query_spans", "query_metrics"),
        *("page_rollouts", "page_spans", "query_runs", "query_workers", "query_keys"),
    ):
        assert await store.perform(call_about(name, place))


async def test_a_reason_with_a_nul_ends_its_attempt(store):
    leased = await store.start_rollout(1)
    reason = {"reason": "ValueError: \0 in a name"}
    ended = await store.update_attempt(
        leased.rollout_id, leased.attempt.attempt_id, status="failed", metadata=reason
    )
    assert (ended.status, ended.metadata) == ("failed", reason)
    (found,) = (await store.page_rollouts(Condition("error", "contains", "in a name"))).items
    assert found.rollout_id == leased.rollout_id


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


SPAN = span_of(Place("a", "p"))
UNFIT = [2**64, -(2**63) - 1, 10**400, float("nan"), float("inf"), nested(300), nested(5000)]


@pytest.mark.parametrize(
    "value", UNFIT, ids=["big", "small", "huge", "nan", "inf", "deep", "deeper"]
)
async def test_a_value_that_would_not_come_back_is_refused_wherever_it_is_given(store, value):
    leased = await store.start_rollout(1)
    ids = leased.rollout_id, leased.attempt.attempt_id
    run = await store.start_run("train", {})
    llm = LLM(endpoint="http://localhost", model="m", sampling_parameters={"seed": value})
    link = SpanLink(trace_id="t", span_id="s", attributes={"a": value})
    span = msgspec.structs.replace(SPAN, rollout_id=ids[0], attempt_id=ids[1])
    given = [
        lambda: store.enqueue_rollout({"answers": [value]}),
        lambda: store.enqueue_rollout(1, metadata={"answer": value}),
        lambda: store.start_rollout(value),
        lambda: store.update_rollout(ids[0], metadata={"answer": value}),
        lambda: store.update_rollout(ids[0], merge={"answer": value}),
        lambda: store.update_attempt(*ids, metadata={"answer": value}),
        lambda: store.update_worker("w", {"free": value}),
        lambda: store.start_run("train", {"seed": value}),
        lambda: store.add_resources({"main": llm}),
        lambda: store.add_metrics(
            Metrics(run_id=run.run_id, step=1, time=1.0, values={"reward": value})
        ),
        lambda: store.add_span(msgspec.structs.replace(span, attributes={"a": value})),
        lambda: store.add_span(msgspec.structs.replace(span, attributes={"a": [1, value]})),
        lambda: store.add_span(msgspec.structs.replace(span, resource={"a": value})),
        lambda: store.add_span(
            msgspec.structs.replace(span, events=(SpanEvent(name="e", attributes={"a": value}),))
        ),
        lambda: store.add_span(msgspec.structs.replace(span, links=(link,))),
    ]
    for give in given:
        with pytest.raises(InvalidError):
            await give()
    await store.update_attempt(*ids, status="succeeded")
    page = await store.finished_after(0)
    assert [rollout.rollout_id for rollout in page.rollouts] == [ids[0]]
    assert await store.query_spans(ids[0]) == []


async def test_a_span_longer_than_a_number_can_say_is_refused_and_harms_no_query(store):
    leased = await store.start_rollout(1)
    span = msgspec.structs.replace(
        SPAN, rollout_id=leased.rollout_id, attempt_id=leased.attempt.attempt_id
    )
    for start, end in ((-1.7e308, 1.7e308), (1.7e308, -1.7e308)):
        with pytest.raises(InvalidError, match="how long it is"):
            await store.add_span(msgspec.structs.replace(span, start_time=start, end_time=end))
    await store.add_span(msgspec.structs.replace(span, start_time=5e-324, end_time=1e308))
    assert (
        await store.page_spans(Condition("duration", "gt", 1.0), [Order(field="duration")])
    ).items


@pytest.mark.parametrize("key", ["aglk-\udcff", "agl-\udcff.\udcff", "agl-wk-YQ.\udcff", "\udcff"])
async def test_half_a_pair_in_a_key_is_no_key(store, key):
    with contextlib.suppress(InvalidError):  # what no database can be asked for
        assert await store.find_key(key) is None


async def test_resources_of_another_kind_are_refused_and_leave_the_store_readable(store):
    with pytest.raises(InvalidError):
        await store.add_resources({"prompt": "a text"})
    assert await store.query_resources() == []


@pytest.mark.parametrize(
    "text", ["1" * 30, "1" * 5000, "1e400", "[" * 300 + "]" * 300, "[" * 9000 + "]" * 9000]
)
async def test_json_that_would_not_come_back_is_refused_at_the_door(request, text):
    headers = {"Authorization": "Bearer an admin's key", "Content-Type": "application/json"}
    body = f'{{"requests": [{{"input": {{"answer": {text}}}}}]}}'
    async with (
        open_store("http", request) as store,
        aiohttp.ClientSession(headers=headers) as session,
    ):
        async with session.post(f"{store.url}/api/v1/rollouts", data=body) as answer:
            assert answer.status == 422, await answer.text()
        assert await store.query_rollouts() == []


@pytest.mark.parametrize("dots", [".", "..", "..."])
async def test_no_id_is_of_dots_alone_and_none_leads_elsewhere(store, dots):
    """In a URL `..` is the path above: `DELETE /runs/..` would be another call."""
    place = await furnish(store, "a")
    before = await store.statistics()
    attempts: list[Callable[[], Awaitable[Any]]] = [
        lambda: store.enqueue_many_rollouts([EnqueueRolloutRequest(input=1, rollout_id=dots)]),
        lambda: store.start_rollout(1, rollout_id=dots),
        lambda: store.start_rollout(1, attempt_id=dots),
        lambda: store.start_rollout(1, worker_id=dots),
        lambda: store.dequeue_many_rollouts(1, worker_id=dots),
        lambda: store.dequeue_many_rollouts(1, lease_id=dots),
        lambda: store.add_resources({}, resources_id=dots),
        lambda: store.start_run("rl", {}, run_id=dots),
        lambda: store.create_group(2, group_id=dots),
        lambda: store.update_worker(dots),
        lambda: store.store_spans([span_of(place, 1, span_id=dots)]),
    ]
    for attempt in attempts:
        with pytest.raises(InvalidError):
            await attempt()
    named: list[Callable[[], Awaitable[Any]]] = [
        lambda: store.get_rollout_by_id(dots),
        lambda: store.get_group(dots),
        lambda: store.cancel_rollout(dots),
        lambda: store.update_rollout(dots, metadata={}),
        lambda: store.update_attempt(place.rollout_id, dots, status="failed"),
        lambda: store.update_attempt(dots, place.attempt_id, status="failed"),
        lambda: store.delete_run(dots),
        lambda: store.update_run(dots, "failed"),
        lambda: store.revoke_key(dots),
        lambda: store.get_resources_by_id(dots),
    ]
    for ask in named:
        with contextlib.suppress(InvalidError, NotFoundError):
            assert await ask() is None
    assert await store.statistics() == before
    assert (await store.query_attempts(place.rollout_id))[0].status != "failed"
