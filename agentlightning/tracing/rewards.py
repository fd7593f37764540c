"""How a reward is written into a span and read back. Knows spans; knows neither attempts nor what rewards are for.

A reward span carries `agentlightning.reward.0.{name,value}`, the value that is optimised, and further dimensions under
1, 2 …. `agentlightning.reward.final` is False on an intermediate reward; without it a reward is final.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping
from typing import Any

from agentlightning.errors import InvalidError
from agentlightning.semconv import REWARD_FINAL, reward_name, reward_value
from agentlightning.tracing.attributes import finite
from agentlightning.types import Attributes, Span

PRIMARY = "primary"  # the name of a reward that was given none


def reward_attributes(
    reward: float | Mapping[str, float], primary_key: str | None = None, final: bool = True
) -> Attributes:
    """Attributes of a reward span. With several dimensions the primary one comes first.

    `({"correct": 1.0, "short": 0.2}, "correct")` → `reward.0 = (correct, 1.0)`, `reward.1 = (short, 0.2)`."""
    named = _named(reward, primary_key)
    attributes: Attributes = {}
    for index, (name, value) in enumerate(named):
        attributes[reward_name(index)] = name
        attributes[reward_value(index)] = value
    if not final:
        attributes[REWARD_FINAL] = False
    return attributes


def get_reward_value(span: Span) -> float | None:
    """The primary value of a reward span; None for any other span."""
    value = span.attributes.get(reward_value(0))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value)


def is_final_reward(span: Span) -> bool:
    """Whether the span carries a reward of the whole rollout rather than an intermediate one."""
    return get_reward_value(span) is not None and span.attributes.get(REWARD_FINAL, True) is not False


def find_reward_spans(spans: Iterable[Span]) -> list[Span]:
    """All reward spans, final and intermediate, by start time, then sequence id."""
    found = [span for span in spans if get_reward_value(span) is not None]
    return sorted(found, key=lambda span: (span.start_time, span.sequence_id))


def find_final_reward(spans: Iterable[Span]) -> float | None:
    """The rollout's reward: that of the last final reward span (a returned value is emitted last), or None."""
    final = [span for span in find_reward_spans(spans) if is_final_reward(span)]
    return get_reward_value(final[-1]) if final else None


def checked_reward(value: Any, what: str = "the reward") -> float:
    """`value` as a float. InvalidError for anything that is not a finite real number; a bool is not one."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidError(
            f"{what} is {value!r:.200} of type {type(value).__name__}; expected a finite number, such as float(...)"
        )
    return finite(what, float(value))


def _named(reward: float | Mapping[str, float], primary_key: str | None) -> list[tuple[str, float]]:
    if not isinstance(reward, Mapping):
        if primary_key is not None:
            raise InvalidError("primary_key was given with a single reward; it chooses among named dimensions")
        return [(PRIMARY, checked_reward(reward))]
    dimensions = {str(name): checked_reward(value, f"reward {name!r}") for name, value in reward.items()}
    if not dimensions:
        raise InvalidError("the reward is an empty mapping; expected at least one named value")
    key = next(iter(dimensions)) if primary_key is None and len(dimensions) == 1 else primary_key
    if key not in dimensions:
        raise InvalidError(
            f"primary_key is {primary_key!r}; it must name the dimension to optimise, one of {sorted(dimensions)}"
        )
    return [(key, dimensions.pop(key)), *dimensions.items()]
