"""Fills in the generated parts of the reference while MkDocs builds it: keys of a run file, public
names of Python."""

from __future__ import annotations

from typing import Any

import msgspec

import agentlightning
from agentlightning.cli.config import TrainConfig


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs calls this with each page's source."""
    return markdown.replace("<!-- keys of TrainConfig -->", keys()).replace(
        "<!-- public names -->", names()
    )


def keys() -> str:
    """A table of the keys of a run file with their defaults and meanings."""
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for field in msgspec.inspect.type_info(TrainConfig).fields:  # pyright: ignore
        default = (
            field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
        )
        shown = "" if default in (None, [], {}) else f"`{msgspec.json.encode(default).decode()}`"
        kind = field.type
        described = kind.extra_json_schema if isinstance(kind, msgspec.inspect.Metadata) else None
        meaning = (described or {}).get("description", "")
        rows.append(f"| `{field.encode_name}` | {shown} | {meaning} |")
    return "\n".join(rows)


def names() -> str:
    """A section for each public class and function, with what its docstring says."""
    values = {name: getattr(agentlightning, name) for name in agentlightning.__all__}
    ours = {value.__module__ for value in values.values() if hasattr(value, "__qualname__")}
    return "\n\n".join(
        f"::: {value.__module__}.{value.__qualname__}"
        for value in values.values()
        if getattr(value, "__module__", None) in ours
        and value.__module__.startswith("agentlightning.")
    )
