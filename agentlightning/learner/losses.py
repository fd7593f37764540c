"""Losses per sampled token, as pure functions of torch tensors of shape [N]; aggregation is the batch's weights.

Gradients flow through `logprobs` alone. References are checked in tests against values of verl.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentlightning.errors import ConfigError
from agentlightning.learner.base import KLEstimator


def ppo_clip(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None
) -> Tensor:
    """max(−r·A, −clip(r, 1−low, 1+high)·A) with r = exp(logprob − old) (PPO, arXiv:1707.06347), float[N].

    With `dual` c, tokens of negative advantage lose at most −c·A (dual-clip PPO, arXiv:1912.09729)."""
    ratio = torch.exp(logprobs - old_logprobs)
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages)
    if dual is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual * advantages), loss)
    return loss


def kl(logprobs: Tensor, reference: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate of KL(policy ‖ reference) per token (Schulman, "Approximating KL divergence"), with d = log p − log q:

    k1 = d; k2 = d²/2; k3 = exp(−d) − 1 + d. For k3, −d is limited to ±20 and the value to 10, as verl does."""
    difference = logprobs - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        negative = (-difference).clamp(-20, 20)
        return (torch.exp(negative) - 1 - negative).clamp(-10, 10)
    raise ConfigError(f"unknown KL estimator {estimator!r}; known: k1, k2, k3")


def entropy(log_probabilities: Tensor) -> Tensor:
    """Entropy in nats of each row's distribution: log-probabilities float[N, V] → float[N]."""
    return -(log_probabilities.exp() * log_probabilities).sum(-1)
