"""Decides which calls of a rollout train, and why the others do not.

The gateway's own reasons (`agentlightning.call.untrainable`) are repeated here because users may
choose to keep such calls."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from agentlightning import semconv
from agentlightning.data.agents import agent_pattern
from agentlightning.errors import ConfigError, check_settings, nearest
from agentlightning.types import Span

# Why a call does not train, in addition to the gateway's reasons.
NOT_RECEIVED: Final = "nobody received the answer"
CALL_MISSING: Final = "another call of the attempt was not recorded"
OTHER_AGENT: Final = "other agent"
HOUSEKEEPING: Final = "housekeeping call"
OTHER_MODEL: Final = "other model"
FROZEN: Final = "frozen model"
UNUSED_CHOICE: Final = "unused choice"
TRUNCATED: Final = "cut off at max_tokens"
HAS_IMAGES: Final = "has images"
LONG_PROMPT: Final = "prompt over max_prompt_length"
LONG_RESPONSE: Final = "response over max_response_length"
# What is wrong with the tokens themselves: no setting makes these train.
NO_TOKEN_IDS: Final = "no token ids"
LENGTHS_DIFFER: Final = "ids and logprobs differ in length"
NOT_FINITE: Final = "logprob is not finite"
NOT_A_LOGPROB: Final = "logprob is above 0"
NEGATIVE_ID: Final = "token id is negative"

KEEPABLE: Final = (
    NOT_RECEIVED,
    CALL_MISSING,
    HAS_IMAGES,
    "call failed",
    "client disconnected",
    "the backend aborted the answer",
    "ended by a stop string",
    "ended for an unknown reason",
    "constrained by a grammar",
    "sampled by weights that nobody knows",
    "SGLang's logprobs are those before top_p and top_k",
    "ids and reported usage differ",
)
"""Reasons that `CallFilter.keep` may name: the tokens of such calls are complete."""

_ROUNDING: Final = 1e-3  # how far rounding may lift a log-probability above 0


@dataclass(frozen=True, kw_only=True)
class CallFilter:
    """Chooses the calls that train. The others are left out and counted by reason; no call is cut.

    Settings: models: names of the models being trained; None: all trainable ones. agents: names of
        the agents being trained, such as `"writer|rewriter"`; None: all. Housekeeping calls, such
        as
            titles, train only if named.
        keep: reasons (of `KEEPABLE`) for which calls are flagged, to train such calls anyway. They
        are still counted.
        train_truncated: train answers that were cut off at max_tokens.
        max_prompt_length, max_response_length: tokens of one call.

    ConfigError for invalid settings."""

    models: Collection[str] | None = None
    agents: str | None = None
    keep: tuple[str, ...] = ()
    train_truncated: bool = True
    max_prompt_length: int | None = None
    max_response_length: int | None = None

    def __post_init__(self) -> None:
        if self.agents is not None:
            agent_pattern(self.agents)  # raises for an invalid pattern
        if isinstance(self.keep, str):
            raise ConfigError(f"keep is {self.keep!r}; give a list of reasons")
        for reason in self.keep:
            if reason not in KEEPABLE:
                raise ConfigError(
                    f"keep names {reason!r}, which cannot be kept; {nearest(str(reason), KEEPABLE)}"
                )
        check_settings(self, least={"max_prompt_length": 1, "max_response_length": 1})

    def keeps(self, reason: str) -> bool:
        """Whether a call trains despite this reason."""
        return reason in self.keep or (reason == TRUNCATED and self.train_truncated)


EVERY_CALL: Final = CallFilter()
"""Every call of a trainable model that can be trained."""


def token_problem(
    prompt_ids: npt.NDArray[np.int32],
    response_ids: npt.NDArray[np.int32],
    logprobs: npt.NDArray[np.float32],
) -> str | None:
    """The fault in the tokens of an answer, or None."""
    if not len(prompt_ids) or not len(response_ids):
        return NO_TOKEN_IDS
    if len(response_ids) != len(logprobs):
        return LENGTHS_DIFFER
    highest = logprobs.max()
    lowest = logprobs.min()  # both are NaN where one logprob is
    if not (math.isfinite(highest) and math.isfinite(lowest)):
        return NOT_FINITE
    if highest > _ROUNDING:
        return NOT_A_LOGPROB
    return NEGATIVE_ID if min(prompt_ids.min(), response_ids.min()) < 0 else None


def call_index(span: Span) -> int | None:
    """0, 1, 2 … within the attempt; None if the gateway did not number it."""
    index = span.attributes.get(semconv.CALL_INDEX)
    return index if isinstance(index, int) else None


def call_order(span: Span) -> tuple[int, float, int]:
    """The sort key of an attempt's calls."""
    return call_index(span) or 0, span.start_time, span.sequence_id


def discarded_calls(spans: Iterable[Span]) -> set[int]:
    """Indices of calls whose answers were not received: the client retried or disconnected."""
    named = [indices for span in spans if (indices := span.attributes.get(semconv.CALL_DISCARDS))]
    return {
        index
        for indices in named
        if isinstance(indices, Sequence)
        for index in indices
        if isinstance(index, int)
    }
