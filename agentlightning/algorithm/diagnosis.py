"""Which calls of a rollout decided its reward, by trying again from each of them.

V(k) is the mean reward of forks at call k, and the effect of call k is V of the call behind it,
minus V(k): what the answer that was given there brought, beside others that could have been."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, variance
from typing import Final

import msgspec

from agentlightning import semconv
from agentlightning.gateway.recordings import Record
from agentlightning.tracing.dialects import first_text
from agentlightning.tracing.tree import answers

_Z: Final = 1.959964  # standard normal quantile of a 95 % interval


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """A call, and what forks at it earned: `value` is the mean. `effect` is None if there is no one
    call behind it, as where agents work side by side; its `interval` is of 95 %."""

    call: int
    agent: str | None
    answer: str
    rewards: tuple[float, ...]
    value: float | None = None
    effect: float | None = None
    interval: tuple[float, float] | None = None

    @property
    def mattered(self) -> bool:
        """Whether the interval of its effect is on one side of 0."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]


def decisions(
    record: Record, reward: float, rewards: Mapping[int, Sequence[float]]
) -> list[Decision]:
    """The calls of a rollout that earned `reward`, each with the `rewards` of its forks by index.

    Intervals are those of Agresti and Caffo (2000) for a difference of two means, with one reward
    more at each end of the range on both sides: so a few equal rewards are no certainty."""
    seen = [reward, *(each for tried in rewards.values() for each in tried)]
    ends = min(seen), max(seen)
    sequential = all(
        later.span.start_time >= (call.span.end_time or 0.0)
        for call, later in pairwise(record.calls)
    )
    made: list[Decision] = []
    for place, call in enumerate(record.calls):
        tried = rewards[call.index]
        effect = interval = None
        if sequential:
            following = {other.index for other in record.calls[place + 1 :]}
        else:
            following = record.following(call.index) - {call.index}
        first = min(following, default=None)
        after: list[float] = []
        if first is None:
            after = [reward]
        elif sequential or record.following(first) == following:
            after = list(rewards[first])
        if tried and after:
            effect = fmean(after) - fmean(tried)
            # the reward that was earned is exact
            sides = [after if first is None else [*after, *ends], [*tried, *ends]]
            spread = _Z * math.sqrt(sum(variance(s) / len(s) for s in sides if len(s) > 1))
            middle = fmean(sides[0]) - fmean(sides[1])
            most = ends[1] - ends[0]
            interval = max(-most, middle - spread), min(most, middle + spread)
        attributes = call.span.attributes
        made.append(
            Decision(
                call=call.index,
                agent=first_text(call.span, semconv.GEN_AI_AGENT_NAME),
                answer=answers(attributes).plain.strip(),
                rewards=tuple(tried),
                value=fmean(tried) if tried else None,
                effect=effect,
                interval=interval,
            )
        )
    return made
