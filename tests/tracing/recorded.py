"""Spans of real instrumentation, beside the gateway's: see scripts/record_framework_spans.py."""

from __future__ import annotations

from pathlib import Path

import msgspec

from agentlightning.types import Span

SPANS = Path(__file__).parent / "spans"
ALL = sorted(path.stem for path in SPANS.glob("*.json"))
WITH_AGENTS = [name for name in ALL if name not in ("openai", "anthropic")]  # clients have none
# of which only the prompts tell who is who
NAMED = [name for name in WITH_AGENTS if name != "llama-index"]
NO_IDS = ("agno", "dspy")  # on the spans of their tools, nor of all their calls


def recorded(name: str) -> list[Span]:
    return msgspec.json.decode((SPANS / f"{name}.json").read_bytes(), type=list[Span])
