"""Puts spans of several machines on one clock, the gateway's, by using cause and effect to find the
offset.

A span around a call starts before it and ends after it. A tool starts after the call that requested
it has ended, and ends before the call that receives its result. Each pair limits the offset of the
agent's clock. Knows spans and their ids; it knows nothing about rewards or training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from agentlightning import semconv
from agentlightning.tracing.dialects import is_gateway_call, kind_of, result_of, text_of
from agentlightning.types import Span

TOOL_CALL_IDS: Final = ("gen_ai.tool.call.id", "tool_call.id", "tool.id")
"""Attributes by which a span names a tool call."""

_MARGIN: Final = 0.05  # seconds


def align_clocks(spans: Sequence[Span]) -> tuple[Sequence[Span], float | None]:
    """The spans of ONE attempt with the agent's times converted to the gateway's clock, and how
    many seconds the agent's clock was ahead (None: unknown).

    Times stay unchanged if they agree with all limits, or if the limits contradict each other (the
    agent ran on several machines). Otherwise the shift is the smallest that fits plus a margin,
    since reactions take time."""
    bounds = list(_bounds(spans))
    low = max((low for low, _ in bounds), default=-math.inf)
    high = min((high for _, high in bounds), default=math.inf)
    if low > high or (math.isinf(low) and math.isinf(high)):
        return spans, None
    if low <= 0 <= high:
        return spans, 0.0
    skew = (
        min(1.5 * low + _MARGIN, (low + high) / 2)
        if low > 0
        else max(1.5 * high - _MARGIN, (low + high) / 2)
    )
    return [_earlier(span, skew) for span in spans], skew


def _bounds(spans: Sequence[Span]) -> Iterator[tuple[float, float]]:
    """Ranges, in seconds, for how much the agent's clock is ahead of the gateway's."""
    calls = sorted(
        (span for span in spans if is_gateway_call(span)), key=lambda call: call.start_time
    )
    others = {span.span_id: span for span in spans if not _by_gateway(span)}
    if not others:
        return
    answers = {name: call for call in calls if (name := text_of(call, semconv.GEN_AI_RESPONSE_ID))}
    for call in calls:
        if (outer := others.get(call.parent_id or "")) is not None:
            yield _around(outer, call)
    outputs = [text_of(call, semconv.GEN_AI_OUTPUT_MESSAGES) or "" for call in calls]
    for span in others.values():
        kind = kind_of(span)
        if kind == "call":
            named = text_of(span, semconv.GEN_AI_RESPONSE_ID)
            result = "" if named else result_of(span) or ""
            yield from (
                _around(span, call)
                for name, call in answers.items()
                if name == named or name in result
            )
        elif kind == "tool" and (call_id := text_of(span, *TOOL_CALL_IDS)):
            yield _between(span, f'"{call_id}"', calls, outputs)


def _around(outer: Span, call: Span) -> tuple[float, float]:
    # A span still open at the end of its attempt was ended by the runner.
    end = math.inf if outer.resource.get(semconv.UNFINISHED) else outer.end_time
    return outer.start_time - call.start_time, end - call.end_time


def _between(
    tool: Span, call_id: str, calls: Sequence[Span], outputs: Sequence[str]
) -> tuple[float, float]:
    """`outputs` are the answers of the calls."""
    callers = [index for index, answer in enumerate(outputs) if call_id in answer]
    if len(callers) != 1:  # some servers number tool calls from 0 in each answer
        return -math.inf, math.inf
    later = calls[callers[0] + 1 :]
    sent = ((call, text_of(call, semconv.GEN_AI_INPUT_MESSAGES) or "") for call in later)
    # usually near the end
    receiver = next((call for call, messages in sent if messages.rfind(call_id) >= 0), None)
    low = -math.inf if receiver is None else tool.end_time - receiver.start_time
    return low, tool.start_time - calls[callers[0]].end_time


def _earlier(span: Span, seconds: float) -> Span:
    if _by_gateway(span):
        return span
    return msgspec.structs.replace(
        span, start_time=span.start_time - seconds, end_time=span.end_time - seconds
    )


def _by_gateway(span: Span) -> bool:
    """Whether the span's times come from the gateway's clock."""
    return (
        is_gateway_call(span)
        or span.name == semconv.UNDELIVERED
        or semconv.REWARD_POSTED in span.attributes
    )
