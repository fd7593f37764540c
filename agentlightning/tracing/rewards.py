"""Writes a reward into a span's attributes and reads it back.

A reward span has the optimised value in `agentlightning.reward.0.{name,value}`, further ones under
1, 2 …. `agentlightning.reward.final` is False on an intermediate reward; without it, a reward is
final. `agentlightning.reward.returned` is True on what the agent returned, which counts as the last
word whatever the clocks say."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import msgspec

from agentlightning.errors import InvalidError
from agentlightning.semconv import (
    LARGEST_REWARD,
    REWARD_FINAL,
    REWARD_RETURNED,
    reward_name,
    reward_value,
)
from agentlightning.tracing.attributes import finite
from agentlightning.types import Attributes, Span

PRIMARY = "primary"  # the name of a reward that was given none
_PRIMARY_VALUE = reward_value(0)
FORMS = (
    'a number such as 0.7, {"reward": 0.7}, or {"correct": 1, "short": 0.2, "primary_key": '
    '"correct"}'
)


class Reward(NamedTuple):
    name: str
    value: float


class GivenReward(NamedTuple):
    reward: float | dict[str, float]
    primary_key: str | None = None
    final: bool = True


def parse_reward(text: str | bytes, what: str = "the reward") -> GivenReward:
    """The reward in a line of JSON, in the forms of `read_reward`. InvalidError for anything
    else."""
    try:
        value = msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        shown = text.decode(errors="replace") if isinstance(text, bytes) else text
        raise InvalidError(
            f"{what} is {shown.strip()!r:.200}, which is not JSON ({error}); expected {FORMS}"
        ) from None
    if isinstance(value, bool):  # a program that prints `true` may mean anything
        raise InvalidError(f"{what} is {str(value).lower()}; expected {FORMS}")
    return read_reward(value, what)


def read_reward(value: Any, what: str = "the reward") -> GivenReward:
    """A program's reward: a number, `{"reward": 0.7}`, or several names with numbers.

    Of several names, that in `primary_key` is optimised, or else `reward`. `final: false` is an
    intermediate reward. Scalars of NumPy and torch are numbers. An event of Agent Lightning 1.0,
    `{"event_type": "reward", "data": {"value": 0.7}}`, is read too. InvalidError for anything
    else."""
    if not isinstance(value, Mapping):
        return GivenReward(checked_reward(value, what))
    named = dict(cast("Mapping[Any, Any]", value))
    if (
        named.get("event_type") == "reward"
        and isinstance(event := named.get("data"), Mapping)
        and "value" in event
    ):
        return GivenReward(checked_reward(cast("Mapping[Any, Any]", event)["value"], what))
    primary_key = named.pop("primary_key", None)
    final = named.pop("final", True)
    if not isinstance(final, bool) or not isinstance(primary_key, str | None):
        raise InvalidError(
            f"{what} has final={final!r:.50} and primary_key={primary_key!r:.50}; give true or "
            "false, and a name"
        )
    if named.keys() == {"reward"}:  # a single one, or the names within
        inner: Any = named["reward"]
        if not isinstance(inner, Mapping):
            return GivenReward(checked_reward(inner, what), primary_key, final)
        named = dict(cast("Mapping[Any, Any]", inner))
    dimensions = _named(named, primary_key, what)
    return GivenReward(dict(dimensions), dimensions[0][0], final)


def reward_attributes(
    reward: float | Mapping[str, float], primary_key: str | None = None, final: bool = True
) -> Attributes:
    """The attributes of a reward span, the primary reward first.

    `({"correct": 1.0, "short": 0.2}, "correct")` → `reward.0 = (correct, 1.0)`,
    `reward.1 = (short, 0.2)`."""
    attributes: Attributes = {}
    for index, (name, value) in enumerate(_named(reward, primary_key)):
        attributes[reward_name(index)] = name
        attributes[reward_value(index)] = value
    if not final:
        attributes[REWARD_FINAL] = False
    return attributes


def get_reward_value(span: Span) -> float | None:
    """The primary reward of a span; None for any other span."""
    value = span.attributes.get(_PRIMARY_VALUE)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value)


def get_rewards_from_span(span: Span) -> list[Reward]:
    """All rewards of a span, the primary one first; empty for any other span."""
    rewards: list[Reward] = []
    while isinstance(value := span.attributes.get(reward_value(len(rewards))), (int, float)):
        if isinstance(value, bool):
            break
        rewards.append(
            Reward(str(span.attributes.get(reward_name(len(rewards)), PRIMARY)), float(value))
        )
    return rewards


def is_reward_span(span: Span) -> bool:
    """Whether the span carries a reward, final or intermediate."""
    return get_reward_value(span) is not None


def is_final_reward(span: Span) -> bool:
    """Whether the span has a reward of the whole rollout, not an intermediate one."""
    return (
        get_reward_value(span) is not None and span.attributes.get(REWARD_FINAL, True) is not False
    )


def find_reward_spans(spans: Iterable[Span]) -> list[Span]:
    """All reward spans, final and intermediate, by start time, then sequence id."""
    found = [span for span in spans if get_reward_value(span) is not None]
    return sorted(found, key=lambda span: (span.start_time, span.sequence_id))


def find_final_reward(spans: Iterable[Span]) -> float | None:
    """The rollout's reward: what the agent returned, or else the last final reward; None without
    either."""
    final = find_final_rewards(spans)
    return final[0].value if final else None


def find_final_rewards(spans: Iterable[Span]) -> list[Reward]:
    """All dimensions of the rollout's reward, that of `find_final_reward` first; empty without a
    reward."""
    final = [span for span in find_reward_spans(spans) if is_final_reward(span)]
    returned = [span for span in final if span.attributes.get(REWARD_RETURNED) is True]
    return get_rewards_from_span((returned or final)[-1]) if final else []


def checked_reward(value: Any, what: str = "the reward") -> float:
    """`value` as a float: a finite real number of at most `LARGEST_REWARD`, a bool (1 or 0), or a
    scalar of NumPy or torch. InvalidError for anything else."""
    number = value
    if (
        not isinstance(value, numbers.Real)
        and hasattr(value, "item")
        and getattr(value, "shape", None) == ()
    ):
        number = value.item()
    if not isinstance(number, numbers.Real):
        raise InvalidError(
            f"{what} is {value!r:.200} of type {type(value).__name__}; expected a finite number, "
            "such as float(...)"
        )
    try:
        reward = finite(what, float(number))
    except OverflowError:
        raise InvalidError(
            f"{what} is an integer of {len(str(number))} digits, too large for a float"
        ) from None
    if abs(reward) > LARGEST_REWARD:
        raise InvalidError(
            f"{what} is {reward:g}, beyond ±{LARGEST_REWARD:g}, where gradients overflow. If it "
            "stands for a failure, raise an exception, or return None"
        )
    return reward


def _named(
    reward: float | Mapping[str, float], primary_key: str | None, what: str = "the reward"
) -> list[tuple[str, float]]:
    if not isinstance(reward, Mapping):
        if primary_key is not None:
            raise InvalidError(
                "primary_key was given with a single reward; it chooses among named dimensions"
            )
        return [(PRIMARY, checked_reward(reward))]
    dimensions = {
        str(name): checked_reward(value, f"{what} {name!r}") for name, value in reward.items()
    }
    if not dimensions:
        raise InvalidError(f"{what} is an empty mapping; expected at least one named value")
    alone = next(iter(dimensions)) if len(dimensions) == 1 else "reward"
    key = alone if primary_key is None else primary_key
    if key not in dimensions:
        raise InvalidError(
            f"the primary_key of {what} is {primary_key!r}; expected the name of the one to "
            f"optimise, one of {sorted(dimensions)} (without a primary_key that is 'reward')"
        )
    return [(key, dimensions.pop(key)), *dimensions.items()]
