"""Losses and their gradients equal verl 0.9.1's, value for value (tests/oracles/verl_0_9_1.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentlightning.data import credit
from agentlightning.data.sequences import Aggregation, TrainingSequence, aggregation_weights
from agentlightning.errors import ConfigError
from agentlightning.learner import losses
from agentlightning.learner.base import Loss

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "oracles" / "verl_0_9_1.json").read_text())
INPUTS, OUTPUTS = GOLDEN["inputs"], GOLDEN["outputs"]
MASK = np.array(INPUTS["mask"], bool)


def per_token(name: str) -> torch.Tensor:
    """The sampled tokens of a golden [B, L] input, flattened row by row."""
    return torch.tensor(INPUTS[name], dtype=torch.float32)[torch.from_numpy(MASK)]


def golden_sequences() -> list[TrainingSequence]:
    """One transition per golden row."""
    out = []
    for row, mask in enumerate(MASK):
        positions = np.flatnonzero(mask).astype(np.int32)
        out.append(
            TrainingSequence(
                rollout_id=f"r{row}",
                token_ids=np.zeros(len(mask), np.int32),
                positions=positions,
                transitions=np.zeros(len(positions), np.int32),
                logprobs=np.zeros(len(positions), np.float32),
                advantages=np.zeros(len(positions), np.float32),
            )
        )
    return out


@pytest.mark.parametrize(("name", "baseline"), [("std,ddof1,eps1e-6", credit.grpo), ("no_std", credit.dr_grpo)])
def test_group_advantages_equal_verl(name: str, baseline: Any) -> None:
    groups = np.array(INPUTS["index"])
    rewards = np.array(INPUTS["rewards"])
    advantages = np.zeros(len(rewards))
    for group in np.unique(groups):
        advantages[groups == group] = baseline(rewards[groups == group])
    expected = np.array(OUTPUTS[f"verl.grpo({name})"])
    np.testing.assert_allclose(advantages[:, None] * MASK, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("verl_name", "aggregation"),
    [
        ("token-mean", "token-mean"),
        ("seq-mean-token-mean", "sequence-mean"),
        ("seq-mean-token-sum-norm", "constant"),
    ],
)
def test_clip_loss_and_gradient_equal_verl(verl_name: str, aggregation: Aggregation) -> None:
    logprobs = per_token("log_prob").requires_grad_()
    loss = losses.ppo_clip(logprobs, per_token("old_log_prob"), per_token("advantages"), 0.2, 0.28, 3.0)
    weights = aggregation_weights(golden_sequences(), aggregation, constant=MASK.shape[1])
    total = (loss * torch.from_numpy(np.concatenate(weights))).sum()
    total.backward()
    key = f"verl.ppo_clip[.2,.28]dual3.{verl_name}"
    assert float(total.detach()) == pytest.approx(OUTPUTS[f"{key}.loss"], abs=1e-5)
    expected = torch.tensor(OUTPUTS[f"{key}.grad"])[torch.from_numpy(MASK)]
    torch.testing.assert_close(logprobs.grad, expected, atol=1e-5, rtol=0)


def test_dual_clip_bounds_the_loss_where_the_ratio_explodes() -> None:
    logprobs = per_token("log_prob").requires_grad_()
    loss = losses.ppo_clip(logprobs, per_token("old_log_prob") - 1.2, per_token("advantages"), 0.2, 0.28, 3.0)
    loss.mean().backward()
    assert float(loss.mean().detach()) == pytest.approx(OUTPUTS["verl.ppo_clip.dual_active(old-1.2).loss"], abs=1e-5)
    expected = torch.tensor(OUTPUTS["verl.ppo_clip.dual_active(old-1.2).grad"])[torch.from_numpy(MASK)]
    torch.testing.assert_close(logprobs.grad, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_equal_verl(estimator: Any) -> None:
    expected = torch.tensor(OUTPUTS[f"verl.kl.{estimator}"])
    actual = losses.kl(torch.tensor(INPUTS["log_prob"]), torch.tensor(INPUTS["ref_log_prob"]), estimator)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def test_a_group_of_one_and_a_group_of_equals_have_no_advantage() -> None:
    assert credit.grpo([0.7]).tolist() == [0.0]
    assert credit.grpo([0.1] * 7).tolist() == [0.0] * 7
    assert credit.dr_grpo([0.1] * 7).tolist() == [0.0] * 7


def test_settings_out_of_range_are_refused_by_name() -> None:
    for wrong in ({"clip_low": 0.0}, {"dual_clip": 1.0}, {"temperature": 0.0}, {"kl_coefficient": -1.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong)).split("_")[0]):
            Loss(**wrong)
