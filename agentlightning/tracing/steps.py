"""The spans of one attempt, in whatever instrumentation's words, as one list of steps: calls, tools, agents.

A pure reading of spans. It does not know the store, rewards or learning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from agentlightning import semconv
from agentlightning.types import Span


@dataclass(frozen=True)
class Step:
    """One thing that happened in an attempt.

    `name` is the tool's, the agent's or the model's name, else the span's; `agent` the agent it ran under;
    `arguments` and `result` JSON or text; `duration` in seconds. `call` is, for a call, the gateway's span of that
    call (itself, where it is the gateway's); for a tool, the gateway call that asked for it."""

    span: Span
    kind: Literal["call", "tool", "agent", "other"]
    name: str
    agent: str | None
    tool_call_id: str | None
    arguments: str | None
    result: str | None
    failed: bool
    duration: float
    call: Span | None


def read_steps(spans: Sequence[Span]) -> list[Step]:
    """The steps of ONE attempt, by start time; its spans may come in any order."""
    return [_step(span) for span in sorted(spans, key=lambda span: (span.start_time, span.sequence_id))]


def _step(span: Span) -> Step:
    gateway = semconv.CALL_ENDPOINT in span.attributes
    return Step(
        span=span,
        kind="call" if gateway else "other",
        name=str(span.attributes.get(semconv.GEN_AI_RESPONSE_MODEL, span.name)) if gateway else span.name,
        agent=None,
        tool_call_id=None,
        arguments=None,
        result=None,
        failed=span.status.status_code == "ERROR",
        duration=span.end_time - span.start_time,
        call=span if gateway else None,
    )
