"""Writes dashboard/src/api.ts: what the server answers the page with, as types of TypeScript.

python scripts/page_types.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from agentlightning.dashboard.views import VIEWS
from agentlightning.server.dashboard import Session
from agentlightning.server.model_calls import ModelDescription
from agentlightning.types import Attempt, ResourcesUpdate, Run, Worker

FILE = Path(__file__).parents[1] / "dashboard" / "src" / "api.ts"
HEAD = (
    "// What the server says, as types; `scripts/page_types.py` writes them. Times are seconds "
    "since the epoch.\n"
)
NAMES = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
}


def typed(schema: dict[str, Any]) -> str:
    """A JSON schema as a type: `{"type": "array", "items": {"type": "integer"}}` → `number[]`."""
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    for options in (schema.get("anyOf"), schema.get("oneOf")):
        if options is not None:
            return " | ".join(dict.fromkeys(map(typed, options)))
    if "enum" in schema:
        return " | ".join(msgspec.json.encode(one).decode() for one in schema["enum"])
    if schema.get("type") == "array":
        items = [typed(one) for one in schema.get("prefixItems", ())] or [
            typed(schema.get("items") or {})
        ]
        inner = " | ".join(dict.fromkeys(items))
        return f"({inner})[]" if "|" in inner else f"{inner}[]"
    if schema.get("type") == "object":
        within = schema.get("additionalProperties")
        return f"Record<string, {typed(within) if isinstance(within, dict) else 'any'}>"
    return NAMES.get(schema.get("type", ""), "any")


def declared(name: str, schema: dict[str, Any]) -> str:
    if "properties" not in schema:
        return f"export type {name} = {typed(schema)};"
    # Each is there, also where it has a default.
    fields = [f"  {field}: {typed(one)};" for field, one in schema["properties"].items()]
    return "\n".join([f"export interface {name} {{", *fields, "}"])


def written() -> str:
    kinds = [kind.returns for kind in VIEWS] + [
        Session,
        Run,
        Attempt,
        ResourcesUpdate,
        Worker,
        ModelDescription,
    ]
    _, components = msgspec.json.schema_components(kinds, ref_template="#/{name}")
    return (
        "\n\n".join(
            [HEAD.strip(), *(declared(name, one) for name, one in sorted(components.items()))]
        )
        + "\n"
    )


if __name__ == "__main__":
    text = written()
    if "--check" not in sys.argv:
        FILE.write_text(text)
    elif FILE.read_text() != text:
        sys.exit(f"{FILE} is not what the server says; run: make dashboard")
