"""Reads messages in the forms in which tools write them as those of chat completions:
`{"role": …, "content": …, "tool_calls": […]}`.

It sees JSON values and the names and attributes of events; `tracing.dialects` knows in which
attributes they are.

| form | written by |
|---|---|
| `{"role", "parts": [{"type", "content"}]}` | OpenTelemetry |
| `{"role", "content": [{"type": "tool-call" …}]}` | the Vercel AI SDK, Anthropic |
| `{"0": {"role", "content"}}`, from numbered attributes | OpenInference, Traceloop |
| `{"kwargs": {"type": "human", "content"}}` | LangChain |
| `{"messages": …}`, `{"choices": …}`, `{"generations": …}` | Langfuse, LangSmith, MLflow |
| events `gen_ai.user.message`, `gen_ai.choice` … | OpenTelemetry before 1.37, Logfire |
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple, cast

import msgspec

Message = dict[str, Any]

_ROLES: Final = {
    "human": "user",
    "ai": "assistant",
    "AIMessageChunk": "assistant",
    "model": "assistant",
}
# of LangChain's messages, instead of a role
_TYPES: Final = (*_ROLES, "system", "user", "assistant", "tool")
_CALLS: Final = ("tool_call", "tool-call", "tool_use", "function_call")
_RESULTS: Final = ("tool_call_response", "tool-result", "tool_result", "function_call_output")
_TEXTS: Final = (None, "text", "input_text", "output_text")
_WRAPPERS: Final = (
    "messages",
    "prompt",
    "input",
    "choices",
    "generations",
    "output",
    "message",
    "text",
)
_LEVELS: Final = 8  # of wrapping
_CALL_IDS: Final = ("id", "toolCallId", "call_id", "tool_call_id", "tool_use_id")
_EVENT_ROLES: Final = {
    f"gen_ai.{role}.message": role for role in ("system", "user", "assistant", "tool")
}


def messages_in(value: Any, role: str, levels: int = _LEVELS) -> list[Message]:
    """The messages of a request or an answer in any of these forms. Plain text is one message of
    `role`; what holds no message gives none."""
    if isinstance(value, str):
        return [{"role": role, "content": value}] if value else []
    if levels == 0:
        return []
    if isinstance(value, list):
        return [message for item in items(value) for message in messages_in(item, role, levels - 1)]
    body = mapping(value)
    if not body:
        return []
    body = mapping(body.get("kwargs")) or body
    if body.get("type") in (*_CALLS, *_RESULTS):
        return of_parts({"role": "assistant", "parts": [body]})
    if isinstance(body.get("role"), str) or body.get("type") in _TYPES:
        return of_parts(_chat(body))
    system = messages_in(body.get("system"), "system", levels - 1)
    found = next(
        (inner for name in _WRAPPERS if (inner := messages_in(body.get(name), role, levels - 1))),
        [],
    )
    return [*system, *found]


def of_parts(message: Message) -> list[Message]:
    """A message whose `parts`, or whose content, hold tool calls or results; any other is returned
    unchanged. Several tool results become one message each."""
    parts = message.get("parts")
    if not isinstance(parts, list):
        parts = [mapping(part) for part in items(message.get("content"))]
        if not any(part.get("type") in (*_CALLS, *_RESULTS) for part in parts):
            return [message]
    texts: list[str] = []
    calls: list[Message] = []
    results: list[Message] = []
    for part in (mapping(part) for part in items(parts)):
        kind = part.get("type")
        if kind in _CALLS and isinstance(_first(part, "name", "toolName"), str):
            calls.append(tool_call(part))
        elif kind in _RESULTS:
            content = _result(_first(part, "response", "result", "output", "content"))
            results.append(
                {"role": "tool", "tool_call_id": _first(part, *_CALL_IDS), "content": content}
            )
        elif kind in _TEXTS and isinstance(text := _first(part, "content", "text"), str):
            texts.append(text)
    if results and not texts and not calls:
        return results
    chat: Message = {"role": message.get("role", "user"), "content": "\n".join(texts)}
    return [chat | ({"tool_calls": calls} if calls else {}), *results]


def of_entries(message: Message) -> Message:
    """A message of OpenInference's or Traceloop's numbered attributes."""
    parts = [mapping(entry.get("message_content")) for entry in entries(message.get("contents"))]
    texts = [str(part["text"]) for part in parts if "text" in part]
    chat: Message = {
        "role": message.get("role", "assistant"),
        "content": message.get("content", "\n".join(texts) if texts else None),
    }
    chat |= {name: message[name] for name in ("name", "tool_call_id") if name in message}
    calls = [
        tool_call(mapping(entry.get("tool_call")) or entry)
        for entry in entries(message.get("tool_calls"))
    ]
    return chat | ({"tool_calls": calls} if calls else {})


def entries(node: Any) -> list[Message]:
    """The values of `{"0": …, "1": …}` in the order of their numbers."""
    group = mapping(node)
    numbers = sorted(filter(str.isdecimal, group), key=lambda index: (len(index), index))
    return [group[index] for index in numbers if isinstance(group[index], dict)]


def tool_call(call: Message) -> Message:
    """A tool call in the form of chat completions, from any other."""
    function = mapping(call.get("function")) or call
    arguments = _first(function, "arguments", "input", "args")
    named = {"name": _first(function, "name", "toolName"), "arguments": as_text(arguments, "{}")}
    return {"id": _first(call, *_CALL_IDS), "type": "function", "function": named}


class Said(NamedTuple):
    """The messages sent to a model, and its answers."""

    sent: list[Message]
    answered: list[Message]


def said_in_events(events: Iterable[tuple[str, Mapping[str, Any]]]) -> Said:
    """The messages in a call's events, by name and attributes."""
    said = Said([], [])
    for name, attributes in events:
        body = {**attributes, **mapping(json_of(attributes.get("gen_ai.event.content")))}
        if name == "gen_ai.choice":
            said.answered.extend(messages_in(decoded(body.get("message", body)), "assistant"))
        elif role := _EVENT_ROLES.get(name):
            about = {"tool_call_id": body.get("id")} if role == "tool" else {}
            said.sent.extend(messages_in({"role": role, **about, **body}, role))
        else:
            for into, role, names in (
                (said.sent, "user", ("gen_ai.input.messages", "gen_ai.prompt")),
                (said.answered, "assistant", ("gen_ai.output.messages", "gen_ai.completion")),
            ):
                into.extend(messages_in(decoded(_first(body, *names)), role))
    return said


def decoded(value: Any) -> Any:
    """A JSON object, list or text in this text; else the value unchanged."""
    found = json_of(value) if isinstance(value, str) else None
    return found if isinstance(found, dict | list | str) else value


def json_of(text: Any) -> Any:
    """Decoded JSON; None for anything else, such as texts that were cut to fit."""
    if not text or not isinstance(text, str):
        return None
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):
        pass
    try:
        return json.loads(text)  # slower, and takes the NaN that Python writes
    except (ValueError, RecursionError):
        return None


def mapping(value: object) -> dict[str, Any]:
    """`value` if it is a JSON object, else an empty one."""
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def items(value: object) -> list[Any]:
    """`value` if it is a JSON array, else an empty one."""
    return cast(list[Any], value) if isinstance(value, list) else []


def as_text(value: Any, nothing: str = "") -> str:
    """Text unchanged, any other value as JSON, and `nothing` for None."""
    if value is None:
        return nothing
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _chat(body: Message) -> Message:
    """A message with a role, or with LangChain's type instead; fields of other tools are left
    out."""
    if isinstance(body.get("parts"), list):
        return body
    role = str(body.get("role") or body.get("type"))
    chat: Message = {"role": _ROLES.get(role, role), "content": body.get("content")}
    chat |= {name: body[name] for name in ("name", "tool_call_id") if body.get(name)}
    calls = items(decoded(body.get("tool_calls"))) or items(
        mapping(body.get("additional_kwargs")).get("tool_calls")
    )
    if calls:
        chat["tool_calls"] = [tool_call(mapping(call)) for call in calls]
    return chat


def _result(value: Any) -> str:
    """A tool's result: text, typed values or parts as text."""
    if isinstance(value, dict) and mapping(value).keys() == {"type", "value"}:
        return as_text(mapping(value)["value"])
    parts = [mapping(part).get("text") for part in items(value)]
    texts = [text for text in parts if isinstance(text, str)]
    return "\n".join(texts) if texts and len(texts) == len(parts) else as_text(value)


def _first(body: Mapping[str, Any], *names: str) -> Any:
    return next((value for name in names if (value := body.get(name)) is not None), None)
