"""Weights of tokens, each a function for `token_weights=`.

Each takes the calls of a rollout and returns for each call the weights of its tokens, prompt
included."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentlightning.data.transitions import Transition


def echo(transitions: Sequence[Transition], *, weight: float = 0.05) -> list[np.ndarray]:
    """`weight` for what the environment answered: the tokens of a prompt after those that the call
    before ended with (ECHO, arXiv:2605.24517). Each is learned once; a prompt that does not
    continue the call before has none."""
    made: list[np.ndarray] = []
    before = None
    for call in transitions:
        prompt = call.prompt_ids
        weights = np.repeat(np.array([0.0, 1.0]), [len(prompt), len(call.response_ids)])
        if before is not None and np.array_equal(prompt[: len(before)], before):
            weights[len(before) : len(prompt)] = weight
        made.append(weights)
        before = np.concatenate([prompt, call.response_ids])
    return made
