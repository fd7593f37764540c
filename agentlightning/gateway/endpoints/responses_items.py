"""Items of OpenAI's responses ↔ messages of a chat.

    user "U"                                            ↔  user "U"
    reasoning R, assistant "A", function_call 1 and 2   ↔  assistant "A", reasoning_content R, tool_calls [1, 2]
    function_call_output 1                              →  tool (1)

Knows both forms and nothing else: no requests, no streams, no HTTP server.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

import msgspec

from agentlightning.gateway.answer import Choice
from agentlightning.gateway.request import CallRefused

# --- input items → messages ---------------------------------------------------------------------------------------


class _Part(msgspec.Struct):
    type: Literal["input_text", "output_text", "text", "refusal", "input_image", "reasoning_text", "summary_text"]
    text: str = ""
    refusal: str = ""
    image_url: str | None = None
    detail: str | None = None


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Part]


class _Reasoning(msgspec.Struct):
    content: list[_Part] | None = None
    summary: list[_Part] | None = None
    encrypted_content: str | None = None


class _FunctionCall(msgspec.Struct):
    call_id: str
    name: str
    arguments: str


class _FunctionCallOutput(msgspec.Struct):
    call_id: str
    output: str | list[_Part]


_Item: TypeAlias = _Message | _Reasoning | _FunctionCall | _FunctionCallOutput
_ITEMS: Final[dict[str, type[_Item]]] = {
    "message": _Message,
    "reasoning": _Reasoning,
    "function_call": _FunctionCall,
    "function_call_output": _FunctionCallOutput,
}


def chat_messages(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages that `input` stands for; what the assistant said and called in one turn is one message.

    CallRefused (400) names the item that is malformed or of a kind that has no chat form."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    for position, raw in enumerate(given):
        where = f"input[{position}]"
        match _item(where, raw):
            case _Message("assistant", content):
                _say(messages, content if isinstance(content, str) else _text(content))
            case _Message(role, content):
                messages.append({"role": role, "content": _content(where, content)})
            case _Reasoning() as item:
                _think(where, messages, item)
            case _FunctionCall(call_id, name, arguments):
                call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
                _turn(messages).setdefault("tool_calls", []).append(call)
            case _FunctionCallOutput(call_id, output):
                messages.append({"role": "tool", "tool_call_id": call_id, "content": _content(where, output)})
    return messages


def _item(where: str, raw: dict[str, Any]) -> _Item:
    kind = raw.get("type") or "message"
    if not isinstance(kind, str) or kind not in _ITEMS:
        raise CallRefused(f"{where} is of type {kind!r}; only {', '.join(_ITEMS)} can be read here", param=where)
    try:
        return msgspec.convert(raw, _ITEMS[kind])
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        where += place.removesuffix("`")
        raise CallRefused(f"{where} cannot be used: {what}", param=where) from None


def _turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's turn that is under way, or a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _say(messages: list[dict[str, Any]], text: str) -> None:
    """Text after text is a turn of its own; after a call whose result has not come it belongs to that turn."""
    turn = _turn(messages)
    if turn["content"] is not None and "tool_calls" not in turn:
        messages.append({"role": "assistant", "content": text})
    else:
        turn["content"] = (turn["content"] or "") + text


def _think(where: str, messages: list[dict[str, Any]], item: _Reasoning) -> None:
    thought = _text(item.content or item.summary or [])
    if not thought and item.encrypted_content:
        message = f"{where} is encrypted by another server and cannot be read here; leave it out, or send its text"
        raise CallRefused(message, param=where)
    if not thought:
        return
    turn: dict[str, Any] = _turn(messages)
    if turn["content"] is not None or "tool_calls" in turn:
        turn = {"role": "assistant", "content": None}
        messages.append(turn)
    turn["reasoning_content"] = turn.get("reasoning_content", "") + thought


def _text(parts: list[_Part]) -> str:
    return "".join(part.text or part.refusal for part in parts)


def _content(where: str, content: str | list[_Part]) -> str | list[dict[str, Any]]:
    """A message's content: a single text as it is, several parts as parts."""
    if isinstance(content, str):
        return content
    if len(content) == 1 and content[0].type != "input_image":
        return _text(content)
    return [_chat_part(where, part) for part in content]


def _chat_part(where: str, part: _Part) -> dict[str, Any]:
    if part.type != "input_image":
        return {"type": "text", "text": part.text or part.refusal}
    if part.image_url is None:
        raise CallRefused(f"{where} has an image without image_url; files are not kept here", param=where)
    detail = {} if part.detail is None else {"detail": part.detail}
    return {"type": "image_url", "image_url": {"url": part.image_url, **detail}}


# --- answer → output items ----------------------------------------------------------------------------------------

Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]
TextKind: TypeAlias = Literal["reasoning_text", "output_text", "refusal"]


def item_id(response_id: str, kind: str, position: int) -> str:
    """The id of the item at this position of a response's output."""
    prefix = {"reasoning_text": "rs", "function_call": "fc"}.get(kind, "msg")
    return f"{prefix}_{response_id.removeprefix('resp_')}_{position}"


def text_part(kind: TextKind, text: str, logprobs: list[Any]) -> dict[str, Any]:
    match kind:
        case "output_text":
            return {"type": kind, "text": text, "annotations": [], "logprobs": logprobs}
        case "reasoning_text":
            return {"type": kind, "text": text}
        case "refusal":
            return {"type": kind, "refusal": text}


def text_item(id: str, kind: TextKind, parts: list[dict[str, Any]], status: Status) -> dict[str, Any]:
    """A reasoning item, or a message."""
    if kind == "reasoning_text":
        return {"id": id, "type": "reasoning", "summary": [], "content": parts, "status": status}
    return {"id": id, "type": "message", "role": "assistant", "content": parts, "status": status}


def call_item(id: str, call_id: str, name: str, arguments: str, status: Status) -> dict[str, Any]:
    return {
        "id": id,
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": status,
    }


def output_items(response_id: str, choice: Choice, status: Status) -> list[dict[str, Any]]:
    """The items of a whole answer; `status` is that of the last. An answer without any is one empty message."""
    texts: dict[TextKind, str] = {
        "reasoning_text": choice.string("reasoning_content") or choice.string("reasoning"),
        "output_text": choice.string("content"),
        "refusal": choice.string("refusal"),
    }
    if not choice.tool_calls and not any(texts.values()):
        part = text_part("output_text", "", choice.logprob_entries)
        return [text_item(item_id(response_id, "output_text", 0), "output_text", [part], status)]
    items: list[dict[str, Any]] = []
    for kind, text in texts.items():
        if text:
            part = text_part(kind, text, choice.logprob_entries)
            items.append(text_item(item_id(response_id, kind, len(items)), kind, [part], "completed"))
    for call in choice.tool_calls:
        id, function = item_id(response_id, "function_call", len(items)), call["function"]
        items.append(call_item(id, call["id"], function["name"], function["arguments"], "completed"))
    items[-1]["status"] = status
    return items
