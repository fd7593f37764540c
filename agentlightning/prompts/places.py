"""The texts of a request that a program itself writes, by place, in every chat protocol.

    {"role": "system", "content": "S"}, `instructions`, `system`, `systemInstruction`  →  system
    {"role": "user", "content": "U"}                                                   →  user
    the description of the tool `search`, and of its parameter `city`
        →  tools.search.description, tools.search.parameters.city

Knows the wire formats of Chat Completions, Responses, Messages and Gemini. Knows no components."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, TypeAlias

Change: TypeAlias = Callable[[str, str], str]
"""(place, text) → the text that takes its place."""
Kind: TypeAlias = Literal["messages", "system", "tools"]

SYSTEM: Final = "system"
USER: Final = "user"
FIELDS: Final[dict[str, Kind]] = {
    **dict.fromkeys(("messages", "input", "contents"), "messages"),
    **dict.fromkeys(
        ("instructions", "system", "systemInstruction", "system_instruction"), "system"
    ),
    "tools": "tools",
}
"""The fields of a request that hold such texts, in any of the protocols."""
PLACES: Final = {"system": SYSTEM, "developer": SYSTEM, "user": USER}
"""Places by the role of a message."""
_TEXTUAL: Final = (None, "text", "input_text")  # types of parts
_INNER_TOOLS: Final = ("tools", "functionDeclarations", "function_declarations")
_SCHEMAS: Final = (
    *("parameters", "input_schema", "parametersJsonSchema"),
    "parameters_json_schema",
)
_NAMED: Final = ("properties", "$defs", "definitions")
_ALIKE: Final = ("items", "anyOf", "oneOf", "allOf")
_DEEPEST: Final = 16  # levels of a schema
_TAG: Final = re.compile(r"<([A-Za-z][\w-]*)>")
_PARAGRAPH: Final = re.compile(r"\n[ \t]*\n+|\n+\Z")
_UNCLOSED: Final = 20  # tags of a text, each of which costs a walk to its end


def change_field(kind: Kind, value: Any, change: Change) -> Any:
    """The decoded value of a request's field with every text changed; lists and objects are changed
    in place."""
    if isinstance(value, str):
        return change(USER if kind == "messages" else SYSTEM, value)
    if kind == "tools":
        _change_tools(value, change, "")
    elif kind == "system":
        _change_content({"content": value}, SYSTEM, change)
    else:
        for message in _listed(value):
            change_message(message, change)
    return value


def change_message(message: Any, change: Change) -> None:
    """Change every text of a message that the program writes, in place."""
    if isinstance(message, dict):
        role = message.get("role", USER if "parts" in message else None)
        place = PLACES.get(role) if isinstance(role, str) else None
        if place is not None:
            _change_content(message, place, change)


def _change_content(holder: dict[str, Any], place: str, change: Change) -> None:
    name = "parts" if "parts" in holder else "content"
    content = holder.get(name)
    if isinstance(content, str):
        holder[name] = change(place, content)
        return
    if isinstance(content, dict) and "parts" in content:  # Gemini's system instruction
        _change_content(content, place, change)
        return
    for part in _listed(content):
        if isinstance(part, dict) and part.get("type") in _TEXTUAL:
            _change_text(part, "text", place, change)


def _change_tools(tools: Any, change: Change, prefix: str) -> None:
    for tool in _listed(tools):
        if not isinstance(tool, dict):
            continue
        inner = [tool[name] for name in _INNER_TOOLS if isinstance(tool.get(name), list | dict)]
        for several in inner if not prefix else ():
            _change_tools(several, change, f"{tool['name']}__" if "name" in tool else prefix)
        holders = (tool.get("function"), tool.get("custom"), tool)
        function = next(holder for holder in holders if isinstance(holder, dict))
        name = function.get("name")
        if isinstance(name, str) and not inner:
            place = f"tools.{prefix}{name}"
            _change_text(function, "description", f"{place}.description", change)
            for schema in _SCHEMAS:
                _change_schema(function.get(schema), f"{place}.parameters", change, _DEEPEST)


def _change_schema(schema: Any, place: str, change: Change, levels: int) -> None:
    if not isinstance(schema, dict) or not levels:
        return
    _change_text(schema, "description", place, change)
    for group in _NAMED:
        named = schema.get(group)
        for name, inner in named.items() if isinstance(named, dict) else ():
            _change_schema(inner, f"{place}.{name}", change, levels - 1)
    for group in _ALIKE:
        for inner in _listed(schema.get(group)):
            _change_schema(inner, place, change, levels - 1)


def _change_text(holder: dict[str, Any], name: str, place: str, change: Change) -> None:
    text = holder.get(name)
    if isinstance(text, str):
        holder[name] = change(place, text)


def _listed(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    return [value] if isinstance(value, dict) else []


def blocks(text: str) -> Iterator[str]:
    """The blocks of a user's text, which joined are the text: `<tag>…</tag>`, paragraphs, and the
    space between them."""
    at = 0
    unclosed = 0
    for tag in _TAG.finditer(text):
        if tag.start() < at or unclosed == _UNCLOSED:
            continue
        closing = f"</{tag[1]}>"
        end = text.find(closing, tag.end())
        unclosed += end < 0
        if end >= 0:
            yield from _paragraphs(text[at : tag.start()])
            at = end + len(closing)
            yield text[tag.start() : at]
    yield from _paragraphs(text[at:])


def _paragraphs(text: str) -> Iterator[str]:
    at = 0
    for gap in _PARAGRAPH.finditer(text):
        yield text[at : gap.start()]
        yield gap[0]
        at = gap.end()
    if at < len(text):
        yield text[at:]


def tag_of(block: str) -> str | None:
    """`system-reminder` for a block `<system-reminder>…</system-reminder>`."""
    tag = _TAG.match(block)
    return tag[1] if tag and block.endswith(f"</{tag[1]}>") else None
