"""Chats in, exact ids and text out, from a real engine."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from msgspec.structs import replace

from agentlightning.engine.service import EngineService
from agentlightning.errors import BackendError
from agentlightning.gateway.answer import Answer
from agentlightning.gateway.backend import Delta, Finished, ModelCall, Sampling, Started
from agentlightning.gateway.chat.template import ChatTemplate
from agentlightning.gateway.chat.token_backend import TokenBackend
from tests.gateway.talker import PLAIN, SEARCH_TOOL, make_talker, user
from tests.gateway.world import talking

pytestmark = pytest.mark.anyio

FREE = Sampling(temperature=2.0, max_tokens=12, seed=1)


@pytest.fixture
async def engine() -> AsyncIterator[tuple[TokenBackend, EngineService]]:
    async with talking() as pair:
        yield pair


def chat_call(text: str = "hello", **fields: Any) -> ModelCall:
    defaults = {"request_id": "r", "model": "m", "messages": user(text), "sampling": Sampling(temperature=0.0)}
    return ModelCall(**{**defaults, **fields})


async def answered(backend: TokenBackend, call: ModelCall) -> Answer:
    answer = Answer(call.sampling.n)
    async for event in backend.answer(call):
        answer.add(event)
    return answer


@pytest.mark.parametrize("text", list(PLAIN))
async def test_streamed_and_whole_answers_are_the_same(engine: tuple[TokenBackend, EngineService], text: str) -> None:
    whole, streamed = [await answered(engine[0], chat_call(text, stream=stream)) for stream in (False, True)]
    assert whole.choices[0].message() == streamed.choices[0].message() == {"role": "assistant", "content": PLAIN[text]}
    assert whole.choices[0].token_ids == streamed.choices[0].token_ids
    assert whole.prompt_token_ids == streamed.prompt_token_ids


async def test_events_come_in_order(engine: tuple[TokenBackend, EngineService]) -> None:
    events = [event async for event in engine[0].answer(chat_call(stream=True))]
    assert isinstance(events[0], Started)
    assert all(isinstance(event, Delta) for event in events[1:-1])
    assert events[-1] == Finished(0, "stop")


async def test_a_seed_fixes_an_answer_and_choices_differ(engine: tuple[TokenBackend, EngineService]) -> None:
    call = chat_call(sampling=replace(FREE, n=3))
    one, again = await answered(engine[0], call), await answered(engine[0], call)
    assert [choice.token_ids for choice in one.choices] == [choice.token_ids for choice in again.choices]
    assert len({tuple(choice.token_ids) for choice in one.choices}) == 3
    alone = await answered(engine[0], chat_call(sampling=FREE))
    assert alone.choices[0].token_ids == one.choices[0].token_ids


async def test_every_token_carries_the_version_that_sampled_it(
    engine: tuple[TokenBackend, EngineService],
) -> None:
    backend, service = engine
    await service.update_weights(1)
    answer = Answer(1)
    async with aclosing(backend.answer(chat_call("count", stream=True))) as events:
        async for event in events:
            answer.add(event)
            if len(answer.choices[0].token_ids) == 3 and service.version == 1:
                await service.update_weights(2)
    versions = answer.choices[0].versions
    assert [version for version, _ in versions] == sorted({version for version, _ in versions})
    assert sum(count for _, count in versions) == len(answer.choices[0].token_ids)
    assert answer.choices[0].message()["content"] == PLAIN["count"]


async def test_closing_the_iterator_frees_the_engine(engine: tuple[TokenBackend, EngineService]) -> None:
    backend, service = engine
    for n in (1, 4):
        sampling = replace(FREE, n=n, max_tokens=400)
        async with aclosing(backend.answer(chat_call(sampling=sampling, stream=True))) as events:
            async for event in events:
                if isinstance(event, Delta):
                    break
    before = service.engine.statistics.generated_tokens
    assert (await answered(backend, chat_call())).choices[0].message()["content"] == PLAIN["hello"]
    assert service.engine.statistics.generated_tokens - before < 100


async def test_a_request_that_does_not_fit_is_refused_before_anything_is_said(
    engine: tuple[TokenBackend, EngineService],
) -> None:
    for n in (1, 2):
        call = chat_call("x y " * 600, sampling=Sampling(n=n), stream=True)
        events = engine[0].answer(call)
        with pytest.raises(BackendError) as caught:
            await anext(events)
        assert caught.value.code == "context_length_exceeded"


async def test_a_choice_that_fails_fails_the_call(engine: tuple[TokenBackend, EngineService]) -> None:
    with pytest.raises(BackendError, match="top_p"):
        await answered(engine[0], chat_call(sampling=Sampling(top_p=0.0, n=2)))


@pytest.mark.parametrize(
    "extra",
    [
        {"user": "me", "metadata": {"a": "b"}, "parallel_tool_calls": True},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "response_format": {"type": "text"}},
    ],
)
async def test_fields_that_change_nothing_are_accepted(
    engine: tuple[TokenBackend, EngineService], extra: dict[str, Any]
) -> None:
    answer = await answered(engine[0], chat_call(extra=extra))
    assert answer.choices[0].message()["content"] == PLAIN["hello"]


async def test_ids_of_tool_calls_are_derived_from_the_request(engine: tuple[TokenBackend, EngineService]) -> None:
    async def ids(request_id: str) -> list[str]:
        call = chat_call("both", tools=[SEARCH_TOOL], request_id=request_id)
        return [tool_call["id"] for tool_call in (await answered(engine[0], call)).choices[0].tool_calls]

    first, again, other = await ids("one"), await ids("one"), await ids("two")
    assert first == again
    assert len({*first, *other}) == 4
    assert all(re.fullmatch("call_[A-Za-z0-9]{20}", name) for name in first)


async def test_bytes_of_tokens_are_given_where_logprobs_are_asked_for(
    engine: tuple[TokenBackend, EngineService],
) -> None:
    choice = (await answered(engine[0], chat_call("signs", logprobs=True))).choices[0]
    assert bytes(byte for entry in choice.logprob_entries for byte in entry["bytes"]).decode() == (
        PLAIN["signs"] + make_talker().tokenizer.eos_token
    )
    assert [entry["logprob"] for entry in choice.logprob_entries] == choice.logprobs
    assert not (await answered(engine[0], chat_call("signs"))).choices[0].logprob_entries


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_is_continued_as_text_or_as_token_ids(
    engine: tuple[TokenBackend, EngineService], stream: bool
) -> None:
    chat = ChatTemplate.from_pretrained(make_talker().tokenizer)
    text = chat.render(user("hello"))
    for prompt in (text, chat.encode(text)):
        answer = await answered(engine[0], chat_call(messages=[], prompt=prompt, stream=stream))
        assert answer.prompt_token_ids == chat.encode(text)
        assert answer.choices[0].string("content") == PLAIN["hello"]


async def test_tokens_are_counted_as_they_would_be_read(engine: tuple[TokenBackend, EngineService]) -> None:
    call = chat_call("weather", tools=[SEARCH_TOOL])
    assert await engine[0].count_tokens(call) == len((await answered(engine[0], call)).prompt_token_ids)


async def test_others_go_on_while_a_long_prompt_is_tokenised(engine: tuple[TokenBackend, EngineService]) -> None:
    counting = asyncio.ensure_future(engine[0].count_tokens(chat_call("hello " * 100_000)))
    turns = 0
    while not counting.done():
        turns += 1
        await asyncio.sleep(0.001)
    assert turns > 5
    assert await counting > 100_000
