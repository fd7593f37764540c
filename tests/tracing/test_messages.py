"""Whatever instrumentation wrote a span of an LLM call, what was said in it reads the same."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from agentlightning import semconv
from agentlightning.tracing.dialects import (
    finish_reasons,
    input_messages,
    model_name,
    output_messages,
    token_counts,
)
from agentlightning.types import Attributes

CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "search", "arguments": '{"to":"Oslo"}'},
}
SENT = [
    {"role": "user", "content": "Fly me"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3 flights", "tool_call_id": "c1"},
]

OPENINFERENCE: Attributes = {
    "llm.model_name": "gpt-5",
    "llm.token_count.prompt": 7,
    "llm.token_count.completion": 2,
    "llm.input_messages.0.message.role": "user",
    "llm.input_messages.0.message.contents.0.message_content.type": "text",
    "llm.input_messages.0.message.contents.0.message_content.text": "Fly me",
    "llm.input_messages.1.message.role": "assistant",
    "llm.input_messages.1.message.tool_calls.0.tool_call.id": "c1",
    "llm.input_messages.1.message.tool_calls.0.tool_call.function.name": "search",
    "llm.input_messages.1.message.tool_calls.0.tool_call.function.arguments": '{"to":"Oslo"}',
    "llm.input_messages.2.message.role": "tool",
    "llm.input_messages.2.message.content": "3 flights",
    "llm.input_messages.2.message.tool_call_id": "c1",
    "llm.output_messages.0.message.role": "assistant",
    "llm.output_messages.0.message.content": "Done",
}
TRACELOOP: Attributes = {
    "gen_ai.response.model": "gpt-5",
    "gen_ai.usage.prompt_tokens": 7,
    "gen_ai.usage.completion_tokens": 2,
    "gen_ai.prompt.0.role": "user",
    "gen_ai.prompt.0.content": "Fly me",
    "gen_ai.prompt.1.role": "assistant",
    "gen_ai.prompt.1.tool_calls.0.id": "c1",
    "gen_ai.prompt.1.tool_calls.0.name": "search",
    "gen_ai.prompt.1.tool_calls.0.arguments": '{"to":"Oslo"}',
    "gen_ai.prompt.2.role": "tool",
    "gen_ai.prompt.2.content": "3 flights",
    "gen_ai.prompt.2.tool_call_id": "c1",
    "gen_ai.completion.0.role": "assistant",
    "gen_ai.completion.0.content": "Done",
}


def opentelemetry(sent: list[dict[str, Any]], answered: list[dict[str, Any]]) -> Attributes:
    return {
        semconv.GEN_AI_REQUEST_MODEL: "gpt-5",
        semconv.GEN_AI_INPUT_TOKENS: 7,
        semconv.GEN_AI_OUTPUT_TOKENS: 2,
        semconv.GEN_AI_INPUT_MESSAGES: msgspec.json.encode(sent).decode(),
        semconv.GEN_AI_OUTPUT_MESSAGES: msgspec.json.encode(answered).decode(),
    }


def part(role: str, **content: Any) -> dict[str, Any]:
    return {"role": role, "parts": [content]}


PARTS = opentelemetry(
    [
        part("user", type="text", content="Fly me"),
        part("assistant", type="tool_call", id="c1", name="search", arguments={"to": "Oslo"}),
        part("tool", type="tool_call_response", id="c1", response="3 flights"),
    ],
    [part("assistant", type="text", content="Done") | {"finish_reason": "stop"}],
)
OURS = opentelemetry(SENT, [{"role": "assistant", "content": "Done"}])


@pytest.mark.parametrize(
    "attributes", [OPENINFERENCE, TRACELOOP, PARTS, OURS], ids=["oi", "tl", "parts", "ours"]
)
def test_all_dialects_say_the_same(attributes: Attributes) -> None:
    said = [
        {**message, "content": message["content"] or None} for message in input_messages(attributes)
    ]
    assert said == SENT
    assert output_messages(attributes) == [{"role": "assistant", "content": "Done"}]
    assert token_counts(attributes) == (7, 2)
    assert model_name(attributes) == "gpt-5"


def test_what_is_not_said_is_empty() -> None:
    nothing: Attributes = {
        "llm.input_messages": "x",
        "gen_ai.prompt.first.role": "user",
        "http.status": 200,
    }
    assert input_messages(nothing) == output_messages(nothing) == []
    assert (
        token_counts(nothing) is None
        and model_name(nothing) is None
        and finish_reasons(nothing) == []
    )


@pytest.mark.parametrize("text", ["{", "3", '"hi"', "[1]", '{"role": "user"}'])
def test_json_of_another_shape_breaks_nothing(text: str) -> None:
    assert len(input_messages({semconv.GEN_AI_INPUT_MESSAGES: text})) == (text == '"hi"')


@pytest.mark.parametrize("value", [["stop"], '["stop"]', "stop"])
def test_finish_reasons_are_read_as_list_json_and_word(value: Any) -> None:
    assert finish_reasons({semconv.GEN_AI_FINISH_REASONS: value}) == ["stop"]


def test_odd_names_break_nothing_and_numbers_of_any_length_put_messages_in_order() -> None:
    both: Attributes = {
        "gen_ai.prompt.0": "x",
        "gen_ai.prompt.0.role": "user",
        "gen_ai.prompt.1.role": "user",
    }
    assert input_messages(both) == [{"role": "user", "content": None}]
    numbers = ["10", "9" * 5000, "2"]
    attributes: Attributes = {
        f"llm.input_messages.{number}.message.role": number for number in numbers
    }
    assert [message["role"] for message in input_messages(attributes)] == ["2", "10", "9" * 5000]
