"""Baselines of published algorithms, each a function for `baseline=`:
`--set algorithm.baseline=baselines.py:opo`.

Each takes the `Returns` of a batch and returns an advantage for each call.
"""

from __future__ import annotations

import numpy as np

from agentlightning.data.credit import Returns


def opo(returns: Returns) -> np.ndarray:
    """A = x − Σ length·R / Σ length over the group: the baseline of least variance (OPO,
    arXiv:2505.23585)."""
    lengths = np.bincount(returns.rollouts, returns.tokens, minlength=len(returns.rewards))
    best = returns.per_group(
        lambda length, mean: (length * mean).sum() / length.sum(), lengths, returns.means
    )
    return returns.values - best[returns.rollouts]


def maxrl(returns: Returns, *, epsilon: float = 1e-6) -> np.ndarray:
    """A = (x − mean) / (mean + ε) over the group, for rewards of at least 0: rare successes weigh
    more (MaxRL, "Maximum Likelihood Reinforcement Learning", 2026)."""
    mean = returns.per_group(np.mean)[returns.rollouts]
    return (returns.values - mean) / (mean + epsilon)
