"""Completions as OpenAI's own client sees them: from a real engine, and from a server that answers as vLLM does."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Completion
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agentlightning import semconv
from agentlightning.gateway.app import Gateway
from agentlightning.gateway.backends.http import HttpBackend
from agentlightning.gateway.chat.template import ChatTemplate
from agentlightning.gateway.models import ModelEntry, ModelTable
from agentlightning.store.sql import SqlStore
from tests.gateway.talker import PLAIN, make_talker, user
from tests.gateway.world import GREEDY, World, serving, world

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
async def test_a_prompt_is_continued_in_every_form(gateway_world: World, form: str, stream: bool) -> None:
    text = prompt("hello")
    ids = list(CHAT.encode(text))
    given: Any = {"text": text, "ids": ids, "list of a text": [text], "list of ids": [ids]}[form]
    client = gateway_world.client(await gateway_world.attempt())
    answer = await parts(await client.completions.create(model="policy", prompt=given, stream=stream), stream)
    assert text_of(answer) == PLAIN["hello"]
    assert [choice.finish_reason for part in answer for choice in part.choices if choice.finish_reason] == ["stop"]
    assert {(part.object, part.model) for part in answer} == {("text_completion", "policy")}
    assert len({part.id for part in answer}) == 1


async def test_sixteen_tokens_are_sampled_unless_the_request_says_otherwise(gateway_world: World) -> None:
    client = gateway_world.client(await gateway_world.attempt())
    for asked, length in (({}, 16), ({"max_tokens": 3}, 3)):
        answer = await client.completions.create(model="policy", prompt=prompt("count"), **asked)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None and answer.usage.completion_tokens == length


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_counts_prompt_and_answer(gateway_world: World, stream: bool) -> None:
    options: Any = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    client = gateway_world.client(await gateway_world.attempt())
    answer = await client.completions.create(model="policy", prompt=prompt("hello"), **options)
    usage = (await parts(answer, stream))[-1].usage
    assert usage is not None
    assert usage.prompt_tokens == len(CHAT.encode(prompt("hello")))
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_are_those_of_the_span(gateway_world: World, stream: bool) -> None:
    attempted = await gateway_world.attempt()
    client = gateway_world.client(attempted)
    answer = await parts(
        await client.completions.create(model="policy", prompt=prompt("hello"), stream=stream, extra_body=IDS), stream
    )
    (span,) = await gateway_world.spans(attempted)
    assert span.tokens is not None and semconv.CALL_FLAG not in span.attributes
    said = [choice.model_dump() for part in answer for choice in part.choices]
    assert said[0]["prompt_token_ids"] == list(span.tokens.prompt_token_ids) == list(CHAT.encode(prompt("hello")))
    ids = [token_id for choice in said for token_id in choice.get("token_ids") or []]
    assert ids == list(span.tokens.choices[0].token_ids)
    assert span.attributes[semconv.GEN_AI_OPERATION] == "text_completion"
    assert span.attributes[semconv.CALL_PROMPT] == prompt("hello")
    assert semconv.GEN_AI_INPUT_MESSAGES not in span.attributes


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_come_in_columns(gateway_world: World, stream: bool) -> None:
    attempted = await gateway_world.attempt()
    client = gateway_world.client(attempted)
    answer = await parts(
        await client.completions.create(
            model="policy", prompt=prompt("signs"), logprobs=0, stream=stream, max_tokens=64
        ),
        stream,
    )
    given = [choice.logprobs for part in answer for choice in part.choices if choice.logprobs is not None]
    offsets = [offset for one in given for offset in one.text_offset or []]
    tokens = [token for one in given for token in one.tokens or []]
    (span,) = await gateway_world.spans(attempted)
    assert span.tokens is not None
    assert [value for one in given for value in one.token_logprobs or []] == list(span.tokens.choices[0].logprobs)
    assert {one.top_logprobs is None for one in given} == {True}
    assert len(offsets) == len(tokens) == len(span.tokens.choices[0].token_ids)
    whole = [(at, token) for at, token in zip(offsets, tokens, strict=True) if "\ufffd" not in token][:-1]
    assert len(whole) > 3 and all(PLAIN["signs"][at:].startswith(token) for at, token in whole)
    assert offsets[-1] == len(PLAIN["signs"])


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_stop_strings_and_seeds(gateway_world: World, stream: bool) -> None:
    client = gateway_world.client(await gateway_world.attempt(mode="test"))

    async def texts(**options: Any) -> list[str]:
        answer = await client.completions.create(
            **{"model": "policy", "prompt": prompt("count"), "n": 3, "seed": 4, "stream": stream, **options}
        )
        choices = [choice for part in await parts(answer, stream) for choice in part.choices]
        return ["".join(choice.text for choice in choices if choice.index == index) for index in range(3)]

    assert await texts(temperature=0, stop=["4"]) == ["1 2 3 "] * 3
    assert await texts(temperature=2) == await texts(temperature=2) != await texts(temperature=2, seed=5)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt": ["one", "two"]}, "prompt holds 2 prompts"),
        ({"prompt": [[1], [2]]}, "prompt holds 2 prompts"),
        ({"prompt": [1, "two"]}, "prompt mixes"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [100_000]}, "prompt holds token id 100000"),
        ({"prompt": {"text": "x"}}, "prompt cannot be used"),
        ({"echo": True}, "echo is not supported"),
        ({"best_of": 3}, "best_of is not supported"),
        ({"suffix": "the end"}, "suffix is not supported"),
        ({"logprobs": 2}, "top_logprobs is not supported"),
        ({"logprobs": 21}, "<= 20"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_cannot_be_had_is_refused_by_name(
    gateway_world: World, fields: dict[str, Any], says: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match=says):
        await gateway_world.client().completions.create(
            **{"model": "policy", "prompt": "x", "stream": stream, **fields}
        )


async def test_a_request_without_a_prompt_is_refused(gateway_world: World) -> None:
    with pytest.raises(openai.BadRequestError, match="'prompt'") as caught:
        await gateway_world.client().post("/completions", body={"model": "policy"}, cast_to=object)
    assert caught.value.param == "prompt"


async def test_what_changes_nothing_is_accepted(gateway_world: World) -> None:
    client = gateway_world.client(await gateway_world.attempt())
    answer = await client.completions.create(
        model="policy", prompt=prompt("hello"), echo=False, best_of=2, n=2, suffix="", user="me", presence_penalty=0
    )
    assert [choice.text for choice in answer.choices] == [PLAIN["hello"]] * 2


async def test_a_prompt_that_does_not_fit_is_refused_before_a_stream_begins(gateway_world: World) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await gateway_world.client().completions.create(model="policy", prompt="x y " * 600, stream=True)
    assert caught.value.code == "context_length_exceeded"


# --- servers ------------------------------------------------------------------------------------------------------

# What vLLM samples: (text, id, logprob), the last being its end-of-sequence token.
SAMPLED = [("Hi", 4, -0.5), (" there", 5, -0.25), ("", 2, -0.125)]


class Vllm:
    """`/v1/completions` as vLLM answers it; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    async def answer(self, request: Request) -> Response:
        asked = await request.json()
        self.asked.append(asked)
        if asked["stream"]:
            return StreamingResponse(self._stream(asked), media_type="text/event-stream")
        choices = [self._choice(asked, index, 0, len(SAMPLED)) for index in range(asked.get("n", 1))]
        return JSONResponse(self._body(choices, usage=self._usage(asked)))

    async def _stream(self, asked: dict[str, Any]) -> AsyncIterator[str]:
        for start, end in ((0, 1), (1, 3)):
            for index in range(asked.get("n", 1)):
                yield f"data: {json.dumps(self._body([self._choice(asked, index, start, end)]))}\n\n"
        yield f"data: {json.dumps(self._body([], usage=self._usage(asked)))}\n\n"
        yield "data: [DONE]\n\n"

    def _choice(self, asked: dict[str, Any], index: int, start: int, end: int) -> dict[str, Any]:
        part = SAMPLED[start:end]
        done = end == len(SAMPLED)
        choice = {
            "index": index,
            "text": "".join(text for text, _, _ in part),
            "logprobs": {
                "tokens": [text for text, _, _ in part],
                "token_logprobs": [logprob for _, _, logprob in part],
                "top_logprobs": [{text: logprob, "other": -3.0} for text, _, logprob in part],
                "text_offset": [0] * len(part),
            },
            "finish_reason": "stop" if done else None,
            "stop_reason": None,
            "token_ids": [token_id for _, token_id, _ in part],
        }
        return choice | ({"prompt_token_ids": asked["prompt"]} if start == 0 else {})

    def _body(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": choices, **more}

    def _usage(self, asked: dict[str, Any]) -> dict[str, int]:
        prompt_tokens, completion_tokens = len(asked["prompt"]), len(SAMPLED) * asked.get("n", 1)
        total = prompt_tokens + completion_tokens
        return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


@asynccontextmanager
async def before(url: str, directory: Path) -> AsyncIterator[World]:
    """A gateway whose model is the server at `url`."""
    store = await SqlStore.open(directory / "store.sqlite", synchronous="NORMAL")
    gateway = Gateway(ModelTable([ModelEntry("policy", HttpBackend(f"{url}/v1"), train=GREEDY)]), store)
    async with serving(Starlette(routes=gateway.routes())) as front:
        built = World(front, store, gateway, None)  # type: ignore[arg-type]
        yield built
        for client in built.clients:
            await client.close()
    await gateway.close()
    await store.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_server_of_the_protocol_continues_token_ids(tmp_path: Path, stream: bool) -> None:
    vllm = Vllm()
    app = Starlette(routes=[Route("/v1/completions", vllm.answer, methods=["POST"])])
    async with serving(app) as url, before(url, tmp_path) as front:
        attempted = await front.attempt()
        answer = await parts(
            await front.client(attempted).completions.create(
                model="policy", prompt=[7, 8, 9], logprobs=2, n=2, stream=stream, extra_body={"suffix": ""}
            ),
            stream,
        )
        (span,) = await front.spans(attempted)
    (asked,) = vllm.asked
    assert {name: asked[name] for name in ("prompt", "logprobs", "n", "max_tokens", "return_token_ids")} == {
        "prompt": [7, 8, 9],
        "logprobs": 2,
        "n": 2,
        "max_tokens": 16,
        "return_token_ids": True,
    }
    assert "messages" not in asked and "top_logprobs" not in asked
    for index in (0, 1):
        choices = [choice for part in answer for choice in part.choices if choice.index == index]
        assert "".join(choice.text for choice in choices) == "Hi there"
        columns = [choice.logprobs for choice in choices if choice.logprobs is not None]
        assert [value for one in columns for value in one.token_logprobs or []] == [-0.5, -0.25, -0.125]
        assert next(top for one in columns for top in one.top_logprobs or []) == {"Hi": -0.5, "other": -3.0}
        assert [offset for one in columns for offset in one.text_offset or []] == [0, 2, 8]
        ids = [token_id for choice in choices for token_id in choice.model_dump().get("token_ids") or []]
        assert ids == [token_id for _, token_id, _ in SAMPLED]
    assert semconv.CALL_FLAG not in span.attributes
    assert span.tokens is not None and span.tokens.prompt_token_ids == (7, 8, 9)
    assert [choice.token_ids for choice in span.tokens.choices] == [(4, 5, 2), (4, 5, 2)]


async def test_sampling_that_the_run_decides_leaves_nothing_to_the_server(tmp_path: Path) -> None:
    vllm = Vllm()
    app = Starlette(routes=[Route("/v1/completions", vllm.answer, methods=["POST"])])
    async with serving(app) as url, before(url, tmp_path) as front:
        for mode, fields in (("train", {"min_p": 0.1}), ("test", {"min_p": 0.1})):
            client = front.client(await front.attempt(mode=mode))
            await client.completions.create(model="policy", prompt=[7], extra_body=fields)
    names = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
    trained, tested = [{name: asked[name] for name in names & asked.keys()} for asked in vllm.asked]
    assert trained == {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert tested["min_p"] == 0.1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_gateway_before_a_gateway_records_the_engines_ids_and_versions(tmp_path: Path, stream: bool) -> None:
    (tmp_path / "back").mkdir()
    async with world(tmp_path / "back", store=False) as back, before(back.url, tmp_path) as front:
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
