"""Fills in the generated parts of the reference while MkDocs builds it: keys of a run file, public
names of Python."""

from __future__ import annotations

from typing import Any

import msgspec

import agentlightning
from agentlightning.config import FIELDS, RunConfig
from agentlightning.learner.policy_config import AdamW, settings_of


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs calls this with each page's source."""
    return markdown.replace("<!-- keys of RunConfig -->", keys()).replace(
        "<!-- public names -->", names()
    )


def keys() -> str:
    """A table of the keys of a run file with their defaults and meanings."""
    rows = ["| key | default | meaning |", "|---|---|---|"]
    defaults = RunConfig()
    for name in FIELDS:
        default = getattr(defaults, name)
        shown = (
            ""
            if default in (None, [], {}, AdamW())
            else f"`{msgspec.json.encode(default).decode()}`"
        )
        rows.append(f"| `{name}` | {shown} | {settings_of(RunConfig)[name].description} |")
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
