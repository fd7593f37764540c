"""Prompts that go on from earlier ones are stored once, and come back as they were."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning import semconv
from agentlightning.errors import ConflictError
from agentlightning.store import prompts
from agentlightning.store.base import LightningStore
from agentlightning.store.prompts import shared_length
from agentlightning.types import (
    AttemptedRollout,
    Condition,
    Order,
    SampledChoice,
    Span,
    TokenCapture,
)
from tests.store.conftest import opened

pytestmark = pytest.mark.anyio

LATEST_FIRST = [Order(field="start_time", descending=True)]


def words(seed: int, size: int = 300) -> str:
    """A text as no other seed has it."""
    return f"«{seed}» " + " ".join(str(seed * number) for number in range(1, size // 3))[:size]


def call_of(
    rollout: AttemptedRollout,
    number: int,
    said: Sequence[str],
    ids: Sequence[int] | None = None,
    **more: Any,
) -> Span:
    """A call of the gateway that is asked these messages."""
    messages = json.dumps([{"role": "user", "content": text} for text in said], ensure_ascii=False)
    choice = SampledChoice(token_ids=(number, 2), logprobs=(-0.5, -0.25), finish_reason="stop")
    return Span(
        rollout_id=rollout.rollout_id,
        attempt_id=rollout.attempt.attempt_id,
        sequence_id=number + 1,
        trace_id="t",
        span_id=more.pop("span_id", f"{number:016x}"),
        name="chat m",
        start_time=float(number),
        end_time=number + 0.5,
        attributes={
            semconv.CALL_ENDPOINT: "chat/completions",
            semconv.GEN_AI_INPUT_MESSAGES: messages,
            semconv.GEN_AI_TOOL_DEFINITIONS: json.dumps([words(9)], ensure_ascii=False),
            semconv.CALL_INDEX: number,
            semconv.CALL_CONTINUES: number - 1,
            **more,
        },
        tokens=None
        if ids is None
        else TokenCapture(prompt_token_ids=tuple(ids), choices=(choice,)),
    )


def conversation(rollout: AttemptedRollout, turns: int, seed: int = 1) -> list[Span]:
    said = [words(seed * 1000 + turn) for turn in range(turns)]
    ids = range(seed * 10_000, seed * 10_000 + 100 * turns)
    return [
        call_of(rollout, turn, said[: turn + 1], ids[: 100 * (turn + 1)]) for turn in range(turns)
    ]


async def add_each(store: LightningStore, spans: Sequence[Span]) -> None:
    for span in spans:
        await store.add_many_spans([span])


async def read_in_every_way(store: LightningStore, rollout_id: str, spans: Sequence[Span]) -> None:
    """AssertionError unless these are the spans of the rollout, in whatever order and number they
    are read."""
    assert await store.query_spans(rollout_id) == list(spans)
    where = Condition("rollout_id", "eq", rollout_id)
    for order in ([Order(field="start_time")], LATEST_FIRST):
        wanted = list(spans) if order != LATEST_FIRST else list(spans)[::-1]
        assert list((await store.page_spans(where, order=order)).items) == wanted
        one_by_one, cursor = list[Span](), None
        while len(one_by_one) < len(wanted):
            page = await store.page_spans(where, order=order, limit=1, cursor=cursor)
            one_by_one, cursor = [*one_by_one, *page.items], page.next_cursor
        assert one_by_one == wanted


async def test_a_conversation_comes_back_as_it_was(store):
    rollout = await store.start_rollout("x")
    spans = conversation(rollout, 6)
    await add_each(store, spans)
    await read_in_every_way(store, rollout.rollout_id, spans)


histories = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(
    calls=st.lists(
        st.tuples(
            st.integers(0, 1),
            histories,
            st.sampled_from([None, 0, 1, 2]),
            st.booleans(),
            st.booleans(),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_whatever_is_asked_comes_back_as_it_was(calls):
    """Calls of two attempts, written alone or together: histories that go on, branch, are cut or
    edited in the middle; ids that follow the text or not; calls that are no gateway's."""

    async def check() -> None:
        async with opened(":memory:") as store:
            rollouts = [await store.start_rollout(number) for number in range(2)]
            waiting: list[Span] = []
            written: dict[str, list[Span]] = {rollout.rollout_id: [] for rollout in rollouts}
            for number, (which, history, cut, captured, together) in enumerate(calls):
                said = [words(one) for one in history]
                if cut is not None:  # a place in the first message that differs
                    said[0] = said[0][: cut * 100] + "ü🙂" + said[0][cut * 100 :]
                ids = (
                    [one * 10 + place for one in history for place in range(90)]
                    if captured
                    else None
                )
                span = call_of(rollouts[which], number, said, ids)
                waiting.append(span)
                written[span.rollout_id].append(span)
                if not together:
                    await store.add_many_spans(waiting)
                    waiting = []
            await store.add_many_spans(waiting)
            for rollout_id, spans in written.items():
                await read_in_every_way(store, rollout_id, spans)
            assert await store.check_store() == []

    asyncio.run(check())


@given(
    st.text("ab", max_size=40),
    st.integers(0, 10),
    st.text("abü", max_size=40),
    st.text("abü", max_size=40),
)
def test_the_shared_length_is_that_of_the_common_beginning(alike, times, one, other):
    one, other = alike * (1 << times) + one, alike * (1 << times) + other
    length = shared_length(one, other)
    assert one[:length] == other[:length]
    assert length == min(len(one), len(other)) or one[length] != other[length]
    assert shared_length(one.encode(), other.encode()) >= length


async def test_a_chain_is_not_longer_than_is_read_fast(monkeypatch):
    monkeypatch.setattr(prompts, "_LONGEST_CHAIN", 3)
    async with opened(":memory:") as store:
        rollout = await store.start_rollout("x")
        spans = conversation(rollout, 12)
        await add_each(store, spans)
        await read_in_every_way(store, rollout.rollout_id, spans)
        connection = store._opened.writing
        bases = [
            base for (base,) in connection.execute("SELECT base FROM spans ORDER BY sequence_id")
        ]
        assert [place for place, base in enumerate(bases) if base is None] == [0, 4, 8]


async def test_a_page_has_no_more_bytes_for_being_stored_in_less(tmp_path):
    async with opened(tmp_path / "store.db") as store:
        rollout = await store.start_rollout("x")
        spans = [call_of(rollout, number, ["x" * 3_000_000] * (1 + number)) for number in range(6)]
        await add_each(store, spans)
        page = await store.page_spans(order=[Order(field="start_time")])
        assert 0 < len(page.items) < 6
        assert page.next_cursor is not None
        rest = await store.page_spans(order=[Order(field="start_time")], cursor=page.next_cursor)
        assert [*page.items, *rest.items][:5] == spans[:5]


async def test_what_calls_repeat_is_in_the_file_once(tmp_path):
    path = tmp_path / "store.db"
    async with opened(path) as store:
        rollout = await store.start_rollout("x")
        spans = conversation(rollout, 20)
        await add_each(store, spans[:10])
        await store.add_many_spans(spans[10:])
    data = path.read_bytes()
    for turn in range(20):
        assert data.count(f"«{1000 + turn}»".encode()) == 1
    assert data.count(words(9).encode()) == 1


async def test_conversations_by_turns_and_an_imported_one_are_stored_once_too(tmp_path):
    async with opened(tmp_path / "one.db") as store:
        rollout = await store.start_rollout("x")
        one, other = conversation(rollout, 6, 1), conversation(rollout, 6, 2)
        for place, span in enumerate(other):
            link = {semconv.CALL_INDEX: 10 + place, semconv.CALL_CONTINUES: 9 + place}
            about = {"span_id": f"b{place}", "sequence_id": 10 + place}
            other[place] = msgspec.structs.replace(
                span, **about, attributes={**span.attributes, **link}
            )
        await add_each(store, [span for both in zip(one, other, strict=True) for span in both])
        await store.update_attempt(
            rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded"
        )
        ended = await store.get_rollout_by_id(rollout.rollout_id)
        attempts, spans = (
            await store.query_attempts(rollout.rollout_id),
            await store.query_spans(rollout.rollout_id),
        )
    async with opened(tmp_path / "two.db") as store:
        assert await store.import_rollout(ended, attempts, spans)
        assert await store.query_spans(rollout.rollout_id) == spans
    for name in ("one.db", "two.db"):
        data = (tmp_path / name).read_bytes()
        assert [data.count(f"«{seed * 1000}»".encode()) for seed in (1, 2)] == [1, 1]


async def test_nothing_refers_to_what_was_removed(tmp_path):
    path = tmp_path / "store.db"
    async with opened(path) as store:
        kept, gone = [await store.start_rollout(number) for number in range(2)]
        spans = conversation(kept, 5, 1)
        await add_each(store, spans[:3])
        await add_each(store, conversation(gone, 5, 2))
        ended = await store.update_attempt(
            gone.rollout_id, gone.attempt.attempt_id, status="succeeded"
        )
        stored = (
            await store.get_rollout_by_id(gone.rollout_id),
            [ended],
            await store.query_spans(gone.rollout_id),
        )
        await store.delete_rollouts(Condition("rollout_id", "eq", gone.rollout_id), scrub=True)
        assert "«2000»".encode() not in path.read_bytes()
        await add_each(store, spans[3:])
        await read_in_every_way(store, kept.rollout_id, spans)
        # Brought in again, the attempt is another one: what was remembered of it is no base.
        await store.import_rollout(*stored)
        late = call_of(gone, 5, [words(2000 + turn) for turn in range(6)], range(20_000, 20_600))
        await store.add_many_spans([late])
        await read_in_every_way(store, gone.rollout_id, [*stored[2], late])
        assert await store.check_store() == []


async def test_a_call_that_is_refused_is_no_base(store):
    rollout = await store.start_rollout("x")
    first, second, third = conversation(rollout, 3)
    forged = msgspec.structs.replace(
        first, start_time=9.0, attributes={}, tokens=None, sequence_id=50
    )
    await store.add_many_spans([forged])
    with pytest.raises(ConflictError):
        await store.add_many_spans([first])
    with pytest.raises(ConflictError):
        await store.add_many_spans([second, first, third])
    await add_each(store, [second, third])
    await read_in_every_way(store, rollout.rollout_id, [second, third, forged])


async def test_a_call_whose_id_is_taken_is_no_base_for_those_it_came_with(store):
    """At the same time as the one that has its id, it is taken for a repetition of that."""
    rollout = await store.start_rollout("x")
    first, second, third = conversation(rollout, 3)
    other = msgspec.structs.replace(
        first, attributes={**first.attributes, semconv.GEN_AI_INPUT_MESSAGES: words(7)}
    )
    await store.add_many_spans([other])
    await store.add_many_spans([first, second, third])
    await read_in_every_way(store, rollout.rollout_id, [other, second, third])


async def test_no_secret_is_written_on_any_way(tmp_path):
    path, secret = tmp_path / "store.db", "sk-proj-Zx81kfJw02mQpL7vB4nT9cYd"
    async with opened(path) as store:
        rollout = await store.start_rollout("x")
        taken = call_of(rollout, 0, [words(1), secret])
        spans = [
            call_of(rollout, number, [words(1), secret, *map(words, range(number))])
            for number in range(1, 5)
        ]
        await store.add_many_spans([msgspec.structs.replace(taken, attributes={})])
        await store.add_many_spans([taken, *spans[:2]])  # whose base turns out to be none
        await add_each(store, spans[2:])
        read = await store.query_spans(rollout.rollout_id)
    assert secret not in str(read)
    assert all(
        "[redacted]" in str(span.attributes[semconv.GEN_AI_INPUT_MESSAGES]) for span in read[1:]
    )
    for file in tmp_path.iterdir():
        assert secret.encode() not in file.read_bytes()


async def test_a_base_that_is_missing_is_found(tmp_path):
    path = tmp_path / "store.db"
    async with opened(path) as store:
        rollout = await store.start_rollout("x")
        await add_each(store, conversation(rollout, 3))
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM spans WHERE sequence_id = 1")
    async with opened(path) as store:
        assert await store.check_store() == [
            "1 calls that go on from one that is not stored: 0000000000000001"
        ]
