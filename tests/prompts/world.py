"""Recorded calls of made-up programs, as the gateway writes their spans."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

from agentlightning import semconv
from agentlightning.types import Rollout, Span

Recorded = list[tuple[Rollout, Sequence[Span]]]
_numbers = itertools.count()


def call(
    system: str | None,
    user: str = "hi",
    *,
    tools: Sequence[Any] = (),
    request: dict[str, Any] | None = None,
    replaced: str | None = None,
) -> Span:
    """One call of the gateway."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    attributes: dict[str, Any] = {
        semconv.GEN_AI_OPERATION: "chat",
        semconv.CALL_ENDPOINT: "chat/completions",
        semconv.CALL_REQUEST: json.dumps(request or {"model": "m"}),
        semconv.GEN_AI_INPUT_MESSAGES: json.dumps([*messages, {"role": "user", "content": user}]),
    }
    if tools:
        attributes[semconv.GEN_AI_TOOL_DEFINITIONS] = json.dumps(tools)
    if replaced is not None:
        attributes[semconv.CALL_REPLACED] = replaced
        attributes[semconv.CALL_OPENING] = "You are the writer"
    number = next(_numbers)
    return Span(
        rollout_id="r",
        attempt_id="a",
        sequence_id=number,
        trace_id="0" * 32,
        span_id=f"{number:016x}",
        name="chat m",
        start_time=float(number),
        end_time=number + 0.5,
        attributes=attributes,
    )


def recorded(*rollouts: tuple[Any, Sequence[Span]], rollout_id: str = "r") -> Recorded:
    """Rollouts by their tasks."""
    return [
        (Rollout(rollout_id=rollout_id, input=task, start_time=0.0), spans)
        for task, spans in rollouts
    ]
