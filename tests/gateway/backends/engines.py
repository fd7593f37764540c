"""What tests of servers that take token ids share: calls, their answers, and the tokens of a server
whose engine is the talker's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from agentlightning.engine.service import EngineService
from agentlightning.gateway.answer import Answer
from agentlightning.gateway.backend import ModelCall
from agentlightning.gateway.chat.token_backend import TokenBackend
from agentlightning.gateway.generation import GenerationRequest, SampledToken
from tests.gateway.talker import PLAIN, SEARCH_TOOL, user
from tests.gateway.world import GREEDY


def chat_call(text: str = "hello", **fields: Any) -> ModelCall:
    return ModelCall(
        **{"request_id": "r", "model": "m", "messages": user(text), "sampling": GREEDY, **fields}
    )


async def answered(backend: Any, call: ModelCall) -> Answer:
    answer = Answer(call.sampling.n)
    async for event in backend.answer(call):
        answer.add(event)
    return answer


async def check_parity(
    backend: TokenBackend, embedded: TokenBackend, text: str, stream: bool
) -> None:
    """A server's answer is that of the same engine embedded."""
    call = chat_call(text, tools=[] if text in PLAIN else [SEARCH_TOOL], stream=stream)
    ours, expected = await answered(backend, call), await answered(embedded, call)
    assert ours.prompt_token_ids == expected.prompt_token_ids
    mine, theirs = ours.choices[0], expected.choices[0]
    assert mine.message() == theirs.message()
    assert (mine.token_ids, mine.finish_reason, mine.untrainable) == (
        theirs.token_ids,
        theirs.finish_reason,
        None,
    )
    assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


def named(version: str, start: int, end: int) -> dict[str, Any]:
    """What a server says of the weights that sampled the tokens from `start` to `end`."""
    return {"version": version, "start": start, "end": end}


async def sampled(
    service: EngineService,
    ids: list[int],
    sampling: dict[str, Any],
    max_tokens: int | None,
    seed: int | None,
) -> AsyncIterator[SampledToken]:
    request = GenerationRequest(
        ids,
        max_tokens=max_tokens,
        temperature=sampling["temperature"],
        top_p=sampling["top_p"],
        top_k=max(0, sampling["top_k"]),
        seed=seed,
        stop_token_ids=frozenset(sampling["stop_token_ids"]),
    )
    async with aclosing(service.generate(request)) as pieces:
        async for tokens in pieces:
            for token in tokens:
                yield token
