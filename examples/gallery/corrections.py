"""Corrections of published algorithms, each a function for `correction=`.

Each takes the log-probabilities of the sampled tokens under what sampled them, the weights at the
start of the step and the present ones, and the number of each token's call, [N] each. It returns
the weight of each token and whether it is kept."""

from __future__ import annotations

import torch
from torch import Tensor

from agentlightning.learner.corrections import correction


@correction(weighs=False)
def double_sided(
    behaviour: Tensor,
    proximal: Tensor,
    present: Tensor,
    transitions: Tensor,
    *,
    low: float = 0.2,
    high: float = 0.28,
) -> tuple[Tensor, Tensor]:
    """Leaves out a token unless its ratio, present weights to what sampled it, is in [1 − `low`, 1
    + `high`] (GLM-5, arXiv:2602.15763). With `importance_sampling` as the loss it is the paper's;
    it is asked at each optimiser step."""
    ratio = (present - behaviour).exp()
    return torch.ones_like(ratio), (ratio >= 1 - low) & (ratio <= 1 + high)
