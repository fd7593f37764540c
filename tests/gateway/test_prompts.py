"""A candidate at the gateway: what models get, what agents get back, and what the spans say."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agentlightning import semconv
from agentlightning.data.agents import agent_of
from agentlightning.gateway.backends.http import HttpBackend, Kind
from agentlightning.gateway.models import ModelEntry
from agentlightning.prompts.replacing import Replacer, as_sent, met_components
from agentlightning.runner.environment import ResourceCache
from agentlightning.tracing.steps import read_steps
from agentlightning.types import (
    LLM,
    AttemptedRollout,
    NamedResources,
    PromptCandidate,
    PromptText,
    Span,
)
from tests.frameworks.world import bin_of
from tests.gateway.claude import client_of
from tests.gateway.talker import SEARCH_TOOL, user
from tests.gateway.test_passing_through import sent
from tests.gateway.upstream import GOOD, whole
from tests.gateway.world import World, fronting, serving

pytestmark = pytest.mark.anyio

OWN = "You are the writer. Today is May 3."
NEW = "You are the sea captain. Now: May 3!"
DESCRIBED = "Look something up."  # the search tool of the talker
CANDIDATE = PromptCandidate(
    components={
        "writer.system": PromptText(
            place="system",
            sent="You are the writer. Today is {hole1}.",
            text="You are the sea captain. Now: {hole1}!",
        ),
        "tools.search.description": PromptText(
            place="tools.search.description", sent=DESCRIBED, text="FIND IT."
        ),
    }
)
RESOURCES: NamedResources = {
    "llm": LLM(endpoint="/v1", model="policy", gateway=True),
    "prompts": CANDIDATE,
}


class Hosted:
    """An API of every protocol that repeats what it was asked, as OpenAI's responses do."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append((request.url.path, body))
        if request.url.path == "/v1/chat/completions":
            if body.get("stream"):
                return StreamingResponse(iter(GOOD), media_type="text/event-stream")
            return JSONResponse(whole(GOOD))
        if request.url.path == "/v1/messages/count_tokens":
            return JSONResponse({"input_tokens": len(json.dumps(body))})
        if request.url.path == "/v1/messages":
            return JSONResponse(MESSAGE)
        response = {**RESPONSE, **{name: body[name] for name in REPEATED if name in body}}
        if not body.get("stream"):
            return JSONResponse(response)
        events = [
            {"type": "response.created", "sequence_number": 0, "response": response},
            {"type": "response.completed", "sequence_number": 1, "response": response},
        ]
        # in pieces that no event ends with
        written = "".join(map(sent, events)).encode()
        pieces = [written[at : at + 37] for at in range(0, len(written), 37)]
        return StreamingResponse(iter(pieces), media_type="text/event-stream")


REPEATED = ("instructions", "tools", "metadata")
TEXT = {"type": "output_text", "text": "Hi", "annotations": []}
RESPONSE: dict[str, Any] = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "model": "gpt",
    "status": "completed",
    "output": [
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [TEXT],
        }
    ],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "usage": {"input_tokens": 7, "output_tokens": 2, "total_tokens": 9},
}
MESSAGE: dict[str, Any] = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "claude",
    "content": [{"type": "text", "text": "Hi"}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 5, "output_tokens": 1},
}


@asynccontextmanager
async def before(
    hosted: Hosted, kind: Kind = "openai", **options: Any
) -> AsyncIterator[tuple[World, AttemptedRollout]]:
    """A gateway in front of the API, and an attempt whose rollout names the candidate."""
    app = Starlette(routes=[Route("/{path:path}", hosted.answer, methods=["POST"])])
    async with serving(app) as url:
        backend = HttpBackend(f"{url}/v1", kind=kind, api_key="key", model="upstream-name")
        entry = ModelEntry("policy", backend, trainable=False, train=None, val=None)
        async with fronting(entry, **options) as front:
            yield front, await with_candidate(front)


async def with_candidate(front: World) -> AttemptedRollout:
    stored = await front.store.add_resources(RESOURCES)
    return await front.attempt(resources_id=stored.resources_id)


async def span_of(front: World, attempted: AttemptedRollout) -> Span:
    return (await front.spans(attempted))[-1]


async def sent_in(front: World, span: Span) -> Any:
    """What the agent sent, from the span and the store alone."""
    record = json.loads(str(span.attributes[semconv.CALL_REPLACED]))
    stored = await front.store.get_resources_by_id(record["resources_id"])
    assert stored is not None
    candidate = stored.resources["prompts"]
    assert isinstance(candidate, PromptCandidate)
    return as_sent(span, {stored.resources_id: candidate})


MESSAGES: Any = [{"role": "system", "content": OWN}, *user("hello")]
RESPONSES_TOOL: Any = {"type": "function", **SEARCH_TOOL["function"], "strict": False}
ANTHROPIC_TOOL: Any = {
    "name": "search",
    "description": DESCRIBED,
    "input_schema": SEARCH_TOOL["function"]["parameters"],
    "cache_control": {"type": "ephemeral"},
}
SYSTEM_BLOCKS: Any = [{"type": "text", "text": OWN, "cache_control": {"type": "ephemeral"}}]


@pytest.mark.parametrize("stream", [False, True])
async def test_openais_chat_reaches_a_hosted_model_in_the_candidates_words(stream: bool) -> None:
    hosted = Hosted()
    async with before(hosted) as (front, attempted):
        answer = await front.client(attempted).chat.completions.create(
            model="policy",
            messages=MESSAGES,
            tools=[SEARCH_TOOL],  # type: ignore[list-item]
            stream=stream,
            extra_body={"of_theirs": 12345678901234567890},
        )
        if stream:
            async for _ in answer:  # type: ignore[union-attr]
                pass
        span = await span_of(front, attempted)
        own = await sent_in(front, span)
    (_, asked) = hosted.asked[0]
    assert asked["messages"][0]["content"] == NEW
    assert asked["tools"][0]["function"]["description"] == "FIND IT."
    assert asked["of_theirs"] == 12345678901234567890
    assert own.messages == MESSAGES and own.tools == [SEARCH_TOOL]
    assert met_components([span]) == CANDIDATE.components.keys()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_relayed_response_repeats_the_agents_own_words(stream: bool) -> None:
    hosted = Hosted()
    async with before(hosted) as (front, attempted):
        client = front.client(attempted)
        asked: Any = {
            "model": "policy",
            "instructions": OWN,
            "input": "hello",
            "tools": [RESPONSES_TOOL, {"type": "web_search"}],
            "metadata": {"a": "b"},
        }
        if stream:
            events = [event async for event in await client.responses.create(**asked, stream=True)]
            kinds = [event.type for event in events]
            assert kinds == ["response.created", "response.completed"]
            answers = [event.response for event in events]
        else:
            answers = [await client.responses.create(**asked)]
        span = await span_of(front, attempted)
        own = await sent_in(front, span)
    (path, got) = hosted.asked[0]
    assert (path, got["instructions"]) == ("/v1/responses", NEW)
    assert [tool.get("description") for tool in got["tools"]] == ["FIND IT.", None]
    for answer in answers:
        assert answer.instructions == OWN and answer.metadata == {"a": "b"}
        assert answer.tools[0].model_dump(exclude_none=True) == RESPONSES_TOOL
        assert answer.output_text == "Hi"
    assert own.request["instructions"] == OWN and own.tools == asked["tools"]
    assert json.loads(str(span.attributes[semconv.CALL_REQUEST]))["instructions"] == NEW


async def test_anthropics_messages_and_counts_keep_their_cache_control() -> None:
    hosted = Hosted()
    async with before(hosted, "anthropic") as (front, attempted):
        client = client_of(front, attempted)
        asked: Any = {
            "model": "policy",
            "messages": user("hello"),
            "system": SYSTEM_BLOCKS,
            "tools": [ANTHROPIC_TOOL],
        }
        answer = await client.messages.create(**asked, max_tokens=9)
        await client.messages.count_tokens(**asked)
        own = await sent_in(front, await span_of(front, attempted))
    assert answer.content[0].text == "Hi"  # type: ignore[union-attr]
    assert [path for path, _ in hosted.asked] == ["/v1/messages", "/v1/messages/count_tokens"]
    for _, got in hosted.asked:
        assert got["system"] == [{**SYSTEM_BLOCKS[0], "text": NEW}]
        assert got["tools"] == [{**ANTHROPIC_TOOL, "description": "FIND IT."}]
    assert own.request["system"] == SYSTEM_BLOCKS and own.tools == [ANTHROPIC_TOOL]


async def test_a_protocol_that_the_api_has_not_is_translated_from_the_candidates_words() -> None:
    hosted = Hosted()
    async with before(hosted) as (front, attempted):
        client = client_of(front, attempted)
        await client.messages.create(
            model="policy", max_tokens=9, messages=user("hello"), system=SYSTEM_BLOCKS
        )  # type: ignore[arg-type]
        own = await sent_in(front, await span_of(front, attempted))
    (path, got) = hosted.asked[-1]
    assert path == "/v1/chat/completions" and NEW in json.dumps(got["messages"][0])
    assert own.messages[0] == {"role": "system", "content": OWN}


# --- the embedded engine --------------------------------------------------------------------------


async def test_exact_ids_are_those_of_the_candidates_prompt_and_go_on_being_spliced(
    gateway_world: World,
) -> None:
    attempted = await with_candidate(gateway_world)
    client = gateway_world.client(attempted)
    first = await client.chat.completions.create(model="policy", messages=MESSAGES)
    said = {"role": "assistant", "content": first.choices[0].message.content}
    await client.chat.completions.create(model="policy", messages=[*MESSAGES, said, *user("count")])
    one, two = await gateway_world.spans(attempted)
    plain = await gateway_world.attempt()
    await gateway_world.client(plain).chat.completions.create(
        model="policy", messages=[{"role": "system", "content": NEW}, *user("hello")]
    )
    other = await span_of(gateway_world, plain)
    assert one.tokens and two.tokens and other.tokens
    assert tuple(one.tokens.prompt_token_ids) == tuple(other.tokens.prompt_token_ids)
    before_it = (*one.tokens.prompt_token_ids, *one.tokens.choices[0].token_ids)
    assert tuple(two.tokens.prompt_token_ids)[: len(before_it)] == before_it
    assert int(two.attributes[semconv.RECORDED_SPLICE]) > 0  # type: ignore[arg-type]
    assert two.attributes[semconv.CALL_CONTINUES] == 0
    assert semconv.CALL_FLAG not in two.attributes
    assert (await sent_in(gateway_world, two)).messages == [*MESSAGES, said, *user("count")]


async def test_a_response_continues_an_earlier_one_in_the_candidates_words(
    gateway_world: World,
) -> None:
    attempted = await with_candidate(gateway_world)
    client = gateway_world.client(attempted)
    asked: Any = {"model": "policy", "instructions": OWN, "tools": [RESPONSES_TOOL]}
    first = await client.responses.create(**asked, input="hello")
    second = await client.responses.create(**asked, input="count", previous_response_id=first.id)
    one, two = await gateway_world.spans(attempted)
    for answer in (first, second):
        assert answer.instructions == OWN
        assert answer.tools[0].model_dump(exclude_none=True) == RESPONSES_TOOL
    assert one.tokens and two.tokens
    before_it = (*one.tokens.prompt_token_ids, *one.tokens.choices[0].token_ids)
    assert tuple(two.tokens.prompt_token_ids)[: len(before_it)] == before_it
    messages = json.loads(str(two.attributes[semconv.GEN_AI_INPUT_MESSAGES]))
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[0]["content"] == NEW
    own = await sent_in(gateway_world, two)
    assert own.messages[0]["content"] == OWN and own.request["instructions"] == OWN


async def test_counted_tokens_are_those_of_the_candidates_prompt(gateway_world: World) -> None:
    attempted = await with_candidate(gateway_world)
    plain = await gateway_world.attempt()
    counts = [
        await client_of(gateway_world, each).messages.count_tokens(
            model="policy", messages=user("hello"), system=text
        )
        for each, text in ((attempted, OWN), (plain, NEW), (plain, OWN))
    ]
    assert counts[0].input_tokens == counts[1].input_tokens != counts[2].input_tokens


async def test_an_agents_name_and_its_housekeeping_are_those_of_what_it_sent(
    gateway_world: World,
) -> None:
    attempted = await with_candidate(gateway_world)
    plain = await gateway_world.attempt()
    for each in (attempted, plain):
        await gateway_world.client(each).chat.completions.create(model="policy", messages=MESSAGES)
    for each in (attempted, plain):
        spans = await gateway_world.spans(each)
        (step,) = read_steps(spans)
        assert agent_of(step).names == ("writer",)
    title = "Generate a concise, sentence-case title for May 3."
    stored = await gateway_world.store.add_resources(
        {
            "prompts": PromptCandidate(
                components={
                    "t": PromptText(
                        place="system", sent=title.replace("May 3", "{hole1}"), text="{hole1}"
                    )
                }
            )
        }
    )
    third = await gateway_world.attempt(resources_id=stored.resources_id)
    headers = {"user-agent": "claude-cli/2"}
    await gateway_world.client(third, default_headers=headers).chat.completions.create(
        model="policy", messages=[{"role": "system", "content": title}, *user("hello")]
    )
    span = await span_of(gateway_world, third)
    assert "May 3" in str(span.attributes[semconv.GEN_AI_INPUT_MESSAGES])
    assert span.attributes[semconv.CALL_HOUSEKEEPING] == "title"


# --- who gets a candidate -------------------------------------------------------------------------


async def test_a_rollout_that_names_no_resources_does_not_get_the_latest_candidate(
    gateway_world: World,
) -> None:
    await gateway_world.store.add_resources(RESOURCES)
    attempted = await gateway_world.attempt()
    await gateway_world.client(attempted).chat.completions.create(model="policy", messages=MESSAGES)
    span = await span_of(gateway_world, attempted)
    assert json.loads(str(span.attributes[semconv.GEN_AI_INPUT_MESSAGES])) == MESSAGES
    assert semconv.CALL_REPLACED not in span.attributes
    cache = ResourceCache(gateway_world.store, "http://127.0.0.1:1/v1")
    assert list(await cache.bound_to(attempted)) == ["llm"]  # nor does its runner


async def test_in_production_everybody_gets_the_prompts_except_who_has_a_candidate() -> None:
    texts = {
        "writer.system": PromptText(
            place="system", sent="You are the writer. Today is {hole1}.", text="PRODUCTION {hole1}"
        )
    }
    production = Replacer(PromptCandidate(components=texts), "prompts-1")
    hosted = Hosted()
    async with before(hosted, prompts=production) as (front, attempted):
        plain = await front.attempt()
        for each in (None, plain, attempted):
            await front.client(each).chat.completions.create(model="policy", messages=MESSAGES)
        await front.client(plain).chat.completions.create(model="policy", messages=user("hello"))
        span = (await front.spans(plain))[0]
        met = front.gateway.met
    systems = [asked["messages"][0]["content"] for _, asked in hosted.asked]
    assert systems == ["PRODUCTION May 3", "PRODUCTION May 3", NEW, "hello"]
    assert json.loads(str(span.attributes[semconv.CALL_REPLACED]))["resources_id"] == "prompts-1"
    assert (met.calls, met.share) == ({"yes": 2, "no": 1}, 2 / 3)


async def test_a_call_that_waits_while_weights_change_is_counted_once() -> None:
    production = Replacer(CANDIDATE, "prompts-1")
    async with before(Hosted(), prompts=production) as (front, _):
        front.gateway.hold("policy")
        client = front.client()
        call = asyncio.create_task(
            client.chat.completions.create(model="policy", messages=MESSAGES)
        )
        await asyncio.sleep(0.05)
        front.gateway.release("policy")
        await call
        assert front.gateway.met.calls == {"yes": 1}


async def test_bad_requests_are_refused_as_without_a_candidate(gateway_world: World) -> None:
    attempted = await with_candidate(gateway_world)
    plain = await gateway_world.attempt()
    bodies = [b"{", b"[]", b'{"messages": 3}', b'{"model": "policy", "messages": [{"role": 7}]}']
    bodies += [b'{"model": "policy", "messages": [{"role": "system", "content": "\\ud800"}]}']
    answers: list[list[tuple[int, str]]] = []
    async with aiohttp.ClientSession() as http:
        for each in (attempted, plain):
            url = str(gateway_world.client(each).base_url) + "chat/completions"
            got = []
            for body in bodies:
                async with http.post(url, data=body) as answer:
                    got.append((answer.status, await answer.text()))
            answers.append(got)
    assert answers[0] == answers[1]
    assert {status for status, _ in answers[0]} == {400}


async def test_a_prompt_of_100_kb_is_replaced_and_rebuilt() -> None:
    rules = "\n".join(f"- rule {number} says what to do" for number in range(4000))
    text = PromptText(place="system", sent=f"You are {{hole1}}.\n{rules}", text="SHORT {hole1}")
    hosted = Hosted()
    async with before(hosted) as (front, _):
        stored = await front.store.add_resources(
            {"prompts": PromptCandidate(components={"a": text})}
        )
        attempted = await front.attempt(resources_id=stored.resources_id)
        messages: Any = [
            {"role": "system", "content": text.sent.replace("{hole1}", "Al")},
            *user("hello"),
        ]
        await front.client(attempted).chat.completions.create(model="policy", messages=messages)
        span = await span_of(front, attempted)
        assert (await sent_in(front, span)).messages == messages
    assert hosted.asked[0][1]["messages"][0]["content"] == "SHORT Al"
    assert len(str(span.attributes)) < 5000


@pytest.mark.slow
async def test_googles_sdk_is_answered_from_the_candidates_prompt(gateway_world: World) -> None:
    attempted = await with_candidate(gateway_world)
    process = await asyncio.create_subprocess_exec(
        bin_of("frameworks") / "python",
        Path(__file__).parent / "genai_prompts.py",
        OWN,
        env={
            "PATH": os.environ["PATH"],
            "GOOGLE_GEMINI_BASE_URL": (
                f"{gateway_world.url}/rollout/{attempted.rollout_id}/attempt/"
                f"{attempted.attempt.attempt_id}"
            ),
            "GEMINI_API_KEY": attempted.api_key or "EMPTY",
        },
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await asyncio.wait_for(process.communicate(), 120)
    told = json.loads(out.splitlines()[-1])
    assert told["text"] and told["streamed"]
    spans = [span for span in await gateway_world.spans(attempted) if span.tokens]
    assert len(spans) == 2
    for span in spans:
        messages = json.loads(str(span.attributes[semconv.GEN_AI_INPUT_MESSAGES]))
        assert messages[0]["content"] == NEW
        tools = json.loads(str(span.attributes[semconv.GEN_AI_TOOL_DEFINITIONS]))
        assert tools[0]["function"]["description"] == "FIND IT."
        own = await sent_in(gateway_world, span)
        assert own.messages[0]["content"] == OWN
        assert own.tools[0]["function"]["description"] == DESCRIBED
