"""What OpenAI and Azure would refuse of a fine-tuning file: which line, and why."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning.data.fine_tuning import line_problem
from tests.data.recorded import TOOL, asks_for, says, tool_says

USER, HI = says("user", "hello"), says("assistant", "hi")
WEIGHTLESS = says("assistant", "hi", weight=0)


def told(line: Any) -> str | None:
    found = line_problem(line)
    return None if found is None else str(found)


@pytest.mark.parametrize(
    "messages",
    [
        [USER, HI],
        [says("developer", "Be brief."), USER, HI],
        [USER, asks_for("c1")],
        [USER, asks_for("c1"), tool_says("c1", "warm"), HI],
        [USER, WEIGHTLESS, USER, says("assistant", "hi", weight=1)],
        [says("user", None) | {"content": [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}]}, HI],
    ],
)
def test_conversations_that_are_taken(messages: list[Any]) -> None:
    assert told({"messages": messages}) is None
    assert told({"messages": messages, "tools": [TOOL], "parallel_tool_calls": False}) is None


@pytest.mark.parametrize(
    ("messages", "wrong"),
    [
        ([], "length >= 1), at messages"),
        ([USER], "a last message that is not the assistant's"),
        ([says("narrator", "once"), HI], "invalid value 'narrator'), at messages[0].role"),
        ([says("user", None) | {"content": [{"type": "input_audio"}]}, HI], "at messages[0].content[0].type"),
        ([says("system", None) | {"content": [{"type": "image_url"}]}, HI], "invalid value 'image_url'"),
        ([USER, asks_for("")], "at messages[1].tool_calls[0].id"),
        ([USER, WEIGHTLESS], "no answer of the assistant's that has weight"),
        ([USER, says("assistant", "hi", weight=0.5)], "at messages[1].weight"),
        ([USER | {"weight": 1}, HI], "unknown field `weight`), at messages[0]"),
    ],
)
def test_what_is_wrong_with_a_conversation_and_where(messages: list[Any], wrong: str) -> None:
    assert wrong in str(told({"messages": messages}))


@pytest.mark.parametrize(
    ("tool", "wrong"),
    [
        ({"type": "web_search"}, "invalid enum value 'web_search'), at tools[0].type"),
        ({"type": "function", "function": {"name": "two words"}}, "at tools[0].function.name"),
        ({"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}, "parameters.type"),
    ],
)
def test_what_is_wrong_with_tools(tool: Any, wrong: str) -> None:
    assert wrong in str(told({"messages": [USER, asks_for("c1")], "tools": [tool]}))
    assert "length <= 128" in str(told({"messages": [USER, HI], "tools": 129 * [TOOL]}))


def test_both_sides_of_a_pair_are_checked() -> None:
    pair = {"input": {"messages": [USER]}, "preferred_output": [HI], "non_preferred_output": [HI]}
    assert told(pair) is None
    assert "length >= 1), at non_preferred_output" in str(told(pair | {"non_preferred_output": []}))
    assert "length <= 1), at preferred_output" in str(told(pair | {"preferred_output": [HI, HI]}))
