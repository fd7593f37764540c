"""Chats in, exact ids and text out, from a real engine."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from msgspec.structs import replace

from agentlightning.engine.service import EngineService
from agentlightning.errors import BackendError
from agentlightning.gateway.answer import Answer
from agentlightning.gateway.backend import Delta, Sampling
from agentlightning.gateway.chat.token_backend import TokenBackend
from tests.gateway.backends.engines import answered, chat_call
from tests.gateway.talker import PLAIN, SEARCH_TOOL
from tests.gateway.world import talking

pytestmark = pytest.mark.anyio

FREE = Sampling(temperature=2.0, max_tokens=12, seed=1)


Setting = tuple[TokenBackend, EngineService]


@pytest.fixture
async def engine() -> AsyncIterator[Setting]:
    async with talking() as pair:
        yield pair


async def test_every_token_carries_the_version_that_sampled_it(engine: Setting) -> None:
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


async def test_closing_the_iterator_frees_the_engine(engine: Setting) -> None:
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


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(n=2), Sampling(top_p=0.0, n=2)])
async def test_a_call_or_a_choice_that_fails_is_refused_before_anything_is_sent(
    engine: Setting, sampling: Sampling
) -> None:
    text = "hello" if sampling.top_p == 0.0 else "x y " * 600
    with pytest.raises(BackendError, match=r"top_p|max_sequence_length"):
        await anext(engine[0].answer(chat_call(text, sampling=sampling, stream=True)))


async def test_ids_of_tool_calls_are_derived_from_the_request(engine: Setting) -> None:
    async def ids(request_id: str) -> list[str]:
        call = chat_call("both", tools=[SEARCH_TOOL], request_id=request_id)
        return [
            tool_call["id"] for tool_call in (await answered(engine[0], call)).choices[0].tool_calls
        ]

    first, again, other = await ids("one"), await ids("one"), await ids("two")
    assert first == again
    assert len({*first, *other}) == 4
    assert all(re.fullmatch("call_[A-Za-z0-9]{20}", name) for name in first)


async def test_others_go_on_while_a_long_prompt_is_tokenised(engine: Setting) -> None:
    counting = asyncio.ensure_future(engine[0].count_tokens(chat_call("hello " * 100_000)))
    turns = 0
    while not counting.done():
        turns += 1
        await asyncio.sleep(0.001)
    assert turns > 5
    assert await counting > 100_000
