"""What is trained is what arrived: answers nobody received, calls that are repeated, and the queue
behind others."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import openai
import pytest

from agentlightning import semconv
from agentlightning.data.call_filter import NOT_RECEIVED
from agentlightning.data.transitions import TracedRollout, trace_rollout
from agentlightning.errors import InvalidError, UnavailableError
from agentlightning.gateway.recorder import Recorder
from agentlightning.store.sql import SqlStore
from agentlightning.types import UNATTRIBUTED, AttemptedRollout, Span
from tests.gateway.talker import user
from tests.gateway.upstream import GOOD, Upstream, gateway_before, until
from tests.gateway.world import World

pytestmark = pytest.mark.anyio


class ToldStore(SqlStore):
    """Writes spans when it may. `away` writes do not reach it, and of one it is `silent`."""

    reached: asyncio.Event
    may_write: asyncio.Event
    away = writes = 0
    silent = False

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        self.writes += 1
        self.reached.set()
        await self.may_write.wait()
        if self.away:
            self.away -= 1
            raise UnavailableError("the store's server is gone")
        if any(span.name == "poison" for span in spans):
            raise InvalidError("poison")
        stored = await super().add_many_spans(spans)
        if self.silent:
            self.silent = False
            raise InvalidError("nobody knows what became of them")
        return stored


@asynccontextmanager
async def told_world(
    directory: Path, *, slow: bool = True, **options: Any
) -> AsyncIterator[tuple[World, ToldStore]]:
    store = await ToldStore.open(directory / "store.sqlite", synchronous="NORMAL", **options)
    assert isinstance(store, ToldStore)
    store.reached, store.may_write = asyncio.Event(), asyncio.Event()
    if not slow:
        store.may_write.set()
    async with gateway_before(Upstream(GOOD), store) as built:
        yield built, store
        store.may_write.set()
    await store.close()


async def recorded(built: World) -> Span:
    """The span of a call that no attempt made."""
    await ask(built)
    await built.gateway.close()
    (span,) = await built.store.query_spans(UNATTRIBUTED)
    return span


def copies_of(span: Span, count: int) -> list[Span]:
    return [msgspec.structs.replace(span, span_id=f"{number:016x}") for number in range(count)]


@pytest.fixture
async def usual(tmp_path: Path) -> AsyncIterator[World]:
    async with told_world(tmp_path, slow=False) as (built, _):
        yield built


async def ask(
    built: World, attempted: AttemptedRollout | None = None, text: str = "hello", **options: Any
) -> str:
    request = {"model": "policy", "messages": user(text), **options}
    return (
        (await built.client(attempted).chat.completions.create(**request))
        .choices[0]
        .message.content
    )


async def traced(built: World, attempted: AttemptedRollout) -> TracedRollout:
    rollout = await built.store.get_rollout_by_id(attempted.rollout_id)
    assert rollout is not None
    return trace_rollout(rollout, await built.spans(attempted))


def trained(learned: TracedRollout) -> list[int]:
    return [transition.call_index for transition in learned.transitions]


@asynccontextmanager
async def asking(
    built: World, attempted: AttemptedRollout, stream: bool
) -> AsyncIterator[tuple[Any, Any]]:
    """A call on a connection of its own, which is left without having read the answer."""
    url = urlsplit(f"{built.client(attempted).base_url}chat/completions")
    body = json.dumps({"model": "policy", "messages": user("hello"), "stream": stream}).encode()
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(
        f"POST {url.path} HTTP/1.1\r\n"
        "host: localhost\r\n"
        f"content-length: {len(body)}\r\n"
        "\r\n".encode()
        + body
    )
    try:
        yield reader, writer
    finally:
        writer.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_whose_client_left_while_it_was_stored_is_not_trained(
    tmp_path: Path, stream: bool
) -> None:
    async with told_world(tmp_path) as (built, store):
        attempted = await built.attempt()
        async with asking(built, attempted, stream) as (reader, writer):
            await asyncio.wait_for(store.reached.wait(), 60)
            writer.write_eof()
            # the server has closed the connection: it knows
            received = await asyncio.wait_for(reader.read(), 60)
        assert b'"finish_reason":"stop"' not in received
        store.may_write.set()
        await until(lambda: not built.gateway.running)
        call, note = await built.spans(attempted)
        learned = await traced(built, attempted)
        assert built.gateway.statistics.undelivered == 1
    assert call.status.status_code != "ERROR" and semconv.CALL_FLAG not in call.attributes
    assert (note.name, note.attributes[semconv.CALL_DISCARDS]) == (semconv.UNDELIVERED, [0])
    assert note.parent_id == call.parent_id and note.tokens is None
    assert learned.transitions == () and learned.excluded == Counter({NOT_RECEIVED: 1})


async def test_what_an_agent_says_of_an_answer_takes_it_out_of_no_training(usual: World) -> None:
    attempted = await usual.attempt()
    for count in range(3):  # as SDKs say that they did not hear an answer, which was sent
        await ask(usual, attempted, extra_headers={"x-stainless-retry-count": str(count)})
    with pytest.raises(openai.PermissionDeniedError, match="out of training"):
        await ask(usual, attempted, extra_headers={semconv.FROZEN_HEADER: "true"})
    assert trained(await traced(usual, attempted)) == [0, 1, 2]


async def test_an_answer_that_the_gateway_did_not_send_is_not_trained(tmp_path: Path) -> None:
    async with told_world(tmp_path, slow=False) as (built, store):
        attempted = await built.attempt()
        store.silent = True
        with pytest.raises(openai.UnprocessableEntityError):
            await ask(built, attempted)
        await ask(built, attempted)
        assert trained(await traced(built, attempted)) == [1]


async def test_every_choice_is_kept_and_the_first_is_trained(gateway_world: World) -> None:
    attempted = await gateway_world.attempt()
    await ask(gateway_world, attempted, n=3)
    (span,) = await gateway_world.spans(attempted)
    learned = await traced(gateway_world, attempted)
    assert span.tokens is not None and len(span.tokens.choices) == 3
    assert all(
        choice.token_ids and len(choice.token_ids) == len(choice.logprobs)
        for choice in span.tokens.choices
    )
    assert [(one.call_index, one.choice) for one in learned.transitions] == [(0, 0)]
    assert learned.excluded == Counter({"unused choice": 2})


async def test_a_call_that_no_attempt_made_is_recorded_behind_its_answer(tmp_path: Path) -> None:
    async with told_world(tmp_path) as (built, store):
        assert await ask(built) == "Hi!"  # while the store writes nothing
        await asyncio.wait_for(store.reached.wait(), 60)
        store.may_write.set()
        await built.gateway.close()
        (span,) = await store.query_spans(UNATTRIBUTED)
    assert (span.rollout_id, span.attempt_id) == (UNATTRIBUTED, UNATTRIBUTED)
    assert semconv.CALL_INDEX not in span.attributes
    assert span.tokens is not None and list(span.tokens.choices[0].token_ids) == [4, 5, 6]


async def test_a_full_queue_sheds_and_counts(tmp_path: Path) -> None:
    async with told_world(tmp_path, slow=False) as (built, store):
        span = await recorded(built)
        store.may_write.clear()
        store.reached.clear()
        copies = copies_of(span, 5)
        queue = Recorder(store, commit=False, limit=2)
        await queue.record(copies[0])
        await asyncio.wait_for(store.reached.wait(), 60)
        for copy in copies[1:]:
            await queue.record(copy)  # nothing waits for the store
        assert queue.shed == 2
        store.may_write.set()
        await queue.close()
        kept = {one.span_id for one in await store.query_spans(UNATTRIBUTED)}
    assert kept == {span.span_id, *(copy.span_id for copy in copies[:3])}


@pytest.mark.slow
@pytest.mark.parametrize("away", [2, 1000])
async def test_a_store_that_cannot_be_reached_is_tried_again(tmp_path: Path, away: int) -> None:
    async with told_world(tmp_path, slow=False) as (built, store):
        first, second = copies_of(await recorded(built), 2)
        store.away = away
        queue, committing = (
            Recorder(store, commit=False),
            Recorder(store, commit=True, patience=1.0),
        )
        await queue.record(first)
        await asyncio.sleep(0.1)  # its first try
        with nullcontext() if away == 2 else pytest.raises(UnavailableError):
            await committing.record(second)
        await queue.close()
        assert queue.shed == (0 if away == 2 else 1)
        assert len(await store.query_spans(UNATTRIBUTED)) == (3 if away == 2 else 1)


@pytest.mark.parametrize("poison", [False, True])
async def test_calls_that_end_while_another_is_written_share_the_next_write(
    tmp_path: Path, poison: bool
) -> None:
    async with told_world(tmp_path, slow=False) as (built, store):
        copies = copies_of(await recorded(built), 20)
        if poison:
            copies[7] = msgspec.structs.replace(copies[7], name="poison")
        store.writes = 0
        recorder = Recorder(store, commit=True)
        await recorder.record(copies[0])
        assert store.writes == 1, "one alone waits for no others"
        first = asyncio.create_task(recorder.record(copies[1]))
        await asyncio.sleep(0)  # its write has begun with the others' coming
        outcomes = await asyncio.gather(
            *(recorder.record(copy) for copy in copies[2:]), return_exceptions=True
        )
        await first
        assert [isinstance(one, InvalidError) for one in outcomes] == [
            poison and n == 5 for n in range(18)
        ]
        assert store.writes == 2 + 1 + (18 if poison else 0), (
            "all are written at once, or each by itself"
        )
        assert len(await store.query_spans(UNATTRIBUTED)) == 21 - poison
