"""An attempt on one axis of time, from its start to its end: when nothing was recorded, and where it stood at last.

This module knows attempts and steps. It does not know the store, nor how a page draws what it finds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from agentlightning import semconv
from agentlightning.tracing.rewards import get_rewards_from_span
from agentlightning.tracing.steps import Step
from agentlightning.tracing.tree import LINES, one_line
from agentlightning.types import Attempt

_GAP: Final = 0.05  # of the whole: shorter ones are not worth a word
_WIDTH: Final = 40  # characters of the axis in a terminal
_MARKS: Final = {"call": "█", "tool": "▓", "gap": "░"}


class Gap(msgspec.Struct, frozen=True):
    start_time: float
    end_time: float


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """In `gaps` no call, tool or other innermost step was going on. `stood` says how an attempt that did not succeed
    ended, or how long it has been running, and its last step, which is the span `last_span`."""

    start: float
    end: float
    gaps: list[Gap]
    stood: str | None
    last_span: str | None


def timeline(attempt: Attempt, steps: Sequence[Step], now: float) -> Timeline:
    """The axis also holds steps that were recorded before the attempt's start or after its end."""
    end = now if attempt.end_time is None else attempt.end_time
    start = min([attempt.start_time, *(step.span.start_time for step in steps)])
    last_end = max([end, *(step.span.end_time for step in steps)])
    around = {step.span.parent_id for step in steps}
    did = [step for step in steps if step.kind != "agent" and step.span.name not in (semconv.EXCEPTION, semconv.LOG)]
    inner = [step.span for step in did if step.span.span_id not in around]
    last = max(did, key=lambda step: step.span.end_time, default=None)
    return Timeline(
        start=start,
        end=last_end,
        gaps=list(_gaps([(span.start_time, span.end_time) for span in inner], start, last_end)),
        stood=None if attempt.status == "succeeded" else _stood(attempt, end, last),
        last_span=None if last is None or attempt.status == "succeeded" else last.span.span_id,
    )


def _gaps(busy: Sequence[tuple[float, float]], start: float, end: float) -> Iterator[Gap]:
    reached = start
    for began, ended in [*sorted(busy), (end, end)]:
        if began - reached >= max(_GAP * (end - start), math.ulp(end)):
            yield Gap(reached, began)
        reached = max(reached, ended)


def _stood(attempt: Attempt, end: float, last: Step | None) -> str:
    """`timeout 30.0 s after its start, 18.6 s after its last recorded step: tool search`."""
    text = f"{attempt.status} {end - attempt.start_time:.1f} s after its start"
    if attempt.end_time is None:
        text = f"{attempt.status} for {end - attempt.start_time:.1f} s"
    if last is None:
        return f"{text}; no step was recorded"
    what = last.name if last.kind == "other" else f"{last.kind} {last.name}"
    return f"{text}, {max(0.0, end - last.span.end_time):.1f} s after its last recorded step: {one_line(what)}"


def drawn(found: Timeline, steps: Sequence[Step]) -> Iterator[str]:
    """Lines for a terminal, by time: when something began, how long it took, a bar on the axis, and what it was."""
    rows = [(step.span.start_time, step.span.end_time, step.kind, _named(step)) for step in steps]
    rows += [(gap.start_time, gap.end_time, "gap", "nothing recorded") for gap in found.gaps]
    for began, ended, kind, what in sorted(rows, key=lambda row: row[:2])[:LINES]:
        yield f"+{began - found.start:7.2f} s {ended - began:7.2f} s  {_bar(found, began, ended, kind)}  {what}"
    if len(rows) > LINES:
        yield f"… and {len(rows) - LINES} more"
    mark = "┤" if found.stood else "│"
    yield f"+{found.end - found.start:7.2f} s {'':9}  {'─' * _WIDTH}{mark} {found.stood or 'succeeded'}"


def _bar(found: Timeline, began: float, ended: float, kind: str) -> str:
    whole = found.end - found.start or 1.0
    first, last = (round((at - found.start) / whole * _WIDTH) for at in (began, ended))
    first = min(first, _WIDTH - 1)
    return f"{'·' * first}{_MARKS.get(kind, '▒') * max(1, last - first)}".ljust(_WIDTH, "·")


def _named(step: Step) -> str:
    if rewards := get_rewards_from_span(step.span):
        return f"reward {one_line(rewards[0].name)} {rewards[0].value:g}"
    if step.span.name == semconv.LOG:
        return f"log {one_line(str(step.span.attributes.get(semconv.LOG_STREAM)))}"
    if step.span.name == semconv.EXCEPTION:
        return f"! {one_line(str(step.span.attributes.get(semconv.EXCEPTION_TYPE, 'exception')))}"
    failed = "  failed" * step.failed
    return f"{step.name if step.kind == 'other' else f'{step.kind} {one_line(step.name)}'}{failed}"
