"""The items and tools of a request for a response, in the form of chat completions.

Knows that part of the wire format. No backends, no rollouts, no HTTP server.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec

from agentlightning.gateway.endpoints.base import chat_of, content_of, thoughts_of
from agentlightning.gateway.endpoints.kinds import KINDS
from agentlightning.gateway.request import (
    FILES_NOT_KEPT,
    NOT_JSON,
    OBJECT,
    SOME,
    CallRefused,
    attached,
    check_parts,
    converted,
    custom_call,
    custom_function,
    function,
    function_call,
    image,
    of_data_url,
    text_part,
)

_ITEMS: Final = KINDS["responses"]["items"]
_PARTS: Final = KINDS["responses"]["parts"]
_TOOLS: Final = KINDS["responses"]["tools"]
_OBJECTS: Final = msgspec.json.Decoder(list[dict[str, Any]])
_MOST_REFERENCED: Final = 32 << 20  # bytes of the items that one request refers to
_NO_FORM: Final = "give 'auto', 'none', 'required' or a function's name"


class AgentTool(NamedTuple):
    """A tool as the agent knows it. The input of a `custom` one is free text."""

    name: str
    namespace: str | None = None
    custom: bool = False


class _Tool(msgspec.Struct):
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]], SOME] = []


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[dict[str, Any]]


class _Reasoning(msgspec.Struct):
    content: list[dict[str, Any]] | None = None
    summary: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None


class _Call(msgspec.Struct):
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class _CustomCall(msgspec.Struct):
    call_id: str
    name: str
    input: str
    namespace: str | None = None


class _Output(msgspec.Struct):
    """The output of a tool, whose call is named in one of two places."""

    call_id: str | None = None
    id: str | None = None
    output: Any = None
    status: str | None = None


class _Offer(msgspec.Struct):
    tools: Annotated[list[dict[str, Any]], SOME] = []


class _Part(msgspec.Struct):
    text: str = ""
    refusal: str = ""
    image_url: str | None = None
    detail: str | None = None
    file_data: str | None = None
    filename: str | None = None
    input_audio: _Audio | None = None


class _Audio(msgspec.Struct):
    data: str
    format: str


# Calls of tools that OpenAI's models know, and the agent runs: the name of the function, and where
# its arguments are.
_KNOWN_CALLS: Final = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
}


class ItemReader:
    """Reads items and the tools that are offered beside and among them. `tools` are the agent's, by
    the names of the model's functions; `dropped` has the names of what is left out."""

    def __init__(self) -> None:
        self.tools: dict[str, AgentTool] = {}
        self.dropped: set[str] = set()
        self._functions: dict[AgentTool, dict[str, Any]] = {}
        self._names: dict[AgentTool, str] = {}

    def offer(self, place: str, tools: list[dict[str, Any]], namespace: str | None = None) -> None:
        """Add tools; of one that is offered again the latest form counts. CallRefused (400) for one
        that is malformed, or refused."""
        for position, raw in enumerate(tools):
            where = f"{place}[{position}]"
            kind = _TOOLS.read_as(raw.get("type", "function"), None, where, self.dropped)
            if kind is None:
                continue
            tool = converted(where, raw, _Tool)
            if kind == "namespace":
                if namespace is not None:
                    raise CallRefused(f"{where}: a namespace cannot hold another", param=where)
                self.offer(f"{where}.tools", tool.tools, tool.name)
                continue
            if not tool.name:
                raise CallRefused(f"{where} has no name", param=where)
            known = AgentTool(tool.name, namespace, kind == "custom")
            name = self._named(known)
            if name in self.tools and known not in self._names:
                name = f"{name}_{len(self.tools)}"  # two tools that would have one name
            self.tools[name] = known
            self._names[known] = name
            if known.custom:
                self._functions[known] = custom_function(name, tool.description, tool.format)
            else:
                self._functions[known] = function(
                    name, tool.description, tool.parameters, tool.strict
                )

    def _named(self, tool: AgentTool) -> str:
        """The model's name for a tool."""
        flat = tool.name if tool.namespace is None else f"{tool.namespace}__{tool.name}"
        return self._names.get(tool, flat)

    def chosen(self, choice: Any) -> tuple[list[dict[str, Any]], Any]:
        """(the functions that may be called, the choice among them). CallRefused (400) for another
        choice."""
        functions = [*self._functions.values()]
        flat: dict[tuple[str, str | None], str] = {}  # of a name without its namespace, the first
        for name, tool in self.tools.items():
            flat.setdefault((tool.name, None), name)
            flat.setdefault((tool.name, tool.namespace), name)

        def named(choice: Mapping[str, Any], name: str) -> str:
            namespace = choice.get("namespace")
            return flat.get((name, namespace if isinstance(namespace, str) else None), name)

        match choice:
            case None | "none" | "auto" | "required":
                return functions, choice
            case {"type": "function" | "custom", "name": str(name)}:
                return functions, {"type": "function", "function": {"name": named(choice, name)}}
            case {
                "type": "allowed_tools",
                "mode": "auto" | "required" as mode,
                "tools": list(allowed),
            }:
                tools = [
                    tool
                    for tool in allowed
                    if isinstance(tool, dict) and isinstance(tool.get("name"), str)
                ]
                names = {named(tool, tool["name"]) for tool in tools}
                return [one for one in functions if one["function"]["name"] in names], mode
            case _:
                kind = choice.get("type") if isinstance(choice, dict) else choice
                raise CallRefused(
                    f"tool_choice {kind!r} cannot be used; {_NO_FORM}", param="tool_choice"
                )

    def chat(self, items: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages that `input` stands for; texts and calls of one turn of the assistant are
        one message.

        CallRefused (400) names the item that is malformed or refused."""
        if isinstance(items, str):
            return [{"role": "user", "content": items}]
        kinds = [self._kind(f"input[{position}]", raw) for position, raw in enumerate(items)]
        for position, kind in enumerate(kinds):  # tools first: calls are known by their names
            if kind in ("additional_tools", "tool_search_output"):
                offered = converted(f"input[{position}]", items[position], _Offer)
                self.offer(f"input[{position}].tools", offered.tools)
        turns: list[tuple[str, list[dict[str, Any]]]] = []
        spoke = called = False  # in the assistant's turn that is under way
        for position, (kind, raw) in enumerate(zip(kinds, items, strict=True)):
            where = f"input[{position}]"
            read = None if kind is None else self._read(where, kind, raw)
            if read is None:
                continue
            role, parts = read
            says = kind == "message"
            calls = parts[:1] != [] and parts[0].get("type") == "function"
            # Text after text is a turn of its own; after a call whose result has not come it
            # belongs to that turn.
            begins = (says and spoke and not called) or (kind == "reasoning" and (spoke or called))
            if begins or role != "assistant" or not turns or turns[-1][0] != role:
                turns.append((role, []))
                spoke = called = False
            turns[-1][1].extend(parts)
            spoke = spoke or says
            called = called or calls
        return chat_of("input", turns)

    def _kind(self, where: str, raw: Mapping[str, Any]) -> str | None:
        said = "" if "role" in raw and "content" in raw else None
        kind = _ITEMS.read_as(raw.get("type") or "message", said, where, self.dropped)
        return "message" if kind == "text" else kind

    def _read(
        self, where: str, kind: str, raw: dict[str, Any]
    ) -> tuple[str, list[dict[str, Any]]] | None:
        """(role, parts) of an item; None for one without any."""
        match kind:
            case "message":
                return self._message(where, converted(where, raw, _Message))
            case "reasoning":
                thought = self._thought(where, converted(where, raw, _Reasoning))
                return ("assistant", [{"type": "thought", "text": thought}]) if thought else None
            case "function_call":
                call = converted(where, raw, _Call)
                name = self._named(AgentTool(call.name, call.namespace))
                return "assistant", [function_call(call.call_id, name, call.arguments)]
            case "custom_tool_call":
                custom = converted(where, raw, _CustomCall)
                name = self._named(AgentTool(custom.name, custom.namespace, True))
                return "assistant", [custom_call(custom.call_id, name, custom.input)]
            case "local_shell_call" | "shell_call" | "apply_patch_call":
                return "assistant", [_known_call(where, kind, raw)]
            case "additional_tools" | "tool_search_output":
                return None
            case "item_reference":
                self.dropped.add("input.item_reference")
                return None
            case _:
                return "user", [
                    self._result(f"{where}.output", converted(where, raw, _Output), where)
                ]

    def _message(self, where: str, message: _Message) -> tuple[str, list[dict[str, Any]]]:
        parts = self._parts(f"{where}.content", message.content)
        if message.role == "assistant":
            parts = [text_part("".join(part.get("text", "") for part in parts))]
        return message.role, parts

    def _thought(self, where: str, item: _Reasoning) -> str:
        parts = self._parts(f"{where}.content", item.content or item.summary or [])
        thought = "".join(part.get("text", "") for part in parts)
        if not thought and item.encrypted_content:
            self.dropped.add("input.reasoning.encrypted_content")  # for another model
        return thought

    def _result(self, place: str, output: _Output, where: str) -> dict[str, Any]:
        call_id = output.call_id or output.id
        if call_id is None:
            raise CallRefused(f"{where} has no call_id", param=where)
        said = output.output
        if said is None:
            said = output.status or ""
        parts = said if isinstance(said, list) else None
        if parts is not None and all(isinstance(part, dict) and "type" in part for part in parts):
            content = content_of(self._parts(place, parts))
        else:
            content = said if isinstance(said, str) else msgspec.json.encode(said).decode()
        return {"role": "tool", "tool_call_id": call_id, "content": content}

    def _parts(self, where: str, content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
        if isinstance(content, str):
            return [text_part(content)]
        parts: list[dict[str, Any]] = []
        for position, raw in enumerate(content):
            place = f"{where}[{position}]"
            kind = _PARTS.read_as(raw.get("type"), raw.get("text"), place, self.dropped)
            if kind is not None:
                parts.append(_part(place, kind, converted(place, raw, _Part)))
        return parts


def _known_call(where: str, kind: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    name, field = _KNOWN_CALLS[kind]
    call_id = raw.get("call_id") or raw.get("id")
    arguments = raw.get(field)
    if not isinstance(call_id, str) or not isinstance(arguments, dict):
        raise CallRefused(f"{where} needs a call_id and {field}", param=where)
    written = {key: value for key, value in arguments.items() if value is not None}
    return function_call(call_id, name, msgspec.json.encode(written).decode())


def _part(where: str, kind: str, part: _Part) -> dict[str, Any]:
    if kind in ("input_image", "computer_screenshot"):
        if part.image_url is None:
            raise CallRefused(
                f"{where} has an image without image_url; files are not kept here", param=where
            )
        return image(part.image_url, part.detail)
    if kind == "input_audio" and part.input_audio is not None:
        return attached(where, f"audio/{part.input_audio.format}", part.input_audio.data)
    if kind == "input_file":
        if part.file_data is None:
            raise CallRefused(f"{where}: {FILES_NOT_KEPT}", code="unsupported_content", param=where)
        return of_data_url(where, part.file_data, part.filename)
    return text_part(part.text or part.refusal)


def with_references(body: bytes, answer: Callable[[str], dict[str, Any] | None]) -> bytes:
    """The body of a request with items of earlier responses in the place of references to them.
    `answer` gives the message of a response by its id; a reference to one that is not known stays.

    CallRefused (413) as `check_parts`, and for references to too much."""
    if b'"item_reference"' not in body:
        return body
    check_parts(body)
    try:
        fields = OBJECT.decode(body)
        items = _OBJECTS.decode(fields.get("input", b""))
    except NOT_JSON:
        return body  # whoever reads it says what is wrong
    known = functools.cache(answer)
    size = 0  # many references may be to one response
    for position, item in enumerate(items):
        if item.get("type") == "item_reference":
            items[position] = _referenced(str(item.get("id")), known) or item
            size += len(msgspec.json.encode(items[position]))
            if size > _MOST_REFERENCED:
                message = (
                    f"the items that input refers to have more than {_MOST_REFERENCED:,} bytes"
                )
                raise CallRefused(message, status=413, code="body_too_large", param="input")
    return msgspec.json.encode(fields | {"input": items})


def _referenced(
    item_id: str, answer: Callable[[str], dict[str, Any] | None]
) -> dict[str, Any] | None:
    """The item of an id as `ResponseWriter` makes them: `msg_{response}_{position}`."""
    prefix, _, rest = item_id.partition("_")
    response, _, position = rest.rpartition("_")
    message = answer(f"resp_{response}")
    if message is None:
        return None
    thoughts = thoughts_of(message)
    content = message.get("content")
    calls = message.get("tool_calls") or []
    if prefix == "rs":
        return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": thoughts}]}
    if prefix == "msg":
        return {"type": "message", "role": "assistant", "content": content or ""}
    number = (
        int(position) - bool(thoughts) - bool(content)
        if position.isdecimal() and len(position) < 10
        else -1
    )
    if not 0 <= number < len(calls):
        return None
    return {"type": "function_call", "call_id": calls[number]["id"], **calls[number]["function"]}
