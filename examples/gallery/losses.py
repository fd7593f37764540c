"""Losses of published algorithms: each a function for `loss=`, as in
`--set algorithm.loss=losses.py:sapo`.

Each takes tensors with one entry per sampled token, [N], and returns the loss of each, [N], and
metrics if it has any. Set `aggregation: sequence-mean` for `sapo` and `gmpo`, and `token-mean`
for `dppo_tv` and `dppo_kl`, as verl does."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from agentlightning.data.aggregation import Tokens
from agentlightning.learner.losses import ppo_clip


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    positive: float = 1.0,
    negative: float = 1.05,
) -> Tensor:
    """−(4/τ)·σ(τ·(r − 1))·A: a soft gate instead of a clip, steeper where A < 0 (SAPO,
    arXiv:2511.20347)."""
    temperature = torch.where(advantages > 0, positive, negative)
    ratio = torch.exp(logprobs - old_logprobs)
    return -4 / temperature * torch.sigmoid(temperature * (ratio - 1)) * advantages


def gmpo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    transitions: Tensor,
    below: float = 0.2,
    above: float = 0.28,
) -> Tensor:
    """−(Π r)^(1/T)·mean A of the call, log r clipped to [−below, above] (geometric-mean policy
    optimisation, arXiv:2507.20673).

    The value is the same for each token of a call, so that `sequence-mean` gives the paper's loss
    and gradient."""
    sign, log_ratio = advantages.sign(), logprobs - old_logprobs
    clipped = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-below, above))
    return -_mean_of_call(advantages, transitions) * torch.exp(_mean_of_call(clipped, transitions))


def dppo_tv(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    below: float = 0.2,
    above: float = 0.28,
) -> Tensor:
    """−r·A·log p, no gradient through r, without tokens whose probability has risen by more than
    `above` with A > 0, or fallen by more than `below` with A < 0 (DPPO with the binary total
    variation, arXiv:2602.04879)."""
    new, old = logprobs.detach().exp(), old_logprobs.exp()
    kept = torch.where(advantages > 0, new - old <= above, old - new <= below)
    return torch.where(kept, -new / old * advantages * logprobs, 0.0)


def dppo_kl(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    below: float = 0.2,
    above: float = 0.28,
) -> Tensor:
    """As `dppo_tv`, with the KL divergence, old to new, between "this token" and "another
    token"."""
    new, old = logprobs.detach().exp(), old_logprobs.exp()
    divergence = old * (old_logprobs - logprobs.detach()) + torch.xlogy(
        1 - old, (1 - old) / (1 - new).clamp(min=1e-8)
    )
    near = torch.where(advantages > 0, divergence <= above, divergence <= below)
    kept = near | ((new - old) * advantages <= 0)
    return torch.where(kept, -new / old * advantages * logprobs, 0.0)


def focal(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    tokens: Tokens,
    low: float = 0.2,
    high: float = 0.2,
    gamma: float = 0.5,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(1 − mean reward of the group)^γ times PPO's clipped loss, for rewards of 0 to 1: what nearly
    always succeeds is learned less (F-GRPO, arXiv:2602.06717). The metric `loss/focus` is the mean
    of that factor."""
    success = logprobs.new_tensor(tokens.each(lambda rollout: np.mean(rollout.group_rewards)))
    focus = (1 - success).clamp(min=0) ** gamma
    return focus * ppo_clip(logprobs, old_logprobs, advantages, low, high), {"focus": focus}


def _mean_of_call(values: Tensor, transitions: Tensor) -> Tensor:
    """The mean over the tokens of each token's call, [N]."""
    count = int(transitions.max()) + 1
    sums = values.new_zeros(count).index_add(0, transitions, values)
    return (sums / torch.bincount(transitions, minlength=count))[transitions]
