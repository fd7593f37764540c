"""What became of calls, counted: by model and outcome, and why some cannot be trained on. Knows spans, no metrics."""

from __future__ import annotations

from collections import Counter
from typing import Literal, TypeAlias

from agentlightning import semconv
from agentlightning.types import Span

Outcome: TypeAlias = Literal["answered", "failed", "aborted"]


class CallStatistics:
    """Counts since the gateway began. `untrainable` is by reason; `retried` counts answers that a client asked for
    again, `undelivered` those whose client had left, `held` recorded calls that waited while weights were updated, for
    `held_seconds` in all."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, Outcome]] = Counter()
        self.untrainable: Counter[str] = Counter()
        self.retried = 0
        self.undelivered = 0
        self.held = 0
        self.held_seconds = 0.0

    def count(self, model: str, outcome: Outcome) -> None:
        self.calls[model, outcome] += 1

    def captured(self, span: Span) -> None:
        flag = span.attributes.get(semconv.CALL_FLAG)
        if flag:
            self.untrainable[str(flag)] += 1
        if semconv.CALL_DISCARDS in span.attributes:
            self.retried += 1
        held_seconds = span.attributes.get(semconv.CALL_HELD_SECONDS)
        if isinstance(held_seconds, float):
            self.held += 1
            self.held_seconds += held_seconds
