"""The forms that a call can require of an answer: a JSON value, or calls of its tools in the
model's own format, as servers read it.

Knows schemas and formats of calls. No sampling, no HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from agentlightning.gateway.admission import forces_a_call
from agentlightning.gateway.backend import UNSUPPORTED, ModelCall
from agentlightning.gateway.chat.text import TOOL_FORMATS, ToolFormat
from agentlightning.gateway.request import CallRefused

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Form:
    """An answer of the JSON `schema`, or calls of `tools` (name, schema of the arguments) in a
    `format`; either, where both are given. There is more than one call only with `many`. `field` is
    the request field that asks for it."""

    field: str
    schema: Any = None
    tools: tuple[tuple[str, Any], ...] = ()
    format: ToolFormat | None = None
    many: bool = True

    def structural_tag(self) -> dict[str, Any]:
        """As servers read it (xgrammar's structural tags)."""
        ways = [] if self.schema is None else [_tagged(self.schema)]
        if (form := self.format) is not None:
            calls: dict[str, Any] = {
                "type": "tags_with_separator",
                "separator": form.between,
                "at_least_one": True,
            }
            calls["stop_after_first"] = not (self.many and form.between)
            calls["tags"] = [
                {
                    "type": "tag",
                    "begin": form.begin(name),
                    "content": _tagged(schema),
                    "end": form.back,
                }
                for name, schema in self.tools
            ]
            ways.append(calls)
        return {
            "type": "structural_tag",
            "format": {"type": "or", "elements": ways} if len(ways) > 1 else ways[0],
        }


class _JsonSchema(msgspec.Struct):
    schema: dict[str, Any]


class _JsonFormat(msgspec.Struct, tag_field="type", tag="json_schema"):
    json_schema: _JsonSchema


def form_of(call: ModelCall, tool_format: str | None) -> Form | None:
    """The form that the call requires, None where it is free. CallRefused (400) for what is no
    form, or of another format."""
    response_format = call.extra.get("response_format") or {"type": "text"}
    schema = None
    if response_format == {"type": "json_object"}:
        schema = {"type": "object"}
    elif response_format != {"type": "text"}:
        try:
            schema = msgspec.convert(response_format, _JsonFormat).json_schema.schema
        except msgspec.ValidationError as error:
            _refuse("response_format", f"it is not that of OpenAI's chat completions: {error}")
    choice = call.tool_choice
    forced = forces_a_call(call.tool_choice)
    if schema is None and not forced:
        return None
    functions = (
        []
        if choice == "none" or call.prompt is not None
        else [tool["function"] for tool in call.tools]
    )
    if forced and choice != "required":
        functions = [
            tool
            for tool in functions
            if choice == {"type": "function", "function": {"name": tool["name"]}}
        ]
    if forced and not functions:
        _refuse("tool_choice", "it names none of the tools")
    return Form(
        field="tool_choice" if forced else "response_format",
        schema=None if forced else schema,
        tools=tuple(
            (tool["name"], {"type": "object", **(tool.get("parameters") or {})})
            for tool in functions
        ),
        format=TOOL_FORMATS[tool_format] if functions and tool_format else None,
        many=not isinstance(choice, dict) and call.extra.get("parallel_tool_calls") is not False,
    )


def _tagged(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema}


def _refuse(field: str, why: str) -> NoReturn:
    raise CallRefused(f"{field} cannot be enforced: {why}", code=UNSUPPORTED, param=field)
