"""Reasons that leave out many calls of a step, and the settings that train such calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from agentlightning import semconv
from agentlightning.data.call_filter import (
    FROZEN,
    HOUSEKEEPING,
    KEEPABLE,
    LONG_PROMPT,
    LONG_RESPONSE,
    OTHER_AGENT,
    OTHER_MODEL,
    TRUNCATED,
    UNUSED_CHOICE,
)

MANY: Final = 0.1  # of a step's calls

# Reasons that somebody chose: another model or agent learns, a fork has what it was given.
_CHOSEN: Final = (FROZEN, OTHER_AGENT, OTHER_MODEL, semconv.REPLAYED)
_TO_TRAIN: Final[dict[str, str]] = {
    **{reason: f'`keep: ["{reason}"]` trains them' for reason in KEEPABLE},
    TRUNCATED: "`train_truncated: true` trains them, and a higher `max_tokens` cuts off fewer",
    LONG_PROMPT: "a higher `max_prompt_length` trains them",
    LONG_RESPONSE: "a higher `max_response_length` trains them",
    HOUSEKEEPING: "`agents` trains them if it names the agent that makes them",
    UNUSED_CHOICE: "ask for one choice (`n=1`)",
}
_PREFIX: Final = "excluded/"


def excluded_often(metrics: Mapping[str, float]) -> dict[str, str]:
    """A sentence for each reason that leaves out more than a tenth of the policy's calls of a step,
    by reason."""
    left_out = {
        name.removeprefix(_PREFIX): n for name, n in metrics.items() if name.startswith(_PREFIX)
    }
    counted = {reason: count for reason, count in left_out.items() if reason not in _CHOSEN}
    calls = metrics.get("calls", 0.0) + sum(counted.values())
    found: dict[str, str] = {}
    for reason, count in counted.items():
        if count > MANY * calls:
            remedy = _TO_TRAIN.get(reason, "no setting does, for they are not what was sampled")
            found[reason] = f"{count / calls:.0%} of the calls are not trained ({reason}): {remedy}"
    return found
