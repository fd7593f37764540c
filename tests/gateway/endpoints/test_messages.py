"""The endpoint as Anthropic's own client sees it, over HTTP, from a real engine and from servers that stand in."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from pydantic import BaseModel, TypeAdapter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentlightning import semconv
from agentlightning.gateway.app import Gateway
from agentlightning.gateway.backends.http import HttpBackend
from agentlightning.gateway.endpoints.messages import Messages
from agentlightning.gateway.models import ModelEntry, ModelTable
from agentlightning.gateway.request import CallRefused
from agentlightning.store.sql import SqlStore
from agentlightning.types import AttemptedRollout
from tests.gateway.talker import BROKEN_CALL, PLAIN, SEARCH_TOOL, user
from tests.gateway.upstream import DONE, Upstream, chunk, gateway_before
from tests.gateway.world import World, serving, world

pytestmark = pytest.mark.anyio

SEARCH = {
    "name": "search",
    "description": SEARCH_TOOL["function"]["description"],
    "input_schema": SEARCH_TOOL["function"]["parameters"],
}


def client_of(there: World, attempted: AttemptedRollout | None = None, **options: Any) -> AsyncAnthropic:
    """Anthropic's client, at the attempt's own URL, or at the bare one."""
    path = "" if attempted is None else f"/rollout/{attempted.rollout_id}/attempt/{attempted.attempt.attempt_id}"
    key = (attempted and attempted.api_key) or "EMPTY"
    client = AsyncAnthropic(**{"base_url": there.url + path, "api_key": key, "max_retries": 0, **options})
    there.clients.append(client)  # type: ignore[arg-type] - it is closed like the others
    return client


def asked(text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": "policy", "max_tokens": 64, "messages": user(text)} | more


def strictly(kind: Any, body: str | bytes) -> Any:
    """What the JSON `body` holds, which must be of the SDK's own type, without coercion and without a field more."""
    value = TypeAdapter(kind).validate_json(body, strict=True)
    _nothing_more(value)
    return value


def _nothing_more(value: Any) -> None:
    if isinstance(value, BaseModel):
        assert not value.model_extra, f"{type(value).__name__} has no {list(value.model_extra)}"
        for name in type(value).model_fields:
            _nothing_more(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            _nothing_more(item)


async def post(there: World, path: str, body: Any, **headers: str) -> tuple[int, bytes]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{there.url}/v1/{path}", data=data, headers=headers) as response,
    ):
        return response.status, await response.read()


async def events_of(there: World, **request: Any) -> list[tuple[str, str]]:
    """(name, data) of each server-sent event, as they came over the wire."""
    _, body = await post(there, "messages", asked(**{"stream": True, **request}))
    lines = [event.split("\n") for event in body.decode().split("\n\n") if event]
    return [(name.removeprefix("event: "), data.removeprefix("data: ")) for name, data in lines]


class Saying(Upstream):
    """Stands in for vLLM: says one message, in one piece or each of its fields in two."""

    def __init__(self, message: dict[str, Any], reason: str = "stop", **usage: Any) -> None:
        self.message, self.reason = message, reason
        self.usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15, **usage}
        super().__init__([chunk({"index": 0, "delta": delta}) for delta in self._deltas()])
        self.events += [chunk({"index": 0, "delta": {}, "finish_reason": reason}), chunk(usage=self.usage), DONE]

    def _deltas(self) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        for name, text in self.message.items():
            if isinstance(text, str):
                deltas += [{name: text[:3]}, {name: text[3:]}]
        for index, call in enumerate(self.message.get("tool_calls", ())):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            deltas.append({"tool_calls": [{**call, "index": index, "function": {"name": name, "arguments": ""}}]})
            deltas += [
                {"tool_calls": [{"index": index, "function": {"arguments": part}}]}
                for part in (arguments[:3], arguments[3:])
            ]
        return deltas

    async def answer(self, request: Request) -> Response:
        if (await request.json())["stream"]:
            return await super().answer(request)
        self.asked.append(await request.json())
        choice = {"index": 0, "message": {"role": "assistant", **self.message}, "finish_reason": self.reason}
        return JSONResponse({"id": "1", "object": "chat.completion", "choices": [choice], "usage": self.usage})


def call_of(arguments: str, name: str = "search") -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


@asynccontextmanager
async def before(upstream: Upstream, directory: Path) -> AsyncIterator[World]:
    store = await SqlStore.open(directory / "before.sqlite", synchronous="NORMAL")
    async with gateway_before(upstream, store) as there:
        yield there
    await store.close()


# --- answers ------------------------------------------------------------------------------------------------------


async def test_an_answer_comes_whole(gateway_world: World) -> None:
    status, body = await post(gateway_world, "messages", asked())
    message = strictly(Message, body)
    assert (status, message.model, message.stop_reason, message.stop_sequence) == (200, "policy", "end_turn", None)
    assert message.id.startswith("msg_")
    assert [(block.type, block.text) for block in message.content] == [("text", PLAIN["hello"])]
    assert message.usage.input_tokens > 0 and message.usage.output_tokens > 3
    answer = await client_of(gateway_world).messages.create(**asked())
    assert answer.content[0].text == PLAIN["hello"]


async def test_an_answer_streams_as_the_events_of_the_protocol(gateway_world: World) -> None:
    events = await events_of(gateway_world, text="signs")
    names = [name for name, _ in events]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"} and len(names) > 9
    read = [strictly(RawMessageStreamEvent, data) for name, data in events if name != "ping"]
    assert [event.type for event in read] == [name for name in names if name != "ping"]
    start, end = read[0].message, read[-2]
    assert (start.content, start.stop_reason, start.usage.output_tokens) == ([], None, 0)
    assert start.usage.input_tokens == end.usage.input_tokens > 0
    assert (end.delta.stop_reason, end.usage.output_tokens > 10) == ("end_turn", True)
    assert "".join(event.delta.text for event in read if event.type == "content_block_delta") == PLAIN["signs"]


async def test_the_sdks_stream_gathers_what_the_whole_answer_says(gateway_world: World) -> None:
    client = client_of(gateway_world, await gateway_world.attempt())
    async with client.messages.stream(**asked()) as stream:
        texts = [text async for text in stream.text_stream]
        streamed = await stream.get_final_message()
    assert "".join(texts) == PLAIN["hello"] and len(texts) > 1
    whole = await client.messages.create(**asked())
    assert streamed.model_dump(exclude={"id"}, exclude_none=True) == whole.model_dump(exclude={"id"}, exclude_none=True)
    raw = await client.messages.create(**asked(stream=True))
    assert [event.type async for event in raw][-1] == "message_stop"


async def test_the_beta_client_is_answered_alike(gateway_world: World) -> None:
    client = client_of(gateway_world)
    answer = await client.beta.messages.create(**asked(), betas=["context-1m-2025-08-07"])
    assert answer.content[0].text == PLAIN["hello"]
    async with client.beta.messages.stream(**asked()) as stream:
        assert await stream.get_final_text() == PLAIN["hello"]


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls_are_blocks_behind_the_text(gateway_world: World, stream: bool) -> None:
    message = await answered(client_of(gateway_world), stream, **asked("weather", tools=[SEARCH]))
    text, call = message.content
    assert (text.type, text.text) == ("text", "Let me look.")
    assert (call.type, call.name, call.input) == ("tool_use", "search", {"q": "sun"})
    assert call.id and message.stop_reason == "tool_use"


@pytest.mark.parametrize("stream", [False, True])
async def test_parallel_tool_calls_have_ids_of_their_own(gateway_world: World, stream: bool) -> None:
    message = await answered(client_of(gateway_world), stream, **asked("both", tools=[SEARCH]))
    assert [block.input["q"] for block in message.content] == ["sun", "rain"]
    assert len({block.id for block in message.content}) == 2


async def answered(client: AsyncAnthropic, stream: bool, **request: Any) -> Message:
    if not stream:
        return await client.messages.create(**request)
    async with client.messages.stream(**request) as streamed:
        return await streamed.get_final_message()


async def test_each_tool_call_of_a_stream_is_opened_and_closed(gateway_world: World) -> None:
    events = await events_of(gateway_world, text="both", tools=[SEARCH])
    read = [strictly(RawMessageStreamEvent, data) for name, data in events if name.startswith("content_block")]
    assert [(event.type, event.index) for event in read] == [
        (f"content_block_{what}", index) for index in (0, 1) for what in ("start", "delta", "stop")
    ]
    assert read[0].content_block.input == {}


async def test_a_malformed_tool_call_is_plain_text(gateway_world: World) -> None:
    message = await client_of(gateway_world).messages.create(**asked("broken", tools=[SEARCH]))
    assert [(block.type, block.text) for block in message.content] == [("text", BROKEN_CALL)]
    assert message.stop_reason == "end_turn"


async def test_tool_choice_none_shows_the_model_no_tools(gateway_world: World) -> None:
    client = client_of(gateway_world)
    request = {"model": "policy", "messages": user("hello")}
    without = await client.messages.count_tokens(**request)
    hidden = await client.messages.count_tokens(**request, tools=[SEARCH], tool_choice={"type": "none"})
    assert hidden.input_tokens == without.input_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_sequence_cuts_the_text_and_is_named(gateway_world: World, stream: bool) -> None:
    message = await answered(client_of(gateway_world), stream, **asked("count", stop_sequences=["4 5", "9"]))
    assert message.content[0].text == "1 2 3 "
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "4 5")


@pytest.mark.parametrize("stream", [False, True])
async def test_max_tokens_cuts_the_answer_and_says_so(gateway_world: World, stream: bool) -> None:
    message = await answered(client_of(gateway_world), stream, **asked("count", max_tokens=3))
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 3)


async def test_a_conversation_with_a_tool_goes_on(gateway_world: World) -> None:
    attempted = await gateway_world.attempt()
    client = client_of(gateway_world, attempted)
    first = await client.messages.create(**asked("weather", tools=[SEARCH]))
    result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": [{"type": "text", "text": "sunny"}]}
    history = [*user("weather"), first.to_param(), {"role": "user", "content": [result]}]
    await client.messages.create(**asked(tools=[SEARCH], messages=history))
    one, two = await gateway_world.spans(attempted)
    said = json.loads(two.attributes[semconv.GEN_AI_INPUT_MESSAGES])
    assert [message["role"] for message in said] == ["user", "assistant", "tool"]
    assert said[1]["content"] == "Let me look." and said[2]["tool_call_id"] == said[1]["tool_calls"][0]["id"]
    # The text the policy sampled is found again: its own token ids are the history.
    assert one.tokens is not None and two.tokens is not None
    spoken = one.tokens.prompt_token_ids + one.tokens.choices[0].token_ids
    assert two.tokens.prompt_token_ids[: len(spoken)] == spoken
    assert two.attributes[semconv.RECORDED_SPLICE] == len(one.tokens.choices[0].token_ids)


# --- answers of other servers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
async def test_reasoning_is_a_thinking_block(tmp_path: Path, stream: bool, field: str) -> None:
    upstream = Saying({field: "Hmm, well.", "content": "Yes.", "tool_calls": [call_of('{"q": "sun"}')]}, "tool_calls")
    async with before(upstream, tmp_path) as there:
        message = await answered(client_of(there), stream, **asked(tools=[SEARCH]))
        if stream:
            for name, data in await events_of(there):
                if name != "ping":
                    strictly(RawMessageStreamEvent, data)
    thinking, text, call = message.content
    assert (thinking.type, thinking.thinking, thinking.signature) == ("thinking", "Hmm, well.", "")
    assert (text.text, call.input) == ("Yes.", {"q": "sun"})
    # Sent back, it is the assistant's reasoning again.
    read = Messages().read(json.dumps(asked(messages=[message_json(message), *user("go on")])).encode())
    assert read.messages[0]["reasoning_content"] == "Hmm, well."


def message_json(message: Message) -> dict[str, Any]:
    return {"role": "assistant", "content": [block.model_dump(mode="json") for block in message.content]}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_without_arguments_has_an_empty_input(tmp_path: Path, stream: bool) -> None:
    async with before(Saying({"tool_calls": [call_of("")]}), tmp_path) as there:
        message = await answered(client_of(there), stream, **asked(tools=[SEARCH]))
    assert (message.content[0].input, message.stop_reason) == ({}, "tool_use")


async def test_arguments_that_are_no_object_stay_text_in_a_whole_answer(tmp_path: Path) -> None:
    async with before(Saying({"tool_calls": [call_of('{"q": }')]}, "tool_calls"), tmp_path) as there:
        message = await client_of(there).messages.create(**asked(tools=[SEARCH]))
        assert message.content[0].text == '{"name": "search", "arguments": {"q": }}'
        assert message.stop_reason == "end_turn"
        with pytest.raises(ValueError, match="Unable to parse tool parameter JSON"):
            await answered(client_of(there), True, **asked(tools=[SEARCH]))


@pytest.mark.parametrize("stream", [False, True])
async def test_cached_tokens_are_counted_beside_the_others(tmp_path: Path, stream: bool) -> None:
    details = {
        "prompt_tokens_details": {"cached_tokens": 8},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
    async with before(Saying({"content": "Hello"}, **details), tmp_path) as there:
        usage = (await answered(client_of(there), stream, **asked())).usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (2, 8, 5)
    assert usage.output_tokens_details.thinking_tokens == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("message", "reason", "expected"),
    [
        ({"content": "I am"}, "content_filter", "refusal"),
        ({"refusal": "No way."}, "stop", "refusal"),
        ({"content": "I am"}, "abort", "max_tokens"),
    ],
)
async def test_other_ends_have_their_reasons(
    tmp_path: Path, stream: bool, message: dict[str, str], reason: str, expected: str
) -> None:
    async with before(Saying(message, reason), tmp_path) as there:
        answer = await answered(client_of(there), stream, **asked())
    assert answer.stop_reason == expected
    assert answer.content[0].text == next(iter(message.values()))


async def test_what_the_engine_cannot_do_is_passed_on_in_the_form_of_chat_completions(tmp_path: Path) -> None:
    upstream = Saying({"content": "Hello"})
    schema = {"type": "object", "properties": {}}
    async with before(upstream, tmp_path) as there:
        await client_of(there).messages.create(
            **asked(),
            system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            tools=[{**SEARCH, "strict": True, "cache_control": {"type": "ephemeral"}}],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            thinking={"type": "enabled", "budget_tokens": 1024},
            output_config={"effort": "high", "format": {"type": "json_schema", "schema": schema}},
            metadata={"user_id": "u"},
            service_tier="auto",
            extra_body={"chat_template_kwargs": {"enable_thinking": True}, "temperature": 0.5, "top_k": 7, "seed": 3},
        )
        await client_of(there).messages.create(
            **asked(tools=[SEARCH], tool_choice={"type": "tool", "name": "search"}, thinking={"type": "disabled"})
        )
    first, second = upstream.asked
    assert first["messages"] == [{"role": "system", "content": "Be brief."}, *user("hello")]
    function = SEARCH_TOOL["function"]
    assert first["tools"] == [{"type": "function", "function": {**function, "strict": True}}]
    assert (first["tool_choice"], first["parallel_tool_calls"]) == ("required", False)
    assert first["thinking"] == {"type": "enabled", "budget_tokens": 1024}
    assert first["reasoning_effort"] == "high"
    assert first["response_format"]["json_schema"]["schema"] == schema
    assert first["chat_template_kwargs"] == {"enable_thinking": True}
    assert (first["temperature"], first["top_k"], first["seed"], first["max_tokens"]) == (0.5, 7, 3, 64)
    assert {"metadata", "service_tier", "cache_control", "system"}.isdisjoint(first)
    assert second["tool_choice"] == {"type": "function", "function": {"name": "search"}}
    assert "thinking" not in second


# --- requests -----------------------------------------------------------------------------------------------------

USE = {"type": "tool_use", "id": "t1", "name": "search", "input": {"q": "sun", "n": 1.5}}
TEXT = {"type": "text", "text": "A"}


@pytest.mark.parametrize(
    ("messages", "chat"),
    [
        ([("user", "A"), ("user", [TEXT])], [{"role": "user", "content": [TEXT, TEXT]}]),
        (
            [("user", "A"), ("system", "Now rhyme."), ("user", "B")],
            [*user("A"), {"role": "system", "content": "Now rhyme."}, *user("B")],
        ),
        (
            [("assistant", [{"type": "thinking", "thinking": "T", "signature": "s"}]), ("assistant", [TEXT, USE])],
            [
                {
                    "role": "assistant",
                    "content": "A",
                    "reasoning_content": "T",
                    "tool_calls": [call_of('{"q":"sun","n":1.5}') | {"id": "t1"}],
                }
            ],
        ),
        (
            [("assistant", [{"type": "redacted_thinking", "data": "x"}, USE])],
            [{"role": "assistant", "content": None, "tool_calls": [call_of('{"q":"sun","n":1.5}') | {"id": "t1"}]}],
        ),
        (
            [
                (
                    "user",
                    [
                        TEXT,
                        {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"},
                        {"type": "tool_result", "tool_use_id": "t2", "content": [TEXT], "is_error": True},
                        {"type": "tool_result", "tool_use_id": "t3", "content": "boom", "is_error": True},
                        {"type": "tool_result", "tool_use_id": "t4"},
                    ],
                )
            ],
            [
                {"role": "tool", "tool_call_id": "t1", "content": "sunny"},
                {"role": "tool", "tool_call_id": "t2", "content": [{"type": "text", "text": "Error: "}, TEXT]},
                {"role": "tool", "tool_call_id": "t3", "content": "Error: boom"},
                {"role": "tool", "tool_call_id": "t4", "content": ""},
                {"role": "user", "content": "A"},
            ],
        ),
        (
            [
                (
                    "user",
                    [
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
                        {"type": "image", "source": {"type": "url", "url": "https://x.org/a.png"}},
                    ],
                )
            ],
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
                        {"type": "image_url", "image_url": {"url": "https://x.org/a.png"}},
                    ],
                }
            ],
        ),
    ],
)
def test_messages_are_read_into_the_form_of_chat_completions(messages: list[Any], chat: list[Any]) -> None:
    given = [{"role": role, "content": content} for role, content in messages]
    end = user("end") if given[-1]["role"] == "assistant" else []
    assert Messages().read(json.dumps(asked(messages=given + end)).encode()).messages == chat + end


def block(kind: str, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [{"type": kind, **more}]}, *user("end")]}


@pytest.mark.parametrize(
    ("more", "param", "says"),
    [
        ({"max_tokens": None}, "max_tokens", "required"),
        ({"messages": None}, "messages", "required"),
        ({"messages": []}, "messages", "empty"),
        ({"max_tokens": 0}, "max_tokens", "between 1"),
        ({"temperature": 1.5}, "temperature", "between 0.0 and 1.0"),
        ({"messages": [*user("A"), {"role": "assistant", "content": "B"}]}, "messages", "the assistant's own"),
        ({"messages": [{"role": "king", "content": "A"}]}, "messages[0].role", "king"),
        (block("document", source={}), "messages", "'document'"),
        (block("search_result"), "messages", "'search_result'"),
        (block("server_tool_use"), "messages[0].content[0].type", "server_tool_use"),
        (block("tool_use", id="t", name="n", input={}), "messages", "'tool_use'"),
        (block("text"), "messages[0].content[0]", "`text`"),
        (block("image", source={"type": "file", "file_id": "f"}), "messages[0].content[0].source.type", "file"),
        (block("tool_result", tool_use_id="t", content=[{"type": "document"}]), "messages", "'document'"),
        (block("image", "assistant", source={"type": "url", "url": "u"}), "messages", "'image'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]", "web_search_20250305"),
        ({"tools": [SEARCH, {"name": "x"}]}, "tools[1]", "input_schema"),
        ({"tools": [{**SEARCH, "defer_loading": True}]}, "tools[0].defer_loading", "Anthropic's own API"),
        ({"tools": [{**SEARCH, "input_examples": [{"q": "x"}]}]}, "tools[0].input_examples", "Anthropic's own API"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "name"),
        ({"tool_choice": {"type": "all"}}, "tool_choice.type", "all"),
        ({"thinking": {"type": "loud"}}, "thinking.type", "loud"),
        ({"output_config": {"task_budget": {}}}, "output_config", "task_budget"),
        ({"speed": "fast"}, "speed", "fast"),
        ({"container": "c"}, "container", "Anthropic's own API"),
        ({"mcp_servers": [{}]}, "mcp_servers", "Anthropic's own API"),
        ({"context_management": {"edits": []}}, "context_management", "Anthropic's own API"),
        ({"n": 2}, "n", "one answer"),
        ({"stop": "x"}, "stop", "stop_sequences"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_by_name(more: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(CallRefused, match=says) as caught:
        Messages().read(json.dumps(asked(**more)).encode())
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "parallel_tool_calls"),
        ({"thinking": {"type": "adaptive"}}, "thinking"),
        ({"output_config": {"effort": "low"}}, "reasoning_effort"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "response_format"),
        ({"extra_body": {"frequency_penalty": 0.5}}, "frequency_penalty"),
        ({"extra_body": {"made_up": 1}}, "made_up"),
        (block("image", source={"type": "url", "url": "https://x.org/a.png"}), "image_url"),
        ({"messages": user("x y " * 600)}, "max_sequence_length"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_cannot_honour_is_refused(
    gateway_world: World, parameters: dict[str, Any], says: str, stream: bool
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=says) as caught:
        await client_of(gateway_world).messages.create(**asked(**{"tools": [SEARCH], "stream": stream, **parameters}))
    assert caught.value.type == "invalid_request_error"


async def test_what_changes_nothing_about_the_answer_is_accepted(gateway_world: World) -> None:
    answer = await client_of(gateway_world).messages.create(
        **asked(messages=[{"role": "user", "content": [{**TEXT, "text": "hello", "cache_control": None}]}]),
        cache_control={"type": "ephemeral"},
        metadata={"user_id": "u"},
        service_tier="standard_only",
        thinking={"type": "disabled"},
        extra_headers={"anthropic-beta": "some-beta"},
    )
    assert answer.content[0].text == PLAIN["hello"]


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["messages", "messages/count_tokens"])
async def test_an_error_has_anthropics_shape(gateway_world: World, path: str) -> None:
    status, body = await post(gateway_world, path, b"{not json")
    error = strictly(ErrorResponse, body).error
    assert (status, error.type) == (400, "invalid_request_error")
    assert "not a JSON object" in error.message


@pytest.mark.parametrize(
    ("upstream", "kind", "type_"),
    [
        (Upstream([], 429, {"error": {"message": "slow down"}}), anthropic.RateLimitError, "rate_limit_error"),
        (Upstream([], 500, {"error": {"message": "oops"}}), anthropic.InternalServerError, "api_error"),
        (Upstream([], 404, {"error": {"message": "who?"}}), anthropic.NotFoundError, "not_found_error"),
    ],
)
async def test_an_error_before_the_stream_is_raised_when_it_is_opened(
    tmp_path: Path, upstream: Upstream, kind: type[anthropic.APIStatusError], type_: str
) -> None:
    async with before(upstream, tmp_path) as there:
        with pytest.raises(kind) as caught:
            await client_of(there).messages.create(**asked(), stream=True)
    assert caught.value.type == type_


async def test_an_error_in_mid_stream_is_an_event(tmp_path: Path) -> None:
    broken = Saying({"content": "Hello"})
    broken.events[3:] = ['data: {"error": {"message": "gpu on fire"}}\n\n']
    async with before(broken, tmp_path) as there:
        name, data = (await events_of(there))[-1]
        assert (name, strictly(ErrorResponse, data).error.type) == ("error", "api_error")
        stream = await client_of(there).messages.create(**asked(), stream=True)
        with pytest.raises(anthropic.APIStatusError, match="gpu on fire") as caught:
            [event async for event in stream]
        assert caught.value.type == "api_error"


async def test_a_server_that_is_not_there_is_overloaded(tmp_path: Path) -> None:
    table = ModelTable([ModelEntry("policy", HttpBackend("http://127.0.0.1:9/v1"))])
    async with (
        serving(Starlette(routes=Gateway(table).routes())) as url,
        AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as client,
    ):
        with pytest.raises(anthropic.ServiceUnavailableError) as caught:
            await client.messages.create(**asked())
    assert caught.value.type == "overloaded_error"


async def test_a_body_above_the_limit_is_refused(tmp_path: Path) -> None:
    async with world(tmp_path, body_limit=1000) as small:
        with pytest.raises(anthropic.ContentTooLargeError) as caught:
            await client_of(small).messages.create(**asked("x" * 2000))
        assert caught.value.type == "request_too_large"


# --- whose call it is ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
async def test_a_key_names_its_attempt_in_either_header(tmp_path: Path, header: str) -> None:
    async with world(tmp_path, admin_key="the admin key") as guarded:
        attempted = await guarded.attempt()
        key = attempted.api_key or ""
        headers = {"authorization": f"Bearer {key}"} if header == "authorization" else {"x-api-key": key}
        for path, body in (("messages", asked()), ("messages/count_tokens", asked())):
            assert (await post(guarded, path, body, **headers))[0] == 200
        assert len(await guarded.spans(attempted)) == 1
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await client_of(guarded).messages.create(**asked())
        assert caught.value.type == "authentication_error"
        with pytest.raises(anthropic.AuthenticationError):
            await client_of(guarded).messages.count_tokens(model="policy", messages=user("hello"))


async def test_an_attempt_that_has_ended_is_not_answered(gateway_world: World) -> None:
    attempted = await gateway_world.attempt()
    await gateway_world.store.update_attempt(attempted.rollout_id, attempted.attempt.attempt_id, status="succeeded")
    with pytest.raises(anthropic.PermissionDeniedError) as caught:
        await client_of(gateway_world, attempted, max_retries=2).messages.create(**asked())
    assert caught.value.type == "permission_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_is_captured_exactly(gateway_world: World, stream: bool) -> None:
    attempted = await gateway_world.attempt()
    request = asked(system="Be brief.", temperature=0.7)
    answer = await answered(client_of(gateway_world, attempted), stream, **with_body(request, "temperature"))
    (span,) = await gateway_world.spans(attempted)
    assert span.tokens is not None
    (choice,) = span.tokens.choices
    assert len(choice.token_ids) == len(choice.logprobs) == answer.usage.output_tokens
    assert len(span.tokens.prompt_token_ids) == answer.usage.input_tokens
    assert span.attributes[semconv.GEN_AI_RESPONSE_ID] == answer.id
    assert span.attributes[semconv.CALL_ENDPOINT] == "messages"
    assert span.attributes[semconv.GEN_AI_OPERATION] == "chat"
    assert span.attributes[semconv.CALL_STREAM] is stream
    assert semconv.CALL_FLAG not in span.attributes
    said = json.loads(span.attributes[semconv.GEN_AI_INPUT_MESSAGES])
    assert said == [{"role": "system", "content": "Be brief."}, *user("hello")]
    assert json.loads(span.attributes[semconv.CALL_OVERRIDDEN]) == {"temperature": 0.7}
    assert "Be brief" not in span.attributes[semconv.CALL_REQUEST]


def with_body(request: dict[str, Any], *names: str) -> dict[str, Any]:
    """The request with what the SDK has no parameter for in its extra body."""
    extra = {name: request[name] for name in names}
    return {name: value for name, value in request.items() if name not in names} | {"extra_body": extra}


# --- counting and models ------------------------------------------------------------------------------------------


async def test_tokens_are_counted_and_nothing_is_recorded(gateway_world: World) -> None:
    attempted = await gateway_world.attempt()
    client = client_of(gateway_world, attempted)
    request = {"model": "policy", "messages": user("weather"), "tools": [SEARCH], "system": "Be brief."}
    count = await client.messages.count_tokens(**request)
    assert await gateway_world.spans(attempted) == []
    answer = await client.messages.create(**request, max_tokens=8)
    assert count.input_tokens == answer.usage.input_tokens
    (span,) = await gateway_world.spans(attempted)
    assert span.attributes[semconv.CALL_INDEX] == 0
    strictly(MessageTokensCount, (await post(gateway_world, "messages/count_tokens", request))[1])
    with pytest.raises(anthropic.BadRequestError, match="thinking"):
        await client.messages.count_tokens(**request, thinking={"type": "adaptive"})


async def test_anthropic_counts_its_own_tokens() -> None:
    async def count(request: Request) -> Response:
        body = await request.json()
        if body["model"] != "claude":
            return JSONResponse({"type": "error", "error": {"message": "no such model"}}, 404)
        return JSONResponse({"input_tokens": len(body["messages"])})

    stand_in = Starlette(routes=[Route("/v1/messages/count_tokens", count, methods=["POST"])])
    async with serving(stand_in) as upstream:
        backends = [HttpBackend(f"{upstream}/v1", kind="anthropic", model=model) for model in ("claude", "who")]
        entries = [ModelEntry(name, one, trainable=False) for name, one in zip(("a", "b"), backends, strict=True)]
        gateway = Gateway(ModelTable(entries))
        async with (
            serving(Starlette(routes=gateway.routes())) as url,
            AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as client,
        ):
            assert (await client.messages.count_tokens(model="a", messages=user("hi"))).input_tokens == 1
            with pytest.raises(anthropic.APIStatusError, match="no such model"):
                await client.messages.count_tokens(model="b", messages=user("hi"))
        await gateway.close()


async def test_models_are_listed_in_anthropics_form(gateway_world: World) -> None:
    client = client_of(gateway_world)
    assert [model.id async for model in client.models.list()] == ["policy"]
    raw = await client.models.with_raw_response.retrieve("policy")
    assert strictly(ModelInfo, await raw.read()).display_name == "policy"
    with pytest.raises(anthropic.NotFoundError, match="no model is called") as caught:
        await client.models.retrieve("other")
    assert caught.value.type == "not_found_error"
