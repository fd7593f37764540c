"""Losses and their gradients equal those of verl, OpenRLHF and AReaL, value for value."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch

from agentlightning.data.aggregation import aggregation_weights
from agentlightning.data.sequences import CreditedTransition, TrainingSequence, build_sequences
from agentlightning.errors import ConfigError
from agentlightning.learner import losses
from agentlightning.learner.losses import Loss, LossKind
from tests.golden import INPUTS, MASK, OUTPUTS, sampled
from tests.transitions import transition

# the transition of each sampled token: one per golden row
ROWS = torch.from_numpy(np.nonzero(MASK)[0])


def golden_sequences() -> list[TrainingSequence]:
    """One transition per golden row."""
    calls = [
        transition([1], np.ones(count), rollout_id=f"r{row}")
        for row, count in enumerate(MASK.sum(1))
    ]
    credited = [
        CreditedTransition(call, np.ones(len(call.response_ids), np.float32)) for call in calls
    ]
    return [made for one in credited for made in build_sequences([one], "transition")]


def check(key: str, loss: Loss, old_shift: float = 0.0) -> None:
    """The value of `loss` on the golden inputs and its gradient are those stored under `key`."""
    logprobs = sampled(INPUTS["log_prob"]).requires_grad_()
    old, advantages = sampled(INPUTS["old_log_prob"]) + old_shift, sampled(INPUTS["advantages"])
    per_token, *_ = losses.policy_loss(logprobs, old, advantages, ROWS, loss)
    weights = np.concatenate(
        aggregation_weights(golden_sequences(), loss.aggregation, loss.constant_length)
    )
    total = (per_token * torch.from_numpy(weights)).sum()
    total.backward()
    assert float(total.detach()) == pytest.approx(OUTPUTS[f"{key}.loss"], abs=1e-5)
    torch.testing.assert_close(logprobs.grad, sampled(OUTPUTS[f"{key}.grad"]), atol=1e-5, rtol=0)


CLIP = {"clip_low": 0.2, "clip_high": 0.28}


@pytest.mark.parametrize(
    ("verl_name", "aggregation", "constant"),
    [
        ("token-mean", "token-mean", None),
        ("seq-mean-token-mean", "sequence-mean", None),
        ("seq-mean-token-sum-norm", "constant", MASK.shape[1]),
        ("seq-mean-token-sum", "constant", 1),
    ],
)
def test_clip_loss_and_gradient_equal_verl(
    verl_name: str, aggregation: str, constant: int | None
) -> None:
    loss = Loss(**CLIP, dual_clip=3.0, aggregation=aggregation, constant_length=constant)
    check(f"verl.ppo_clip[.2,.28]dual3.{verl_name}", loss)


@pytest.mark.parametrize(
    "key", ["verl.ppo_clip.dual_active(old-1.2)", "areal.ppo_clip.c3(old-1.2)"]
)
def test_dual_clip_bounds_the_loss_where_the_ratio_explodes(key: str) -> None:
    check(key, Loss(**CLIP, dual_clip=3.0), old_shift=-1.2)


@pytest.mark.parametrize(
    ("key", "kind", "aggregation"),
    [
        ("verl.gspo.seq-mean-token-mean", "gspo", "sequence-mean"),
        ("openrlhf.gspo", "gspo", "sequence-mean"),
        ("verl.gspo", "gspo", "token-mean"),
        ("areal.gspo(token-mean)", "gspo", "token-mean"),
        ("verl.cispo", "cispo", "token-mean"),
        ("verl.gpg", "policy_gradient", "token-mean"),
    ],
)
def test_the_other_losses_equal_the_frameworks(key: str, kind: LossKind, aggregation: str) -> None:
    check(key, Loss(kind, **({} if kind == "policy_gradient" else CLIP), aggregation=aggregation))


def test_what_a_clip_changed_is_reported_token_by_token() -> None:
    ratios, advantages = torch.tensor([1.5, 1.5, 0.5, 0.5]), torch.tensor([1.0, -1.0, 1.0, -1.0])
    arguments = (ratios.log(), torch.zeros(4), advantages, torch.tensor([0, 0, 0, 0]))
    assert losses.policy_loss(*arguments, Loss())[1].tolist() == [True, False, False, True]
    assert losses.policy_loss(*arguments, Loss("cispo"))[1].tolist() == [True] * 4
    # The ratio of the whole is (1.5 · 1.5 · 0.5 · 0.5)^(1/4) = 0.87.
    assert losses.policy_loss(*arguments, Loss("gspo"))[1].tolist() == [False, True, False, True]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_equal_verl(estimator: Any) -> None:
    expected = torch.tensor(OUTPUTS[f"verl.kl.{estimator}"])
    actual = losses.kl(
        torch.tensor(INPUTS["log_prob"]), torch.tensor(INPUTS["ref_log_prob"]), estimator
    )
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def clipped_below_three(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor
) -> torch.Tensor:
    """What a user might write: here a loss that is known."""
    ratio = torch.exp(logprobs - old_logprobs)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    return torch.where(advantages < 0, loss.clamp(max=-3 * advantages), loss)


def test_a_function_of_the_users_own_is_a_loss() -> None:
    for old in ("behaviour", "proximal"):
        loss = Loss(clipped_below_three, old=old)
        check("verl.ppo_clip[.2,.28]dual3.token-mean", loss)
        assert loss.name == "clipped_below_three"


def test_one_that_takes_low_and_high_clips_as_ours_do() -> None:
    def cut(
        advantages: torch.Tensor,
        logprobs: torch.Tensor,
        old_logprobs: torch.Tensor,
        high: float = 0.2,
        low: float = 0.2,
    ) -> torch.Tensor:
        return -torch.exp(logprobs - old_logprobs).clamp(1 - low, 1 + high) * advantages

    ratios = torch.tensor([1.5, 1.1, 0.5])
    arguments = (ratios.log(), torch.zeros(3), torch.ones(3), torch.tensor([0, 0, 0]))
    assert losses.policy_loss(*arguments, Loss(cut))[1].tolist() == [True, False, True]
    assert losses.policy_loss(*arguments, Loss(cut, clip_high=1.0))[1].tolist() == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"kind": "ppo"}, r"Known: .*ppo_clip"),
        (
            {"kind": "importance_sampling", "clip_high": 0.3},
            "importance_sampling does not use them",
        ),
        ({"kind": "cispo", "dual_clip": 3.0}, "dual_clip is set, but the loss is cispo"),
        ({"clip_low": 0.0}, "clip range"),
        ({"aggregation": "constant"}, "needs constant_length"),
        (
            {"kind": lambda logprobs, old: logprobs},
            "'old', which nothing fills: .*old_logprobs",
        ),
        ({"kind": lambda logprobs, low, high: logprobs}, "'low', which nothing fills"),
    ],
)
def test_what_cannot_be_meant_is_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Loss(**settings)


@pytest.mark.parametrize(
    ("function", "old", "why"),
    [
        (lambda logprobs: logprobs.detach(), "behaviour", "with a gradient through logprobs"),
        (lambda logprobs: logprobs.mean(), "behaviour", "a loss for each of 2 tokens"),
        (lambda logprobs: None, "behaviour", "but returned None"),
        (lambda logprobs: logprobs + "x", "behaviour", r"<lambda> failed: TypeError: .*losses.py:"),
        (lambda logprobs, advantages: (logprobs - advantages) ** 2, "proximal", "not prop"),
    ],
)
def test_what_a_function_returns_is_checked_at_each_call(function: Any, old: Any, why: str) -> None:
    logprobs = torch.tensor([-0.5, -1.0], requires_grad=True)
    given = (torch.zeros(2), torch.ones(2), torch.tensor([0, 0]))
    with pytest.raises(ConfigError, match=why):
        losses.policy_loss(logprobs, *given, Loss(function, old=old))


@pytest.mark.parametrize("kind", get_args(LossKind))
def test_a_positive_weight_of_a_token_is_a_factor_of_its_advantage(kind: LossKind) -> None:
    """What lets `corrected` fold the weights into the advantages."""
    random = torch.Generator().manual_seed(0)
    logprobs, old = (-3 * torch.rand(40, generator=random) for _ in range(2))
    advantages, weights = torch.randn(40, generator=random), 2 * torch.rand(40, generator=random)
    transitions = torch.arange(40) // 8
    loss = Loss(kind=kind, dual_clip=3.0 if kind == "ppo_clip" else None)
    plain, clipped, _ = losses.policy_loss(logprobs, old, advantages, transitions, loss)
    weighted, clipped_too, _ = losses.policy_loss(
        logprobs, old, weights * advantages, transitions, loss
    )
    torch.testing.assert_close(weighted, weights * plain)
    assert torch.equal(clipped, clipped_too)
