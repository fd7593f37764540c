"""The state in which each call of an attempt was made, if the agent names states: `emit_annotation({"state": …})`.

A state holds for calls that start after it, until the next one. Knows spans; it does not know what states are for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Sequence
from typing import Final

import msgspec

from agentlightning import semconv
from agentlightning.data.rewards import ancestors
from agentlightning.types import Span

STATE: Final = "state"


def named_states(spans: Sequence[Span], calls: Container[str]) -> dict[str, str]:
    """The state of each of these `calls` of ONE attempt, by span id, as JSON; calls before the first state have none.

    Concurrent agents have separate states: states named below the nearest span around a call take precedence; without
    any, all count."""
    named = [(span, state) for span in spans if (state := _state(span)) is not None]
    if not named:
        return {}
    by_parent: dict[str | None, list[tuple[float, int, str]]] = {}
    everywhere: list[tuple[float, int, str]] = []
    for span, state in named:
        moment = (span.start_time, span.sequence_id, state)
        everywhere.append(moment)
        by_parent.setdefault(span.parent_id, []).append(moment)
    for moments in (everywhere, *by_parent.values()):
        moments.sort()
    above = {span.span_id: span.parent_id for span in spans}
    found: dict[str, str] = {}
    for span in spans:
        if span.span_id in calls:
            near = (by_parent[outer] for outer in ancestors(span, above) if outer in by_parent)
            earlier = (_latest(moments, span.start_time) for moments in (*near, everywhere))
            if (state := next((name for name in earlier if name is not None), None)) is not None:
                found[span.span_id] = state
    return found


def _latest(moments: Sequence[tuple[float, int, str]], time: float) -> str | None:
    index = bisect_right(moments, time, key=lambda moment: moment[0])
    return moments[index - 1][2] if index else None


def _state(span: Span) -> str | None:
    """The state in an annotation: a value, or a mapping, whose items are stored below the name."""
    if span.name != semconv.ANNOTATION:
        return None
    value = span.attributes.get(STATE)
    if value is None:
        value = {name: item for name, item in span.attributes.items() if name.startswith(f"{STATE}.")} or None
    return None if value is None else msgspec.json.encode(value, order="sorted").decode()
