"""Two ways to correct for the weights that sampled: the importance ratio, or a truncated weight per token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from agentlightning.data.sequences import TrainingSequence
from agentlightning.learner import losses
from agentlightning.learner.losses import Loss, LossKind
from tests.golden import INPUTS, OUTPUTS, sampled
from tests.learner.test_torch import batch, gradient, learner, relative, tokenizer

__all__ = ["tokenizer"]


@pytest.mark.parametrize("kind", get_args(LossKind))
def test_a_positive_weight_of_a_token_is_a_factor_of_its_advantage(kind: LossKind) -> None:
    """What lets `prepare` fold the weights into the advantages."""
    random = torch.Generator().manual_seed(0)
    logprobs, old = (-3 * torch.rand(40, generator=random) for _ in range(2))
    advantages, weights = torch.randn(40, generator=random), 2 * torch.rand(40, generator=random)
    transitions = torch.arange(40) // 8
    loss = Loss(kind=kind, dual_clip=3.0 if kind == "ppo_clip" else None)
    plain, clipped = losses.policy_loss(logprobs, old, advantages, transitions, loss)
    weighted, clipped_too = losses.policy_loss(logprobs, old, weights * advantages, transitions, loss)
    torch.testing.assert_close(weighted, weights * plain)
    assert torch.equal(clipped, clipped_too)


def test_the_proximal_policy_is_that_of_the_start_of_the_step(tokenizer: Any) -> None:
    one = learner(tokenizer, learning_rate=1e-2)
    loss = Loss(old="proximal", truncation=1.5, temperature=0.8)
    sequences = near(one, batch())
    prepared, _ = one.prepare(sequences, loss)
    proximal = one.logprobs(sequences, 0.8)
    seen: list[float] = []
    for before, after, logprobs in zip(sequences, prepared, proximal, strict=True):
        np.testing.assert_allclose(after.logprobs, logprobs, atol=1e-6)
        weights = np.minimum(np.exp(logprobs.numpy() - before.logprobs), 1.5)
        np.testing.assert_allclose(after.advantages, before.advantages * weights, rtol=1e-5)
        seen += weights.tolist()
    assert max(seen) == pytest.approx(1.5) and min(seen) < 0.9
    assert one.step(prepared, loss)["max_ratio_error"] < 1e-5  # of the first optimiser step
    assert one.step(prepared, loss)["max_ratio_error"] > 1e-3  # of the next
    unchanged, metrics = one.prepare(sequences, Loss())
    assert all(a is b for a, b in zip(unchanged, sequences, strict=True)) and not metrics


def test_at_the_start_of_a_step_both_weigh_alike_where_nothing_is_cut(tokenizer: Any) -> None:
    ratio, weight = Loss(kind="importance_sampling"), Loss(kind="importance_sampling", old="proximal", truncation=1e9)
    one, other = (learner(tokenizer, max_grad_norm=1e9) for _ in range(2))
    sequences = near(one, batch())
    prepared, _ = one.prepare(sequences, weight)
    assert relative(gradient(one, prepared, weight), gradient(other, sequences, ratio)) < 1e-5


def test_the_gradient_of_clip_and_weight_is_verls() -> None:
    logprobs, old, behaviour, advantages = (
        sampled(INPUTS[name]) for name in ("log_prob", "old_log_prob", "rollout_log_prob", "advantages")
    )
    weights = (old - behaviour).exp().clamp(max=2.0)
    torch.testing.assert_close(weights, sampled(OUTPUTS["verl.tis.token.2.0"]), atol=1e-5, rtol=1e-4)
    logprobs.requires_grad_()
    value = losses.ppo_clip(logprobs, old, weights * advantages, torch.zeros(0), 0.2, 0.28, 3.0).mean()
    torch.autograd.backward(value)
    assert float(value) == pytest.approx(OUTPUTS["verl.ppo_clip+tis2.loss"], abs=1e-5)
    expected = sampled(OUTPUTS["verl.ppo_clip+tis2.grad"])
    torch.testing.assert_close(logprobs.grad, expected, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("old", ["behaviour", "proximal"])
def test_how_far_engine_and_learner_are_apart_is_told_of_the_present_weights_tokens(tokenizer: Any, old: Any) -> None:
    one, loss = learner(tokenizer), Loss(old=old)
    exact = [replace(s, logprobs=p.numpy()) for s, p in zip(batch(), one.logprobs(batch()), strict=True)]
    stale = [replace(s, logprobs=s.logprobs - 1, versions=s.versions + 6) for s in exact]
    off = replace(exact[0], logprobs=exact[0].logprobs - np.eye(len(exact[0].positions), dtype=np.float32)[0] * 0.1)

    def told(sequences: list[TrainingSequence], version: int | None) -> dict[str, float]:
        prepared, metrics = one.prepare(sequences, loss, version)
        metrics |= one.step(prepared, loss, version)
        return {name: value for name, value in metrics.items() if name.startswith("inference_")}

    one.optimizer = torch.optim.SGD(one.model.parameters(), lr=0.0)
    assert told([*exact, *stale], 0)["inference_mismatch"] < 1e-5
    apart = told([off, *exact[1:], *stale], 0)
    assert apart["inference_mismatch"] == pytest.approx(np.expm1(0.1), rel=1e-3)
    tokens = sum(len(sequence.positions) for sequence in exact)
    assert apart["inference_kl"] == pytest.approx((np.expm1(0.1) - 0.1) / tokens, rel=1e-3)
    assert told(exact, 3) == told(exact, None) == {}


def near(one: Any, sequences: list[TrainingSequence]) -> list[TrainingSequence]:
    """The same, sampled by weights not far from the learner's."""
    random = np.random.default_rng(1)
    return [
        replace(s, logprobs=(p.numpy() + random.normal(0, 0.5, len(s.positions))).astype(np.float32))
        for s, p in zip(sequences, one.logprobs(sequences, 0.8), strict=True)
    ]
