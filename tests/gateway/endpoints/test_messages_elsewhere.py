"""Anthropic's messages in the form of chat completions, and answered by servers that speak
those."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentlightning.gateway.backends.http import HttpBackend
from agentlightning.gateway.endpoints.messages import Messages
from agentlightning.gateway.gateway import Gateway
from agentlightning.gateway.models import ModelEntry, ModelTable
from agentlightning.gateway.request import CallRefused
from tests.gateway.claude import (
    SEARCH,
    answered,
    asked,
    block,
    call_of,
    client_of,
    events_of,
    strictly,
)
from tests.gateway.talker import SEARCH_TOOL, user
from tests.gateway.upstream import DONE, Upstream, chunk, gateway_before
from tests.gateway.world import serving, serving_gateway

pytestmark = pytest.mark.anyio


class Saying(Upstream):
    """Stands in for vLLM: says one message, in one piece or each of its fields in two."""

    def __init__(self, message: dict[str, Any], reason: str = "stop", **usage: Any) -> None:
        self.message, self.reason = message, reason
        self.usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15, **usage}
        super().__init__([chunk({"index": 0, "delta": delta}) for delta in self._deltas()])
        self.events += [
            chunk({"index": 0, "delta": {}, "finish_reason": reason}),
            chunk(usage=self.usage),
            DONE,
        ]

    def _deltas(self) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        for name, text in self.message.items():
            if isinstance(text, str):
                deltas += [{name: text[:3]}, {name: text[3:]}]
        for index, call in enumerate(self.message.get("tool_calls", ())):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            deltas.append(
                {
                    "tool_calls": [
                        {**call, "index": index, "function": {"name": name, "arguments": ""}}
                    ]
                }
            )
            deltas += [
                {"tool_calls": [{"index": index, "function": {"arguments": part}}]}
                for part in (arguments[:3], arguments[3:])
            ]
        return deltas

    async def answer(self, request: Request) -> Response:
        if (await request.json())["stream"]:
            return await super().answer(request)
        self.asked.append(await request.json())
        choice = {
            "index": 0,
            "message": {"role": "assistant", **self.message},
            "finish_reason": self.reason,
        }
        return JSONResponse(
            {"id": "1", "object": "chat.completion", "choices": [choice], "usage": self.usage}
        )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
async def test_reasoning_is_a_thinking_block(stream: bool, field: str) -> None:
    calls = [call_of('{"q": "sun"}'), call_of("")]
    details = {
        "prompt_tokens_details": {"cached_tokens": 8},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
    upstream = Saying(
        {field: "Hmm, well.", "content": "Yes.", "tool_calls": calls}, "tool_calls", **details
    )
    async with gateway_before(upstream) as there:
        message = await answered(client_of(there), stream, **asked(tools=[SEARCH]))
        if stream:
            for name, data in await events_of(there):
                if name != "ping":
                    strictly(RawMessageStreamEvent, data)
    thinking, text, call, bare = message.content
    assert (thinking.type, thinking.thinking, thinking.signature) == ("thinking", "Hmm, well.", "")
    assert (text.text, call.input, bare.input, message.stop_reason) == (
        "Yes.",
        {"q": "sun"},
        {},
        "tool_use",
    )
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (2, 8, 5)
    assert usage.output_tokens_details.thinking_tokens == 2
    # Sent back, it is the assistant's reasoning again.
    turn = {
        "role": "assistant",
        "content": [block.model_dump(mode="json") for block in message.content],
    }
    read = Messages().read(json.dumps(asked(messages=[turn, *user("go on")])).encode())
    assert read.messages[0]["reasoning_content"] == "Hmm, well."


async def test_arguments_that_are_no_object_stay_text_in_a_whole_answer() -> None:
    async with gateway_before(Saying({"tool_calls": [call_of('{"q": }')]}, "tool_calls")) as there:
        message = await client_of(there).messages.create(**asked(tools=[SEARCH]))
        assert message.content[0].text == '{"name": "search", "arguments": {"q": }}'
        assert message.stop_reason == "end_turn"
        with pytest.raises(ValueError, match="Unable to parse tool parameter JSON"):
            await answered(client_of(there), True, **asked(tools=[SEARCH]))


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
    stream: bool, message: dict[str, str], reason: str, expected: str
) -> None:
    async with gateway_before(Saying(message, reason)) as there:
        answer = await answered(client_of(there), stream, **asked())
    assert answer.stop_reason == expected
    assert answer.content[0].text == next(iter(message.values()))


async def test_what_the_engine_cannot_do_is_passed_on_in_the_form_of_chat_completions() -> None:
    upstream = Saying({"content": "Hello"})
    schema = {"type": "object", "properties": {}}
    async with gateway_before(upstream) as there:
        await client_of(there).messages.create(
            **asked(),
            system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            tools=[{**SEARCH, "strict": True, "cache_control": {"type": "ephemeral"}}],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            thinking={"type": "enabled", "budget_tokens": 1024},
            output_config={"effort": "high", "format": {"type": "json_schema", "schema": schema}},
            metadata={"user_id": "u"},
            service_tier="auto",
            extra_body={
                "chat_template_kwargs": {"enable_thinking": True},
                "temperature": 0.5,
                "top_k": 7,
                "seed": 3,
            },
        )
        await client_of(there).messages.create(
            **asked(
                tools=[SEARCH],
                tool_choice={"type": "tool", "name": "search"},
                thinking={"type": "disabled"},
            )
        )
    first, second = upstream.asked
    assert first["messages"] == [{"role": "system", "content": "Be brief."}, *user("hello")]
    assert first["tools"] == [{"type": "function", "function": SEARCH_TOOL["function"]}]
    assert (first["tool_choice"], first["parallel_tool_calls"]) == ("required", False)
    assert first["response_format"]["json_schema"]["schema"] == schema
    assert first["chat_template_kwargs"] == {"enable_thinking": True}
    assert (first["temperature"], first["top_k"], first["seed"], first["max_tokens"]) == (
        0.5,
        7,
        3,
        64,
    )
    dropped = {"metadata", "service_tier", "cache_control", "system", "thinking"}
    assert dropped.isdisjoint(first)
    assert second["tool_choice"] == {"type": "function", "function": {"name": "search"}}
    assert "thinking" not in second


async def test_an_error_in_mid_stream_is_an_event() -> None:
    broken = Saying({"content": "Hello"})
    broken.events[3:] = ['data: {"error": {"message": "gpu on fire"}}\n\n']
    async with gateway_before(broken) as there:
        name, data = (await events_of(there))[-1]
        assert (name, strictly(ErrorResponse, data).error.type) == ("error", "api_error")
        stream = await client_of(there).messages.create(**asked(), stream=True)
        with pytest.raises(anthropic.APIStatusError, match="gpu on fire") as caught:
            [event async for event in stream]
        assert caught.value.type == "api_error"


async def test_anthropic_counts_its_own_tokens() -> None:
    async def count(request: Request) -> Response:
        body = await request.json()
        if body["model"] != "claude":
            return JSONResponse({"type": "error", "error": {"message": "no such model"}}, 404)
        return JSONResponse({"input_tokens": len(body["messages"])})

    stand_in = Starlette(routes=[Route("/v1/messages/count_tokens", count, methods=["POST"])])
    async with serving(stand_in) as upstream:
        backends = [
            HttpBackend(f"{upstream}/v1", kind="anthropic", model=model)
            for model in ("claude", "who")
        ]
        entries = [
            ModelEntry(name, one, trainable=False)
            for name, one in zip(("a", "b"), backends, strict=True)
        ]
        gateway = Gateway(ModelTable(entries))
        async with (
            serving_gateway(gateway) as url,
            AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as client,
        ):
            assert (
                await client.messages.count_tokens(model="a", messages=user("hi"))
            ).input_tokens == 1
            with pytest.raises(anthropic.APIStatusError, match="no such model"):
                await client.messages.count_tokens(model="b", messages=user("hi"))
        await gateway.close()


USE = {"type": "tool_use", "id": "t1", "name": "search", "input": {"q": "sun", "n": 1.5}}
TEXT = {"type": "text", "text": "A"}


SEARCHED = {"type": "web_search_20250305", "name": "web_search"}
CALLED = [call_of('{"q":"sun","n":1.5}') | {"id": "t1"}]


def result(name: str, content: Any = None, **more: Any) -> dict[str, Any]:
    return {
        "type": "tool_result",
        "tool_use_id": name,
        **({"content": content} if content else {}),
        **more,
    }


def document(source: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "document", "source": source, **more}


def tool(name: str, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": content}


def images(*urls: str) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": url}} for url in urls]


@pytest.mark.parametrize(
    ("messages", "chat"),
    [
        ([("user", "A"), ("user", [TEXT])], [{"role": "user", "content": [TEXT, TEXT]}]),
        (
            [("user", "A"), ("system", "Now rhyme."), ("user", "B")],
            [*user("A"), {"role": "system", "content": "Now rhyme."}, *user("B")],
        ),
        (
            [
                ("assistant", [{"type": "thinking", "thinking": "T", "signature": "s"}]),
                ("assistant", [TEXT, USE]),
            ],
            [{"role": "assistant", "content": "A", "reasoning_content": "T", "tool_calls": CALLED}],
        ),
        (
            [("assistant", [{"type": "redacted_thinking", "data": "x"}, USE])],
            [{"role": "assistant", "content": None, "tool_calls": CALLED}],
        ),
        (
            [
                (
                    "user",
                    [
                        TEXT,
                        result("t1", "sunny"),
                        result("t2", [TEXT], is_error=True),
                        result("t4"),
                    ],
                )
            ],
            [
                tool("t1", "sunny"),
                tool("t2", [{"type": "text", "text": "Error: "}, TEXT]),
                tool("t4", ""),
                *user("A"),
            ],
        ),
        ([("user", [result("t3", "boom", is_error=True)])], [tool("t3", "Error: boom")]),
        (
            [
                (
                    "user",
                    [
                        document(
                            {"type": "text", "media_type": "text/plain", "data": "D"},
                            title="T",
                            context="C",
                        )
                    ],
                )
            ],
            [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": one} for one in ("T\nC\n\n", "D")],
                }
            ],
        ),
        (
            [("user", [document({"type": "base64", "media_type": "text/csv", "data": "YSxi"})])],
            user("a,b"),
        ),
        ([("user", [document({"type": "content", "content": [TEXT]})])], user("A")),
        (
            [
                (
                    "user",
                    [document({"type": "base64", "media_type": "application/pdf", "data": "AA=="})],
                )
            ],
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "file", "file": {"file_data": "data:application/pdf;base64,AA=="}}
                    ],
                }
            ],
        ),
        (
            [("user", [{"type": "search_result", "title": "T", "source": "S", "content": [TEXT]}])],
            user("T\nS\nA"),
        ),
        (
            [
                (
                    "user",
                    [result("t1", [{"type": "tool_reference", "tool_name": "N"}, {"type": "x"}])],
                )
            ],
            [tool("t1", "N")],
        ),
        (
            [
                (
                    "assistant",
                    [
                        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                        TEXT,
                    ],
                )
            ],
            [{"role": "assistant", "content": "A"}],
        ),
        (
            [("user", [{"type": "tomorrows", "text": "A"}, {"type": "tomorrows", "content": {}}])],
            user("A"),
        ),
        (
            [
                ("user", [{"type": "image", "source": source}])
                for source in (
                    {"type": "base64", "media_type": "image/png", "data": "AA=="},
                    {"type": "url", "url": "https://x.org/a.png"},
                )
            ],
            [
                {
                    "role": "user",
                    "content": images("data:image/png;base64,AA==", "https://x.org/a.png"),
                }
            ],
        ),
    ],
)
def test_messages_are_read_into_the_form_of_chat_completions(
    messages: list[Any], chat: list[Any]
) -> None:
    given = [{"role": role, "content": content} for role, content in messages]
    end = user("end") if given[-1]["role"] == "assistant" else []
    assert Messages().read(json.dumps(asked(messages=given + end)).encode()).messages == chat + end


@pytest.mark.parametrize(
    ("more", "param", "says"),
    [
        ({"max_tokens": None}, "max_tokens", "required"),
        ({"messages": []}, "messages", "empty"),
        ({"temperature": 1.5}, "temperature", "<= 1.0"),
        (
            {"messages": [*user("A"), {"role": "assistant", "content": "B"}]},
            "messages",
            "the assistant's own",
        ),
        (
            block("document", source={"type": "url", "url": "u"}),
            "messages[0].content[0]",
            "send its text",
        ),
        (block("tool_use", id="t", name="n", input={}), "messages", "a tool call"),
        (block("text"), "messages", "lacks"),
        (
            block("image", source={"type": "file", "file_id": "f"}),
            "messages[0].content[0].source.type",
            "file",
        ),
        (block("image", "assistant", source={"type": "url", "url": "u"}), "messages", "an image"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]", "define a function"),
        (
            {"tools": [SEARCHED], "tool_choice": {"type": "tool", "name": "web_search"}},
            "tool_choice",
            "by Anthropic",
        ),
        ({"tools": [SEARCH, {"name": "x"}]}, "tools[1]", "input_schema"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "name"),
        ({"thread": {"type": "create"}}, "thread", "send all messages"),
        ({"stop": "x"}, "stop", "another name"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    more: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(CallRefused, match=says) as caught:
        Messages().read(json.dumps(asked(**more)).encode())
    assert (caught.value.status, caught.value.param) == (400, param)


def test_hints_to_anthropics_own_servers_are_dropped_by_name() -> None:
    more: dict[str, Any] = {
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "max", "task_budget": {}},
    }
    more |= {"speed": "fast", "tools": [SEARCHED]}
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    read = Messages().read(json.dumps(asked(**more, context_management=edits)).encode())
    assert read.dropped == (
        *(
            "context_management",
            "speed",
            "thinking",
            "output_config.effort",
            "output_config.task_budget",
        ),
        "tools.web_search",
    )
    assert read.extra == {}
