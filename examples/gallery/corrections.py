"""Corrections of published algorithms, each a function for `correction=`.

Each takes, of the sampled tokens, the log-probabilities under what sampled them, under the weights
at the start of the step and under the present ones, and the number of each token's call, [N] each.
It returns whether each token is kept, alone or after a weight of each."""

from __future__ import annotations

from torch import Tensor


def double_sided(
    behaviour: Tensor, present: Tensor, *, low: float = 0.2, high: float = 0.28
) -> Tensor:
    """Leaves out a token unless its ratio, present weights to what sampled it, is in [1 − `low`, 1
    + `high`] (GLM-5, arXiv:2602.15763). With `importance_sampling` as the loss it is the paper's;
    it is asked at each optimiser step."""
    ratio = (present - behaviour).exp()
    return (ratio >= 1 - low) & (ratio <= 1 + high)
