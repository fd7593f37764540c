"""Chats in the form that a model's server or template takes: repairs that keep what is said.

`canonical` gives every engine the same messages and tools, whatever the agent's client wrote. The
repairs after it change who says what, so each is only made where a chat was refused without it.

    user "U", system "S", assistant "A"  →  user "U\\n\\nS", assistant "A"
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby
from typing import Any, Final, TypeAlias

import msgspec

from agentlightning.gateway.endpoints.base import thoughts_of
from agentlightning.gateway.endpoints.kinds import KINDS
from agentlightning.gateway.request import (
    NOT_JSON,
    CallRefused,
    CallRequest,
    custom_call,
    custom_function,
    function_call,
    of_data_url,
    text_part,
)

Messages: TypeAlias = list[dict[str, Any]]
Repair: TypeAlias = Callable[[Messages], Messages]

_PARTS: Final = KINDS["chat/completions"]["parts"]
_TOOLS: Final = KINDS["chat/completions"]["tools"]
_SYSTEM: Final = ("system", "developer")


def canonical(request: CallRequest) -> tuple[CallRequest, list[str]]:
    """(the request as engines are sent it, the names of what they are not sent): custom tools are
    functions, older forms of tool calls newer ones, plain text in files is text, and what is null
    or empty is left out.

    CallRefused (400) for a part that cannot be read."""
    dropped: set[str] = set()
    messages = _newer(
        [_message(position, message, dropped) for position, message in enumerate(request.messages)]
    )
    tools: list[dict[str, Any]] = []
    for position, tool in enumerate(request.tools):
        kind = _TOOLS.read_as(tool["type"], None, f"tools[{position}]", dropped)
        if kind == "custom":
            custom = tool["custom"]
            tools.append(
                custom_function(
                    custom["name"], custom.get("description"), _format(custom.get("format"))
                )
            )
        elif kind is not None:
            tools.append(tool)
    choice = request.tool_choice
    match choice:
        case {"type": "custom", "custom": {"name": str(name)}}:
            choice = {"type": "function", "function": {"name": name}}
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(allowed)},
        }:
            names = {_tool_name(tool) for tool in allowed}
            tools = [tool for tool in tools if tool["function"]["name"] in names]
            choice = mode
        case _:
            pass
    changed = msgspec.structs.replace(request, messages=messages, tools=tools, tool_choice=choice)
    return changed, sorted(dropped)


def _format(format: Any) -> dict[str, Any] | None:
    """The grammar of a custom tool, which chat completions wrap once more than responses do."""
    grammar = format.get("grammar", format) if isinstance(format, dict) else None
    return grammar if isinstance(grammar, dict) else None


def _tool_name(tool: Any) -> str | None:
    match tool:
        case {"type": "function", "function": {"name": str(name)}} | {
            "type": "custom",
            "custom": {"name": str(name)},
        }:
            return name
        case _:
            return None


def _message(position: int, message: dict[str, Any], dropped: set[str]) -> dict[str, Any]:
    plain = {
        name: value
        for name, value in message.items()
        if name == "content" or value not in (None, [])
    }
    if isinstance(plain.get("content"), list):
        plain["content"] = _content(f"messages[{position}].content", plain["content"], dropped)
    thoughts: Any = thoughts_of(plain)
    if isinstance(thoughts, str) and thoughts:
        # servers and templates know the one or the other
        plain["reasoning"] = plain["reasoning_content"] = thoughts
    if "tool_calls" in plain:
        plain["tool_calls"] = [
            _call(f"{position}_{number}", call) for number, call in enumerate(plain["tool_calls"])
        ]
    return plain


def _content(where: str, parts: list[dict[str, Any]], dropped: set[str]) -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = []
    for position, part in enumerate(parts):
        place = f"{where}[{position}]"
        kind = _PARTS.read_as(part.get("type"), part.get("text"), place, dropped)
        file = part.get("file")
        if kind == "file" and isinstance(file, dict) and isinstance(file.get("file_data"), str):
            read.append(of_data_url(place, file["file_data"], file.get("filename")))
        elif kind == "text" and part["type"] != "text":
            read.append(text_part(part["text"]))
        elif kind is not None:
            read.append(part)
    return read


def _call(name: str, call: dict[str, Any]) -> dict[str, Any]:
    call_id = call.get("id") or f"call_{name}"
    if isinstance(custom := call.get("custom"), dict):
        return custom_call(call_id, custom["name"], custom["input"])
    function = call.get("function")
    if not isinstance(function, dict):
        raise CallRefused("messages: a tool call needs a function, or custom", param="messages")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments or {}).decode()
    if (
        call.get("id") == call_id
        and call.get("type") == "function"
        and arguments == function.get("arguments")
    ):
        return call
    return function_call(call_id, function["name"], arguments)


def _newer(messages: Messages) -> Messages:
    """Calls of the older form, `function_call` and role `function`, as tool calls; and results that
    name no call get the first that waits for one."""
    # of which the first is found at once, whatever was taken out before
    waiting = OrderedDict[str, None]()
    newer: Messages = []
    for position, message in enumerate(messages):
        older = message.get("function_call")
        if isinstance(older, dict) and "tool_calls" not in message:
            message = {name: value for name, value in message.items() if name != "function_call"}
            message |= {"tool_calls": [_call(str(position), {"function": older})]}
        if message["role"] == "function" or (
            message["role"] == "tool" and "tool_call_id" not in message
        ):
            message = message | {
                "role": "tool",
                "tool_call_id": next(iter(waiting), f"call_{position}"),
            }
        if message["role"] == "tool":
            waiting.pop(str(message["tool_call_id"]), None)
        elif "tool_calls" in message:
            waiting = OrderedDict.fromkeys([str(call["id"]) for call in _calls(message)])
        newer.append(message)
    return newer


def as_system(messages: Messages) -> Messages:
    """Developers' messages as the system's: templates that do not know the role leave out what it
    says."""
    return [
        message | {"role": "system"} if message["role"] == "developer" else message
        for message in messages
    ]


def without_later_system(messages: Messages) -> Messages:
    """System messages behind the first are part of what the user says."""
    if not any(message["role"] in _SYSTEM for message in messages[1:]):
        return messages
    return merged([*messages[:1], *map(_as_user, messages[1:])])


def merged(messages: Messages) -> Messages:
    """Messages of users that follow each other are one."""
    joined: Messages = []
    for role, several in groupby(messages, key=lambda message: message["role"]):
        said = [*several]
        if role == "user" and len(said) > 1:
            said = [
                said[0] | {"content": _merged_content([message.get("content") for message in said])}
            ]
        joined += said
    return joined


def without_system(messages: Messages) -> Messages:
    """The system speaks as the user."""
    return merged([*map(_as_user, messages)])


def with_short_ids(messages: Messages) -> Messages:
    """Ids of calls as Mistral's templates demand them: nine letters or digits."""
    repaired: Messages = []
    for message in messages:
        if isinstance(message.get("tool_call_id"), str):
            message = message | {"tool_call_id": _short(message["tool_call_id"])}
        if calls := [call | {"id": _short(str(call.get("id")))} for call in _calls(message)]:
            message = message | {"tool_calls": calls}
        repaired.append(message)
    return repaired


def with_results_behind_calls(messages: Messages) -> Messages:
    """The results of calls come before what else was said meanwhile."""
    to_come = Counter(str(call.get("id")) for message in messages for call in _calls(message))
    results: dict[str, deque[dict[str, Any]]] = {}
    repaired: Messages = []
    for message in messages:
        if message["role"] == "tool" and (call_id := str(message.get("tool_call_id"))) in to_come:
            results.setdefault(call_id, deque()).append(message)
    for message in messages:
        if message["role"] != "tool" or str(message.get("tool_call_id")) not in results:
            repaired.append(message)
        for call in _calls(message):
            call_id = str(call.get("id"))
            to_come[call_id] -= 1
            several = results.get(call_id, deque())
            while several:
                repaired.append(several.popleft())
                if to_come[call_id]:  # some agents give an id again, to another call
                    break
    return repaired


def with_json_arguments(messages: Messages) -> Messages:
    """Arguments that are no JSON, such as those of a call that was cut off, as a JSON string:
    servers parse them."""
    repaired: Messages = []
    for message in messages:
        calls = [_with_json(call) for call in _calls(message)]
        repaired.append(message | {"tool_calls": calls} if calls else message)
    return repaired


def _with_json(call: dict[str, Any]) -> dict[str, Any]:
    arguments = (call.get("function") or {}).get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        msgspec.json.decode(arguments or "{}")
    except NOT_JSON:
        return call | {
            "function": call["function"] | {"arguments": msgspec.json.encode(arguments).decode()}
        }
    return call


REPAIRS: Final[tuple[Repair, ...]] = (
    without_later_system,
    merged,
    with_results_behind_calls,
    with_short_ids,
    as_system,
    without_system,
)
"""In the order in which they are tried."""


def tries(
    messages: Messages, known: Sequence[Repair] = ()
) -> Iterator[tuple[Messages, Repair | None]]:
    """The chats to try, one after another, until one is not refused: as it is, with the repairs
    that helped others (`known`), then each with one more, which is named.

    No chat is changed because another was refused: those who make that one may be somebody else."""
    yield messages, None
    repaired = messages
    for repair in known:
        repaired = repair(repaired)
    if repaired != messages:
        messages = repaired
        yield messages, None
    for repair in REPAIRS:
        repaired = repair(messages)
        if repaired != messages:
            messages = repaired
            yield messages, repair


_SAYS_WHY: Final = re.compile(
    r"\bsystem\W+(?:message|prompt|instruction|turn)|developer|\brole|alternat|tool.?call|template|jinja",
    re.IGNORECASE,
)


def may_be_repaired(refusal: str) -> bool:
    """Whether a server's refusal is about who says what, or about tool calls."""
    return _SAYS_WHY.search(refusal) is not None


def _calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    return message.get("tool_calls") or []


def _as_user(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"role": "user"} if message["role"] in _SYSTEM else message


def _merged_content(contents: list[Any]) -> Any:
    parts: list[Any] = []
    for texts, several in groupby(contents, key=lambda content: isinstance(content, str)):
        said = [content for content in several if content is not None]
        parts += [text_part("\n\n".join(said))] if texts else chain.from_iterable(said)
    return parts[0]["text"] if all(isinstance(content, str) for content in contents) else parts


def _short(call_id: str) -> str:
    if len(call_id) == 9 and call_id.isalnum():
        return call_id
    return hashlib.blake2b(call_id.encode(), digest_size=5).hexdigest()[:9]
