"""Calls of any protocol are read as one form of chat, and chained where each was sent all that came
before it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentlightning.data.agents import agent_pattern
from agentlightning.data.call_filter import (
    FROZEN,
    NOT_RECEIVED,
    OTHER_AGENT,
    OTHER_MODEL,
    TRUNCATED,
)
from agentlightning.data.conversations import (
    EARLIER_ELSEWHERE,
    FAILED,
    NOT_RECORDED,
    chat_messages,
    conversations,
    read_calls,
)
from agentlightning.types import Span
from tests.data.recordings import SYSTEM, TOOL, asks_for, call, says, tool_says

USER = says("user", "hello")
HI = says("assistant", "hi")


def learned(spans: list[Span], **wanted: Any) -> list[str | None]:
    return [one.unlearnable for one in read_calls(spans, **wanted)[0]]


@pytest.mark.parametrize(
    "history",
    [[USER, says("assistant", "hi!"), USER], [says("user", "shortened"), HI, USER]],
    ids=["an answer that was edited", "a history that was"],
)
def test_what_was_not_sent_as_it_was_said_is_not_continued(history: list[Any]) -> None:
    calls, _ = read_calls([call(0, [USER], HI), call(1, history, HI)])
    assert len(conversations(calls)) == 2


def test_other_ids_of_tool_calls_and_other_spaces_in_arguments_change_nothing() -> None:
    first = call(0, [USER], asks_for("call_1", '{"q":"sun"}'))
    second = call(1, [USER, asks_for("x9", '{ "q": "sun" }'), tool_says("x9", "warm")], HI)
    calls, _ = read_calls([second, first])
    assert len(conversations(calls)) == 1


def test_why_nothing_is_learned_from_an_answer_is_said() -> None:
    spans = [
        call(0, [USER], HI),
        call(1, [USER], HI, CALL_TRAINABLE=False),
        call(2, [USER], HI, CALL_FLAG="client disconnected"),
        call(3, [USER], HI, GEN_AI_FINISH_REASONS=["length"]),
        call(4, [USER], HI, CALL_DISCARDS=[0]),
    ]
    assert learned(spans) == [NOT_RECEIVED, FROZEN, FAILED, TRUNCATED, None]
    assert learned(spans, models=frozenset({"gpt"})) == [
        NOT_RECEIVED,
        OTHER_MODEL,
        FAILED,
        OTHER_MODEL,
        OTHER_MODEL,
    ]
    # a frozen model that is named teaches
    assert learned([spans[1]], models=frozenset({"policy"})) == [None]
    assert learned([spans[4]], agents=agent_pattern("writer")) == [OTHER_AGENT]


def test_calls_that_cannot_be_read_are_reported() -> None:
    unseen = call(0, [USER], HI, GEN_AI_INPUT_MESSAGES=None)
    stored = {"CALL_REQUEST": '{"previous_response_id": "resp_0"}', "CALL_RESPONSE": "{}"}
    assert read_calls([unseen, call(1, [USER], HI, **stored)])[1] == [
        NOT_RECORDED,
        EARLIER_ELSEWHERE,
    ]
    assert read_calls(
        [call(0, "x", HI, CALL_ENDPOINT="embeddings", GEN_AI_OPERATION="embeddings")]
    ) == ([], [])


def test_what_a_hosted_server_was_asked_in_its_own_protocol_is_read_too() -> None:
    """Responses' items and Anthropic's blocks, as they stand in spans of requests that were passed
    through."""
    wanted = [SYSTEM, says("user", "weather"), asks_for("c1"), tool_says("c1", "warm")]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "weather"}]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "search", "arguments": '{"q": "sun"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "warm"},
    ]
    blocks = [
        {"role": "user", "content": "weather"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c1", "name": "search", "input": {"q": "sun"}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [says("", "")]}],
        },
    ]
    blocks[2]["content"][0]["content"] = [{"type": "text", "text": "warm"}]  # type: ignore[index]
    openai = call(
        0,
        items,
        HI,
        CALL_REQUEST='{"instructions": "Be brief."}',
        GEN_AI_TOOL_DEFINITIONS=json.dumps(
            [{"type": "function", "name": "search", "parameters": {"type": "object"}}]
        ),
    )
    anthropic = call(
        1,
        blocks,
        HI,
        CALL_REQUEST='{"system": [{"type": "text", "text": "Be brief."}]}',
        GEN_AI_TOOL_DEFINITIONS=json.dumps(
            [{"name": "search", "input_schema": {"type": "object"}}]
        ),
    )
    for one in read_calls([openai, anthropic])[0]:
        assert [*map(spaceless, one.messages)] == [*map(spaceless, wanted)] and one.tools == [TOOL]


def spaceless(message: dict[str, Any]) -> str:
    return json.dumps(message).replace(" ", "")


def test_images_and_failed_results_keep_their_meaning() -> None:
    image = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": "AA=="},
    }
    failed = {"type": "tool_result", "tool_use_id": "c1", "content": "no", "is_error": True}
    result, shown = chat_messages(
        [{"role": "user", "content": [image, failed, {"type": "text", "text": "look"}]}]
    )
    assert result == tool_says("c1", "Error: no")
    assert shown["content"] == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
        {"type": "text", "text": "look"},
    ]
