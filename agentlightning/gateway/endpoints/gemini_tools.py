"""Tools, tool choices and schemas of Gemini's requests, in the form of chat completions."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

import msgspec

from agentlightning.gateway.endpoints.kinds import KINDS
from agentlightning.gateway.request import (
    SOME,
    converted,
    function,
    json_schema,
    unsupported,
)


class Camel(msgspec.Struct, rename="camel", frozen=True):
    pass


class _Function(Camel, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parameters_json_schema: dict[str, Any] | None = None


class Calling(Camel, frozen=True):
    mode: Literal["MODE_UNSPECIFIED", "AUTO", "VALIDATED", "NONE", "ANY"] = "AUTO"
    allowed_function_names: list[str] | None = None


_UNDERSCORE: Final = re.compile("_([a-z])")


def camel(name: str) -> str:
    """The one spelling of a field that the protocol has two of: `inline_data` → `inlineData`."""
    return _UNDERSCORE.sub(lambda found: found[1].upper(), name)


_TOOLS: Final = KINDS["generateContent"]["tools"]


_CHOICES: Final = {
    "MODE_UNSPECIFIED": None,
    "AUTO": "auto",
    "VALIDATED": "auto",
    "NONE": "none",
    "ANY": "required",
}


_COUNTS: Final = frozenset(
    {"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"}
)


def _schema(schema: Any) -> Any:
    """OpenAPI's form of a schema, as Google has it, in JSON Schema's.

    {"type": "STRING", "nullable": true, "maxLength": "9"}
    →  {"type": ["string", "null"], "maxLength": 9}"""
    if not isinstance(schema, dict):
        return schema
    standard: dict[str, Any] = {}
    for written, value in schema.items():
        name = camel(written)
        match name, value:
            case "type", str():
                standard[name] = (
                    [value.lower(), "null"] if schema.get("nullable") is True else value.lower()
                )
            case "properties", dict():
                standard[name] = {key: _schema(inner) for key, inner in value.items()}
            case "items", dict():
                standard[name] = _schema(value)
            case "anyOf", list():
                standard[name] = [_schema(inner) for inner in value]
            case ("nullable" | "propertyOrdering", _) | (_, None):
                pass
            case _:
                standard[name] = (
                    converted(name, value, int, strict=False) if name in _COUNTS else value
                )
    return standard


def answer_format(config: dict[str, Any]) -> dict[str, Any] | None:
    """The required format of the answer, taken out of `config`."""
    kind = config.pop("responseMimeType", "text/plain")
    modalities = config.pop("responseModalities", ["TEXT"])
    schema = config.pop("responseJsonSchema", None)
    openapi = config.pop("responseSchema", None)
    if modalities != ["TEXT"]:
        raise unsupported("generationConfig.responseModalities", "answers are text")
    schema = _schema(openapi) if schema is None else schema
    if kind == "application/json":
        return {"type": "json_object"} if schema is None else json_schema(schema)
    if kind != "text/plain" or schema is not None:
        raise unsupported(
            "generationConfig.responseMimeType", "answers are text/plain, or application/json"
        )
    return None


def functions_of(tools: list[dict[str, Any]], dropped: set[str]) -> list[dict[str, Any]]:
    """The functions of all tools. The names of those left out go to `dropped`."""
    functions: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        for kind, inner in tool.items():
            if _TOOLS.read_as(kind, None, f"tools[{index}]", dropped) is None:
                continue
            for declared in converted(
                f"tools[{index}].{kind}", inner, Annotated[list[_Function], SOME]
            ):
                schema = declared.parameters_json_schema or _schema(declared.parameters)
                functions.append(function(declared.name, declared.description, schema))
    return functions


def chosen(tools: list[dict[str, Any]], calling: Calling) -> tuple[list[dict[str, Any]], Any]:
    """The tools that may be called, and the choice among them."""
    allowed = {*(calling.allowed_function_names or ())}
    if calling.mode == "ANY" and len(allowed) == 1:
        return tools, {"type": "function", "function": {"name": allowed.pop()}}
    return [tool for tool in tools if not allowed or tool["function"]["name"] in allowed], _CHOICES[
        calling.mode
    ]
