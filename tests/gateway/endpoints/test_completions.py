"""Completions as OpenAI's own client sees them: from a real engine, and from a server that answers
as vLLM does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Completion

from agentlightning import semconv
from agentlightning.gateway.backends.http import HttpBackend
from agentlightning.gateway.chat.template import ChatTemplate
from agentlightning.gateway.models import ModelEntry
from tests.gateway.talker import PLAIN, make_talker, user
from tests.gateway.world import GREEDY, World, fronting, world

pytestmark = pytest.mark.anyio

CHAT = ChatTemplate.from_pretrained(make_talker().tokenizer)
IDS = {"return_token_ids": True}


def prompt(text: str) -> str:
    """What the talker has learned to continue with its line."""
    return CHAT.render(user(text))


async def parts(answer: Any, stream: bool) -> list[Completion]:
    """The answer, or all its chunks."""
    return [chunk async for chunk in answer] if stream else [answer]


def text_of(answer: list[Completion]) -> str:
    return "".join(choice.text for part in answer for choice in part.choices)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", ["text", "ids", "list of a text", "list of ids"])
async def test_a_prompt_is_continued_in_every_form(
    gateway_world: World, form: str, stream: bool
) -> None:
    text = prompt("hello")
    ids = list(CHAT.encode(text))
    given: Any = {"text": text, "ids": ids, "list of a text": [text], "list of ids": [ids]}[form]
    client = gateway_world.client(await gateway_world.attempt())
    answer = await parts(
        await client.completions.create(model="policy", prompt=given, stream=stream), stream
    )
    assert text_of(answer) == PLAIN["hello"]
    assert [
        choice.finish_reason for part in answer for choice in part.choices if choice.finish_reason
    ] == ["stop"]
    assert {(part.object, part.model) for part in answer} == {("text_completion", "policy")}
    assert len({part.id for part in answer}) == 1
    usage = answer[-1].usage
    assert stream or (usage is not None and usage.prompt_tokens == len(ids))


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_and_logprobs_are_those_of_the_span(
    gateway_world: World, stream: bool
) -> None:
    attempted = await gateway_world.attempt()
    client = gateway_world.client(attempted)
    # which is accepted
    nothing = {"echo": False, "suffix": "", "user": "me", "presence_penalty": 0}
    request = {
        "model": "policy",
        "prompt": prompt("hello"),
        "logprobs": 0,
        "stream": stream,
        "max_tokens": 64,
    }
    answer = await parts(
        await client.completions.create(**request, **nothing, extra_body=IDS), stream
    )
    (span,) = await gateway_world.spans(attempted)
    assert span.tokens is not None and semconv.CALL_FLAG not in span.attributes
    (choice,) = span.tokens.choices
    said = [one.model_dump() for part in answer for one in part.choices]
    assert (
        said[0]["prompt_token_ids"]
        == list(span.tokens.prompt_token_ids)
        == list(CHAT.encode(prompt("hello")))
    )
    assert [token_id for one in said for token_id in one.get("token_ids") or []] == list(
        choice.token_ids
    )
    columns = [one["logprobs"] for one in said if one["logprobs"] is not None]
    assert [value for one in columns for value in one["token_logprobs"]] == list(choice.logprobs)
    assert sum(len(one["tokens"]) for one in columns) == len(choice.token_ids)
    assert {one["top_logprobs"] for one in columns} == {None}
    assert span.attributes[semconv.GEN_AI_OPERATION] == "text_completion"
    assert span.attributes[semconv.CALL_PROMPT] == prompt("hello")
    assert semconv.GEN_AI_INPUT_MESSAGES not in span.attributes


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt": ["one", "two"]}, "prompt holds 2 prompts"),
        ({"prompt": [1, "two"]}, "prompt mixes"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": [100_000]}, "prompt holds token id 100000"),
        ({"prompt": {"text": "x"}}, "prompt cannot be used"),
        ({"echo": True}, "echo is not supported"),
        ({"best_of": 3}, "best_of is not supported"),
        ({"suffix": "the end"}, "suffix is not supported"),
        ({"logprobs": 2}, "top_logprobs is not supported"),
        ({"logprobs": 21}, "<= 20"),
        ({"prompt": "x y " * 600}, "max_sequence_length"),
    ],
)
async def test_what_cannot_be_had_is_refused_by_name(
    gateway_world: World, fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=says):
        await gateway_world.client().completions.create(
            **{"model": "policy", "prompt": "x", "stream": True, **fields}
        )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_gateway_before_a_gateway_records_the_engines_ids_and_versions(
    tmp_path: Path, stream: bool
) -> None:
    async with (
        world(tmp_path) as back,
        fronting(ModelEntry("policy", HttpBackend(f"{back.url}/v1"), train=GREEDY)) as front,
    ):
        await back.service.update_weights(5)
        attempted = await front.attempt()
        answer = await front.client(attempted).completions.create(
            model="policy", prompt=prompt("hello"), logprobs=0, stream=stream
        )
        assert text_of(await parts(answer, stream)) == PLAIN["hello"]
        (span,) = await front.spans(attempted)
    assert semconv.CALL_FLAG not in span.attributes
    assert span.tokens is not None and span.tokens.prompt_token_ids == CHAT.encode(prompt("hello"))
    (choice,) = span.tokens.choices
    assert choice.versions == ((5, len(choice.token_ids)),)
