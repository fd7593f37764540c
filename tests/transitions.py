"""Transitions that no agent made, for tests of what is done with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from agentlightning.data.aggregation import Tokens
from agentlightning.data.credit import RewardedGroup
from agentlightning.data.sequences import CreditedTransition, Origin, build_sequences
from agentlightning.data.transitions import Transition


def transition(prompt: Sequence[int], response: Sequence[int], **changes: Any) -> Transition:
    """A call of `policy`, sampled by version 0 with log-probabilities of 0; it goes on from the one
    before it, by `call_index`, if its prompt does."""
    index = changes.get("call_index", 0)
    usual: dict[str, Any] = {
        "rollout_id": "r",
        "attempt_id": "a",
        "span_id": f"s{index}",
        "continues": f"s{index - 1}",
        "call_index": index,
        "choice": 0,
        "model": "policy",
        "prompt_ids": np.array(prompt, np.int32),
        "response_ids": np.array(response, np.int32),
        "logprobs": np.zeros(len(response), np.float32),
        "versions": np.zeros(len(response), np.int32),
        "finish_reason": "stop",
    }
    return Transition(**(usual | changes))


def group_of(*rewards: float) -> RewardedGroup:
    """Rollouts of two calls each, with these rewards."""
    return RewardedGroup(
        [
            [
                transition([1, 1], [1, 1], rollout_id=f"r{number}"),
                transition([1], [1], rollout_id=f"r{number}", call_index=1),
            ]
            for number in range(len(rewards))
        ],
        rewards,
    )


def tokens_of(*rollouts: tuple[list[int], Origin]) -> Tokens:
    """The tokens of rollouts, of each how many its calls sampled and where it is from."""
    return Tokens(
        [
            made
            for number, (counts, origin) in enumerate(rollouts)
            for count in counts
            for made in build_sequences(
                [
                    CreditedTransition(
                        transition([1], [2] * count, rollout_id=str(number)),
                        np.ones(count, np.float32),
                    )
                ],
                "transition",
                origin,
            )
        ]
    )
