"""Aggregations, each a function for `aggregation=`.

Each takes the `Tokens` of a batch and returns the weight of each. The loss is the sum of weight
times loss."""

from __future__ import annotations

import numpy as np

from agentlightning.data.aggregation import Tokens


def per_rollout(tokens: Tokens, *, length: int) -> np.ndarray:
    """1 / (rollouts · `length`), whatever calls a rollout makes (Dr. GRPO, arXiv:2503.20783, as TRL
    has it)."""
    return np.full(len(tokens), 1 / (len(tokens.origins) * length))
