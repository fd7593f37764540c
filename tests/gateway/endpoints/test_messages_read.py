"""Anthropic's requests in the form of chat completions, and what of them is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentlightning.gateway.endpoints.messages import Messages
from agentlightning.gateway.request import CallRefused
from tests.gateway.claude import SEARCH, asked, block, call_of
from tests.gateway.talker import user

USE = {"type": "tool_use", "id": "t1", "name": "search", "input": {"q": "sun", "n": 1.5}}
TEXT = {"type": "text", "text": "A"}


CALLED = [call_of('{"q":"sun","n":1.5}') | {"id": "t1"}]


def result(name: str, content: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": name, **({"content": content} if content else {}), **more}


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
            [("assistant", [{"type": "thinking", "thinking": "T", "signature": "s"}]), ("assistant", [TEXT, USE])],
            [{"role": "assistant", "content": "A", "reasoning_content": "T", "tool_calls": CALLED}],
        ),
        (
            [("assistant", [{"type": "redacted_thinking", "data": "x"}, USE])],
            [{"role": "assistant", "content": None, "tool_calls": CALLED}],
        ),
        (
            [("user", [TEXT, result("t1", "sunny"), result("t2", [TEXT], is_error=True), result("t4")])],
            [tool("t1", "sunny"), tool("t2", [{"type": "text", "text": "Error: "}, TEXT]), tool("t4", ""), *user("A")],
        ),
        ([("user", [result("t3", "boom", is_error=True)])], [tool("t3", "Error: boom")]),
        (
            [
                ("user", [{"type": "image", "source": source}])
                for source in (
                    {"type": "base64", "media_type": "image/png", "data": "AA=="},
                    {"type": "url", "url": "https://x.org/a.png"},
                )
            ],
            [{"role": "user", "content": images("data:image/png;base64,AA==", "https://x.org/a.png")}],
        ),
    ],
)
def test_messages_are_read_into_the_form_of_chat_completions(messages: list[Any], chat: list[Any]) -> None:
    given = [{"role": role, "content": content} for role, content in messages]
    end = user("end") if given[-1]["role"] == "assistant" else []
    assert Messages().read(json.dumps(asked(messages=given + end)).encode()).messages == chat + end


@pytest.mark.parametrize(
    ("more", "param", "says"),
    [
        ({"max_tokens": None}, "max_tokens", "required"),
        ({"messages": []}, "messages", "empty"),
        ({"temperature": 1.5}, "temperature", "<= 1.0"),
        ({"messages": [*user("A"), {"role": "assistant", "content": "B"}]}, "messages", "the assistant's own"),
        (block("document", source={}), "messages[0].content[0].type", "'document'"),
        (block("tool_use", id="t", name="n", input={}), "messages", "a tool call"),
        (block("text"), "messages", "lacks"),
        (block("image", source={"type": "file", "file_id": "f"}), "messages[0].content[0].source.type", "file"),
        (block("tool_result", tool_use_id="t", content=[{"type": "x"}]), "messages[0].content[0].content[0].type", "x"),
        (block("image", "assistant", source={"type": "url", "url": "u"}), "messages", "an image"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]", "web_search_20250305"),
        ({"tools": [SEARCH, {"name": "x"}]}, "tools[1]", "input_schema"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "name"),
        ({"output_config": {"task_budget": {}}}, "output_config", "task_budget"),
        ({"thread": {"type": "create"}}, "thread", "Anthropic's own API"),
        ({"stop": "x"}, "stop", "chat completions"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_by_name(more: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(CallRefused, match=says) as caught:
        Messages().read(json.dumps(asked(**more)).encode())
    assert (caught.value.status, caught.value.param) == (400, param)


def test_hints_to_anthropics_own_servers_are_dropped_by_name() -> None:
    more: dict[str, Any] = {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}, "speed": "fast"}
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    read = Messages().read(json.dumps(asked(**more, context_management=edits)).encode())
    assert read.dropped == ("context_management", "speed", "thinking", "output_config.effort")
    assert read.extra == {}
