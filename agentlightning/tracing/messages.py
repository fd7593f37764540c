"""The messages of an LLM call and its token counts, in any dialect of its span.

The one form that comes out is that of chat completions: `{"role": …, "content": …, "tool_calls": […]}`. This module
knows attribute names. It does not know calls that were merged, attempts or rewards.

| dialect | messages | tokens |
|---|---|---|
| ours, OpenTelemetry | `gen_ai.input.messages` as JSON, with `content` or with `parts` | `gen_ai.usage.*` |
| OpenInference | `llm.input_messages.0.message.role` … | `llm.token_count.*` |
| Traceloop | `gen_ai.prompt.0.role`, `gen_ai.completion.0.role` … | `gen_ai.usage.*` |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from agentlightning import semconv
from agentlightning.tracing.attributes import nested
from agentlightning.tracing.dialects import MODEL_NAMES, items, json_of, mapping, texts
from agentlightning.types import Attributes

_INPUT_TOKENS: Final = (semconv.GEN_AI_INPUT_TOKENS, "gen_ai.usage.prompt_tokens", "llm.token_count.prompt")
_OUTPUT_TOKENS: Final = (semconv.GEN_AI_OUTPUT_TOKENS, "gen_ai.usage.completion_tokens", "llm.token_count.completion")


def input_messages(attributes: Attributes) -> list[dict[str, Any]]:
    """The messages sent to the model; empty if the span has none."""
    return _messages(attributes, semconv.GEN_AI_INPUT_MESSAGES, "llm.input_messages", "gen_ai.prompt")


def output_messages(attributes: Attributes) -> list[dict[str, Any]]:
    """The model's answer, one message per choice; empty if the span has none."""
    return _messages(attributes, semconv.GEN_AI_OUTPUT_MESSAGES, "llm.output_messages", "gen_ai.completion")


def model_name(attributes: Attributes) -> str | None:
    """The model that answered, or else the requested one."""
    return next((name for key in MODEL_NAMES if isinstance(name := attributes.get(key), str) and name), None)


def token_counts(attributes: Attributes) -> tuple[int, int] | None:
    """(tokens read, tokens written); None if the span has neither."""
    read, written = (_first_integer(attributes, names) for names in (_INPUT_TOKENS, _OUTPUT_TOKENS))
    return None if read is None and written is None else (read or 0, written or 0)


def finish_reasons(attributes: Attributes) -> list[str]:
    value = attributes.get(semconv.GEN_AI_FINISH_REASONS, ())
    if isinstance(value, str):  # some write the list as JSON
        return [str(reason) for reason in items(json_of(value))] or [value]
    return [str(reason) for reason in value] if isinstance(value, Sequence) else []


def content_text(content: object) -> str:
    """The text of a message's content, with the type of each part that has none (images); other values as JSON."""
    return " ".join(texts(content, others=True)) if isinstance(content, str | list) else _text(content)


def _first_integer(attributes: Attributes, names: Sequence[str]) -> int | None:
    return next((value for name in names if type(value := attributes.get(name)) is int), None)


def _messages(attributes: Attributes, as_json: str, openinference: str, traceloop: str) -> list[dict[str, Any]]:
    text = attributes.get(as_json)
    if isinstance(text, str):
        value = json_of(text)
        messages = [{"role": "user", "content": value}] if isinstance(value, str) else items(value)
        return [chat for message in messages if isinstance(message, dict) for chat in _of_parts(message)]
    entries = [mapping(entry.get("message")) for entry in _entries(nested(attributes, openinference))]
    return [_of_entries(entry) for entry in entries or _entries(nested(attributes, traceloop)) if entry]


def _entries(node: Any) -> list[dict[str, Any]]:
    """The values of `{"0": …, "1": …}` in the order of their numbers."""
    group = mapping(node)
    numbers = sorted(filter(str.isdecimal, group), key=lambda index: (len(index), index))
    return [group[index] for index in numbers if isinstance(group[index], dict)]


def _of_parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    """A message with OpenTelemetry's `parts`; one without is already in our form. Several tool results become one
    message each."""
    parts = message.get("parts")
    if not isinstance(parts, list):
        return [message]
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for part in parts:
        match part:
            case {"type": "text", "content": str(text)}:
                texts.append(text)
            case {"type": "tool_call", "name": str(name)}:
                calls.append(_tool_call(part.get("id"), name, part.get("arguments")))
            case {"type": "tool_call_response"}:
                content = _text(part.get("response", part.get("result")))
                results.append({"role": "tool", "tool_call_id": part.get("id"), "content": content})
            case _:
                pass
    if results and not texts and not calls:
        return results
    chat: dict[str, Any] = {"role": message.get("role", "user"), "content": "\n".join(texts)}
    return [chat | ({"tool_calls": calls} if calls else {}), *results]


def _of_entries(message: dict[str, Any]) -> dict[str, Any]:
    parts = [mapping(entry.get("message_content")) for entry in _entries(message.get("contents"))]
    texts = [str(part["text"]) for part in parts if "text" in part]
    chat: dict[str, Any] = {
        "role": message.get("role", "assistant"),
        "content": message.get("content", "\n".join(texts) if texts else None),
    }
    chat |= {name: message[name] for name in ("name", "tool_call_id") if name in message}
    calls: list[dict[str, Any]] = []
    for entry in _entries(message.get("tool_calls")):
        call = mapping(entry.get("tool_call")) or entry
        function = mapping(call.get("function")) or call
        calls.append(_tool_call(call.get("id"), function.get("name"), function.get("arguments")))
    return chat | ({"tool_calls": calls} if calls else {})


def _tool_call(call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": _text(arguments, "{}")}}


def _text(value: Any, nothing: str = "") -> str:
    return value if isinstance(value, str) else nothing if value is None else msgspec.json.encode(value).decode()
