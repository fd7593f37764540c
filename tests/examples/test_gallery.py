"""The gallery's functions against the values of verl and SkyRL, and against the algorithms that take them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import agentlightning as agl
from agentlightning.data.credit import Returns
from agentlightning.data.sequences import Origin
from agentlightning.learner.losses import Loss, policy_loss
from tests.golden import INPUTS, MASK, OUTPUTS, sampled
from tests.transitions import tokens_of, transition

GALLERY = Path(__file__).parents[2] / "examples" / "gallery"
sys.path.insert(0, str(GALLERY))
import aggregations  # noqa: E402
import baselines  # noqa: E402
import corrections  # noqa: E402
import losses  # noqa: E402
import weights as token_weights  # noqa: E402

TRANSITIONS = torch.from_numpy(np.nonzero(MASK)[0])
ADVANTAGES = sampled(INPUTS["advantages"])
OLD = sampled(INPUTS["old_log_prob"])


def weights(aggregation: str) -> torch.Tensor:
    lengths = torch.from_numpy(MASK.sum(1))
    if aggregation == "token-mean":
        return torch.full((int(MASK.sum()),), 1 / float(MASK.sum()))
    return 1 / (lengths[TRANSITIONS] * len(lengths))


@pytest.mark.parametrize(
    ("name", "oracle", "aggregation"),
    [
        ("sapo", "verl.sapo", "sequence-mean"),
        ("gmpo", "verl.geo_mean", "sequence-mean"),
        ("dppo_tv", "verl.dppo_tv", "token-mean"),
        ("dppo_kl", "verl.dppo_kl", "token-mean"),
    ],
)
def test_a_loss_and_its_gradient_are_those_of_verl(name: str, oracle: str, aggregation: str) -> None:
    logprobs = sampled(INPUTS["log_prob"]).requires_grad_()
    total = (getattr(losses, name)(logprobs, OLD, ADVANTAGES, TRANSITIONS) * weights(aggregation)).sum()
    total.backward()
    assert float(total.detach()) == pytest.approx(OUTPUTS[f"{oracle}.loss"], abs=1e-5)
    torch.testing.assert_close(logprobs.grad, sampled(OUTPUTS[f"{oracle}.grad"]), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("name", "oracle"), [("opo", "verl.opo"), ("maxrl", "skyrl.maxrl")])
def test_a_baseline_gives_the_advantages_of_the_oracle(name: str, oracle: str) -> None:
    rewards = np.array(INPUTS["rewards"])
    groups = np.unique(INPUTS["index"], return_inverse=True)[1]
    rows = np.arange(len(rewards))
    returns = Returns(rewards, rows, MASK.sum(1), groups, rewards)
    expected = [row[mask][0] for row, mask in zip(np.array(OUTPUTS[oracle]), MASK, strict=True)]
    np.testing.assert_allclose(getattr(baselines, name)(returns), expected, atol=1e-5)


def test_a_double_sided_mask_follows_the_present_weights() -> None:
    behaviour, present = torch.zeros(4), torch.tensor([0.79, 0.81, 1.27, 1.29]).log()
    weights, kept = corrections.double_sided(behaviour, behaviour, present, torch.zeros(4, dtype=torch.int64))
    assert weights.tolist() == [1.0] * 4
    assert kept.tolist() == [False, True, True, False]


def test_a_focal_loss_scales_each_group_by_how_often_it_failed() -> None:
    old, advantages, transitions = OLD[:4], ADVANTAGES[:4], torch.tensor([0, 0, 1, 1])
    tokens = tokens_of(([2], Origin(0, (1.0, 1.0, 1.0, 0.0))), ([2], Origin(1, (0.0, 0.0, 1.0, 0.0))))
    setting = agl.GRPO(loss={"name": losses.focal, "gamma": 2.0}).make_loss()
    found = policy_loss(old + 0.1, old, advantages, transitions, setting, tokens)
    plain = policy_loss(old + 0.1, old, advantages, transitions, Loss()).values
    expected = torch.tensor([0.25**2, 0.25**2, 0.75**2, 0.75**2])
    torch.testing.assert_close(found.values, expected * plain)
    torch.testing.assert_close(found.metrics["focus"], expected)


def test_echo_weighs_each_answer_of_the_environment_once() -> None:
    first, second = transition([1, 2], [3]), transition([1, 2, 3, 4, 5], [6, 7])
    edited = transition([1, 9], [8])
    found = token_weights.echo([first, second, edited], weight=0.5)
    assert [one.tolist() for one in found] == [[0, 0, 1], [0, 0, 0, 0.5, 0.5, 1, 1], [0, 0, 1]]


def test_a_constant_per_rollout_does_not_ask_how_many_calls_it_made() -> None:
    tokens = tokens_of(([2, 1], Origin()), ([1], Origin()))
    assert aggregations.per_rollout(tokens, length=4).tolist() == [1 / 8] * 4


def test_an_algorithm_takes_each() -> None:
    agl.GRPO(loss=losses.focal, aggregation={"name": aggregations.per_rollout, "length": 64})
    agl.GRPO(token_weights={"name": token_weights.echo, "weight": 0.1})
    agl.GRPO(loss="importance_sampling", correction=corrections.double_sided)
    for name in ("sapo", "gmpo", "dppo_tv", "dppo_kl"):
        agl.GRPO(loss=getattr(losses, name))
    for name in ("opo", "maxrl"):
        agl.GRPO(baseline=getattr(baselines, name))
