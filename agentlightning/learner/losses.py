"""Losses per sampled token, as pure functions of torch tensors of shape [N]; aggregation is the batch's weights.

Gradients flow through `logprobs` alone. References are checked in tests against values of verl.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentlightning.data.sequences import TrainingSequence, aggregation_weights, pad
from agentlightning.errors import ConfigError
from agentlightning.learner.base import CLIP_RANGES, KLEstimator, Loss
from agentlightning.learner.totals import Mismatch, Totals


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, transitions: Tensor, loss: Loss
) -> tuple[Tensor, Tensor]:
    """The loss of each sampled token as `loss.kind` has it, and where a clip changed it: float[N], bool[N].

    `transitions` int64[N] numbers the transition of each token, from 0; all tokens of one must be there."""
    kind, (low, high) = loss.kind, loss.clip_range
    if callable(kind):
        value = kind(logprobs, old_logprobs, advantages, transitions)
    elif kind == "policy_gradient":
        value = policy_gradient(logprobs, advantages)
    elif kind == "importance_sampling":
        value = importance_sampling(logprobs, old_logprobs, advantages)
    elif kind == "cispo":
        value = cispo(logprobs, old_logprobs, advantages, low, high)
    elif kind == "gspo":
        value = gspo(logprobs, old_logprobs, advantages, transitions, low, high)
    else:
        value = ppo_clip(logprobs, old_logprobs, advantages, low, high, loss.dual_clip)
    if kind not in CLIP_RANGES:
        return value, torch.zeros_like(advantages, dtype=torch.bool)
    before, now = old_logprobs, logprobs.detach()
    ratio = transition_ratio(now, before, transitions) if kind == "gspo" else torch.exp(now - before)
    above, below = ratio > 1 + high, ratio < 1 - low
    return value, above | below if kind == "cispo" else ((advantages > 0) & above) | ((advantages < 0) & below)


def gradient(
    batch: Sequence[TrainingSequence], logprobs: Sequence[Tensor], loss: Loss, version: int | None
) -> tuple[Tensor, Totals]:
    """dL/dlogprob of every sampled token of the batch, float32[N], where these are its `logprobs`; and the metrics."""
    micro = pad(
        list(batch), aggregation_weights(batch, loss.aggregation, loss.constant_length or 0), max(map(len, batch))
    )
    old, advantages, transitions, weights, versions = map(
        torch.from_numpy, (micro.logprobs, micro.advantages, micro.transitions, micro.weights, micro.versions)
    )
    now = torch.cat(list(logprobs)).requires_grad_()
    per_token, clipped = policy_loss(now, old, advantages, transitions, loss)
    total = (per_token * weights).sum()
    torch.autograd.backward(total)
    assert now.grad is not None
    totals, log_ratio = Totals(Mismatch(version if loss.old == "behaviour" else None)), now.detach() - old
    totals.add(float(total.detach()), log_ratio, clip_fraction=clipped)
    totals.mismatch.add(log_ratio, versions)
    return now.grad, totals


def try_loss(loss: Loss) -> None:
    """ConfigError unless the function in `loss` gives, for a batch of five tokens in two transitions, a finite loss of
    each that depends on its log-probability."""
    logprobs = torch.tensor([-0.5, -1.0, -2.0, -0.1, -0.7], requires_grad=True)
    old = torch.tensor([-0.6, -1.0, -1.5, -0.2, -0.7])
    advantages, transitions = torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0]), torch.tensor([0, 0, 0, 1, 1])
    try:
        value, _ = policy_loss(logprobs, old, advantages, transitions, loss)
        twice, _ = policy_loss(logprobs, old, 2 * advantages, transitions, loss)
        given = tuple(value.shape), bool(value.isfinite().all()), value.requires_grad
    except Exception as error:
        raise ConfigError(
            f"loss {loss.name} fails on five tokens: {type(error).__name__}: {error}. It is given logprobs, "
            "old_logprobs, advantages and transitions, and gives the loss of each token"
        ) from error
    if given != ((5,), True, True):
        raise ConfigError(
            f"loss {loss.name} must give, for five tokens, a finite loss of each with a gradient through logprobs; it "
            f"gave {value!r:.200}"
        )
    if loss.old == "proximal" and not torch.allclose(twice, 2 * value):
        raise ConfigError(
            f"old='proximal' corrects for what sampled by scaling the advantages, and loss {loss.name} is not "
            "proportional to them; give old='behaviour'"
        )


def policy_gradient(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """−A·log p, float[N]: right only for tokens that were sampled from the weights being changed (REINFORCE,
    Williams 1992)."""
    return -advantages * logprobs


def importance_sampling(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """−r·A with r = exp(logprob − old), unclipped, float[N]: at r = 1 its gradient is that of `policy_gradient`."""
    return -torch.exp(logprobs - old_logprobs) * advantages


def ppo_clip(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None
) -> Tensor:
    """max(−r·A, −clip(r, 1−low, 1+high)·A) with r = exp(logprob − old) (PPO, arXiv:1707.06347), float[N].

    With `dual` c, tokens of negative advantage lose at most −c·A (dual-clip PPO, arXiv:1912.09729)."""
    loss = _clipped(torch.exp(logprobs - old_logprobs), advantages, low, high)
    if dual is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual * advantages), loss)
    return loss


def gspo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, transitions: Tensor, low: float, high: float
) -> Tensor:
    """PPO's clipped surrogate with the ratio of the whole transition (GSPO, arXiv:2507.18071), float[N].

    As its token variant: each token has the transition's ratio as value and its own gradient, so that advantages may
    differ within a transition; where they do not, and under `sequence-mean`, it is GSPO to the letter."""
    return _clipped(transition_ratio(logprobs, old_logprobs, transitions), advantages, low, high)


def cispo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """−clip(r, 1−low, 1+high)·A·log p, no gradient through r (CISPO, arXiv:2506.13585), float[N]: a clipped token
    still learns, with a bounded weight."""
    ratio = torch.exp((logprobs - old_logprobs).detach())
    return -ratio.clamp(1 - low, 1 + high) * advantages * logprobs


def transition_ratio(logprobs: Tensor, old_logprobs: Tensor, transitions: Tensor) -> Tensor:
    """exp(mean of logprob − old over the token's transition), float[N], with the gradient of the token's own log p."""
    difference = (logprobs - old_logprobs).detach()
    count = int(transitions.max()) + 1 if len(transitions) else 0
    sums = difference.new_zeros(count).index_add(0, transitions, difference)
    means = sums / torch.bincount(transitions, minlength=count).clamp(min=1)
    return torch.exp(means[transitions] + logprobs - logprobs.detach())


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return torch.maximum(-ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages)


def value_loss(values: Tensor, old_values: Tensor, targets: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """½·max((V − target)², (V' − target)²), V' being V kept within `clip` of what it was, and where that is the larger:
    float[N], bool[N] (PPO as its authors implemented it, github.com/openai/baselines). Gradients flow through `values`.
    """
    loss = (values - targets).square() / 2
    if clip is None:
        return loss, torch.zeros_like(loss, dtype=torch.bool)
    kept = (torch.clamp(values, old_values - clip, old_values + clip) - targets).square() / 2
    return torch.maximum(loss, kept), kept > loss


def kl(logprobs: Tensor, reference: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate of KL(policy ‖ reference) per token (Schulman, "Approximating KL divergence"), with d = log p − log q:

    k1 = d; k2 = d²/2; k3 = exp(−d) − 1 + d. For k3, −d is limited to ±20 and the value to 10, as verl does."""
    difference = logprobs - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    negative = (-difference).clamp(-20, 20)
    return (torch.exp(negative) - 1 - negative).clamp(-10, 10)


def entropy(log_probabilities: Tensor) -> Tensor:
    """Entropy in nats of each row's distribution: log-probabilities float[N, V] → float[N]."""
    return -(log_probabilities.exp() * log_probabilities).sum(-1)
