"""The JSON schema of run files, for editors."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from typing import Any

import msgspec

from agentlightning.cli.config import ALGORITHMS, TrainConfig
from agentlightning.data.references import load_reference


def run_file_schema() -> dict[str, Any]:
    """JSON schema (2020-12) of `TrainConfig`, with the fields of each algorithm, of AdamW and of
    LoRA."""
    from agentlightning.learner.base import AdamW, LoRA

    definitions: dict[str, Any] = {}
    _schemas([TrainConfig], definitions)
    found: dict[str, Any] = definitions.pop("TrainConfig")
    keys = found["properties"]
    named = {
        name: load_reference(f"agentlightning.algorithm:{kind}")
        for name, kind in ALGORITHMS.items()
    }
    algorithms = [
        {
            "properties": {"name": {"const": name}, **_fields(kind, definitions)},
            "required": ["name"] if name != "grpo" else [],
            "additionalProperties": False,
        }
        for name, kind in named.items()
    ]
    own = {"properties": {"name": {"type": "string", "pattern": ":"}}, "required": ["name"]}
    keys["algorithm"] |= {
        "type": ["object", "string"],
        "if": {"type": "object"},
        "then": {"anyOf": [*algorithms, own]},
        "else": {"anyOf": [{"enum": list(ALGORITHMS)}, {"pattern": ":"}]},
    }
    keys["environment"] = {
        "anyOf": [*keys["environment"].pop("anyOf"), {"type": "string"}],
        **keys["environment"],
    }
    keys["time_limit"]["anyOf"].append({"type": "string", "pattern": r"^\d+(\.\d+)?[dhms]?$"})
    for name, kind in (("optimizer", AdamW), ("lora", LoRA)):
        keys[name] = {"type": ["object", "null"], "properties": _fields(kind, definitions)}
        keys[name]["additionalProperties"] = False
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Run file of agl train",
        **found,
        "additionalProperties": False,
        "$defs": definitions,
    }


def _fields(kind: type[Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of each field of a dataclass that a run file can set."""
    hints = typing.get_type_hints(kind)
    names = [
        field.name for field in dataclasses.fields(kind) if field.init and field.name != "name"
    ]
    return dict(zip(names, _schemas([hints[name] for name in names], definitions), strict=True))


def _schemas(kinds: Sequence[Any], definitions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    schemas, found = msgspec.json.schema_components(
        kinds, schema_hook=_anything, ref_template="#/$defs/{name}"
    )
    definitions |= found
    return schemas


def _anything(kind: type[Any]) -> dict[str, Any]:
    """A value that a run file gives by reference, such as a function."""
    return {}
