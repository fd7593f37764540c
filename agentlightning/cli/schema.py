"""The JSON schema of run files, for editors."""

from __future__ import annotations

from typing import Any

import msgspec

from agentlightning.config import ALGORITHMS, RunConfig, fields_of
from agentlightning.data.references import load_reference


def run_file_schema() -> dict[str, Any]:
    """JSON schema (2020-12) of `RunConfig`, with the fields of each algorithm."""
    kinds = [
        fields_of(load_reference(f"agentlightning.algorithm:{kind}"))
        for kind in ALGORITHMS.values()
    ]
    (_, *algorithms), definitions = msgspec.json.schema_components(
        [RunConfig, *kinds], schema_hook=lambda kind: {}, ref_template="#/$defs/{name}"
    )
    found = definitions.pop("RunConfig")
    keys = found["properties"]
    for name, kind in ALGORITHMS.items():
        algorithm = definitions[kind]
        algorithm["properties"]["name"] = {"const": name}
        algorithm["required"] = ["name"] if name != "grpo" else []
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
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Run file of agl train",
        **found,
        "additionalProperties": False,
        "$defs": definitions,
    }
