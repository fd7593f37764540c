"""Packing keeps every sampled token exactly once, with its own loss row."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.data.aggregation import aggregation_weights
from agentlightning.data.sequences import (
    CreditedTransition,
    Level,
    build_sequences,
    micro_batches,
)
from tests.transitions import transition


def credited(
    prompt: list[int],
    response: list[int],
    advantage: float = 1.0,
    rollout: str = "r",
    index: int = 0,
) -> CreditedTransition:
    logprobs = -np.arange(1, len(response) + 1, dtype=np.float32)
    call = transition(prompt, response, rollout_id=rollout, call_index=index, logprobs=logprobs)
    return CreditedTransition(call, np.full(len(response), advantage, np.float32))


tokens = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@given(
    st.lists(st.tuples(tokens, tokens, st.booleans()), min_size=1, max_size=6), st.integers(1, 40)
)
def test_every_sampled_token_is_trained_exactly_once_however_it_is_packed(
    turns: list[tuple[list[int], list[int], bool]], budget: int
) -> None:
    """Random agents that sometimes extend their history and sometimes start afresh."""
    calls: list[CreditedTransition] = []
    history: list[int] = []
    for observation, answer, extends in turns:
        prompt = (history if extends else []) + observation
        calls.append(credited(prompt, answer, index=len(calls)))
        history = prompt + answer
    expected = sorted(
        (
            tuple(c.transition.prompt_ids) + tuple(c.transition.response_ids[: i + 1]),
            float(c.transition.logprobs[i]),
        )
        for c in calls
        for i in range(len(c.transition.response_ids))
    )
    for level in ("transition", "trajectory"):
        sequences = build_sequences(calls, level)
        weights = aggregation_weights(sequences, "token-mean")
        seen = []
        for micro in micro_batches(sequences, weights, budget):
            for row, position, logprob in zip(
                micro.rows, micro.positions, micro.logprobs, strict=True
            ):
                seen.append((tuple(micro.token_ids[row, : position + 1]), float(logprob)))
        assert sorted(seen) == expected


def test_micro_batches_respect_the_token_budget_and_keep_a_long_row_alone() -> None:
    sequences = build_sequences([credited([1] * size, [2]) for size in (1, 3, 3, 50)], "transition")
    shapes = [
        m.token_ids.shape
        for m in micro_batches(sequences, aggregation_weights(sequences, "token-mean"), 8)
    ]
    assert shapes == [(1, 51), (2, 4), (1, 2)]


@pytest.mark.parametrize("level", ["transition", "trajectory", "tree"])
def test_each_sampled_token_keeps_the_version_it_was_sampled_under_at_every_level(
    level: Level,
) -> None:
    """The weights changed in the middle of the first answer."""
    answers = [([1, 2], [3, 4, 5], [6, 6, 7]), ([1, 2, 3, 4, 5, 8], [9], [7])]
    calls = [
        msgspec.structs.replace(
            credited(prompt, answer, index=index).transition, versions=np.array(versions, np.int32)
        )
        for index, (prompt, answer, versions) in enumerate(answers)
    ]
    sequences = build_sequences(
        [CreditedTransition(one, np.ones(len(one.response_ids))) for one in calls], level
    )
    assert min(sequence.oldest_version or 0 for sequence in sequences) == 6
    sampled = [
        (int(token), int(version))
        for micro in micro_batches(sequences, aggregation_weights(sequences, "token-mean"), 64)
        for token, version in zip(
            micro.token_ids[micro.rows, micro.positions], micro.versions, strict=True
        )
    ]
    assert sorted(sampled) == [(3, 6), (4, 6), (5, 7), (9, 7)]
