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
_PARAGRAPH: Final = re.compile(r"(\n[ \t]*\n+|\A\n+|\n+\Z)")
_UNCLOSED: Final = 20  # tags of a text, each of which costs a walk to its end


def change_field(kind: Kind, value: Any, change: Change) -> Any:
    """The decoded value of a request's field with every text changed; lists and objects are changed
    in place."""
    if isinstance(value, str):
        return change(SYSTEM if kind == "system" else USER, value)
    if kind == "system":
        _change_content({"content": value}, SYSTEM, change)
    for each in _objects(value):
        if kind == "messages":
            change_message(each, change)
        elif kind == "tools":
            _change_tool(each, change, "")
    return value


def change_message(message: dict[str, Any], change: Change) -> None:
    """Change every text of a message that the program writes, in place."""
    place = PLACES.get(message.get("role", USER if "parts" in message else ""))
    if place is not None:
        _change_content(message, place, change)


def _change_content(holder: dict[str, Any], place: str, change: Change) -> None:
    for name in ("content", "parts"):
        _change_text(holder, name, place, change)
        for part in _objects(holder.get(name)):
            if part.get("type") in _TEXTUAL:
                _change_text(part, "text", place, change)
                _change_content(part, place, change)  # Gemini's system instruction


def _change_tool(tool: dict[str, Any], change: Change, prefix: str) -> None:
    inner = [each for name in _INNER_TOOLS for each in _objects(tool.get(name))]
    function = [*_objects(tool.get("function")), *_objects(tool.get("custom")), tool][0]
    name = function.get("name")
    for each in () if prefix else inner:
        _change_tool(each, change, f"{name}__" if name else "")
    if name and not inner:
        place = f"tools.{prefix}{name}"
        _change_text(function, "description", f"{place}.description", change)
        for schema in _SCHEMAS:
            _change_schema(function.get(schema), f"{place}.parameters", change, _DEEPEST)


def _change_schema(schema: Any, place: str, change: Change, levels: int) -> None:
    for each in _objects(schema) if levels else ():
        _change_text(each, "description", place, change)
        for named in [named for group in _NAMED for named in _objects(each.get(group))]:
            for name, inner in named.items():
                _change_schema(inner, f"{place}.{name}", change, levels - 1)
        for group in _ALIKE:
            _change_schema(each.get(group), place, change, levels - 1)


def _change_text(holder: dict[str, Any], name: str, place: str, change: Change) -> None:
    text = holder.get(name)
    if isinstance(text, str):
        holder[name] = change(place, text)


def _objects(value: Any) -> list[dict[str, Any]]:
    several = value if isinstance(value, list) else [value]
    return [each for each in several if isinstance(each, dict)]


def blocks(text: str) -> Iterator[str]:
    """The blocks of a user's text, which joined are the text: `<tag>…</tag>`, paragraphs, and the
    space between them."""
    at = 0
    unclosed = 0
    for tag in _TAG.finditer(text):
        if tag.start() >= at and unclosed < _UNCLOSED:
            closing = f"</{tag[1]}>"
            end = text.find(closing, tag.end())
            unclosed += end < 0
            if end >= 0:
                yield from _PARAGRAPH.split(text[at : tag.start()])
                at = end + len(closing)
                yield text[tag.start() : at]
    yield from _PARAGRAPH.split(text[at:])


def tag_of(block: str) -> str | None:
    """`system-reminder` for a block `<system-reminder>…</system-reminder>`."""
    tag = _TAG.match(block)
    return tag[1] if tag and block.endswith(f"</{tag[1]}>") else None
