"""The gallery's functions against the values of verl and SkyRL, and against the algorithms that
take them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import agentlightning as agl
from agentlightning.data.credit import Returns, RewardedGroup
from agentlightning.data.sequences import Origin
from agentlightning.errors import ConfigError
from agentlightning.learner.losses import Loss, policy_loss
from agentlightning.learner.teacher import open_teacher
from tests.golden import INPUTS, MASK, OUTPUTS, sampled
from tests.test_trainer import TASKS, policy
from tests.transitions import tokens_of, transition

GALLERY = Path(__file__).parents[2] / "examples" / "gallery"
sys.path.insert(0, str(GALLERY))
import baselines  # noqa: E402
import corrections  # noqa: E402
import distillation  # noqa: E402
import losses  # noqa: E402
import selfplay  # noqa: E402
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
def test_a_loss_and_its_gradient_are_those_of_verl(
    name: str, oracle: str, aggregation: str
) -> None:
    logprobs = sampled(INPUTS["log_prob"]).requires_grad_()
    loss = agl.GRPO(loss=getattr(losses, name)).make_loss()
    values = policy_loss(logprobs, OLD, ADVANTAGES, TRANSITIONS, loss).values
    total = (values * weights(aggregation)).sum()
    total.backward()
    assert float(total.detach()) == pytest.approx(OUTPUTS[f"{oracle}.loss"], abs=1e-5)
    torch.testing.assert_close(
        logprobs.grad, sampled(OUTPUTS[f"{oracle}.grad"]), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize(("name", "oracle"), [("opo", "verl.opo"), ("maxrl", "skyrl.maxrl")])
def test_a_baseline_gives_the_advantages_of_the_oracle(name: str, oracle: str) -> None:
    agl.GRPO(baseline=getattr(baselines, name))
    rewards = np.array(INPUTS["rewards"])
    groups = np.unique(INPUTS["index"], return_inverse=True)[1]
    rows = np.arange(len(rewards))
    returns = Returns(rewards, rows, MASK.sum(1), groups, rewards)
    expected = [row[mask][0] for row, mask in zip(np.array(OUTPUTS[oracle]), MASK, strict=True)]
    np.testing.assert_allclose(getattr(baselines, name)(returns), expected, atol=1e-5)


def test_a_double_sided_mask_follows_the_present_weights() -> None:
    agl.GRPO(loss="importance_sampling", correction=corrections.double_sided)
    behaviour, present = torch.zeros(4), torch.tensor([0.79, 0.81, 1.27, 1.29]).log()
    kept = corrections.double_sided(behaviour, present)
    assert kept.tolist() == [False, True, True, False]


def test_a_focal_loss_scales_each_group_by_how_often_it_failed() -> None:
    old, advantages, transitions = OLD[:4], ADVANTAGES[:4], torch.tensor([0, 0, 1, 1])
    tokens = tokens_of(
        ([2], Origin(0, (1.0, 1.0, 1.0, 0.0))), ([2], Origin(1, (0.0, 0.0, 1.0, 0.0)))
    )
    setting = agl.GRPO(loss={"name": losses.focal, "gamma": 2.0}).make_loss()
    found = policy_loss(old + 0.1, old, advantages, transitions, setting, tokens)
    plain = policy_loss(old + 0.1, old, advantages, transitions, Loss()).values
    expected = torch.tensor([0.25**2, 0.25**2, 0.75**2, 0.75**2])
    torch.testing.assert_close(found.values, expected * plain)
    torch.testing.assert_close(found.metrics["focus"], expected)


def test_echo_weighs_each_answer_of_the_environment_once() -> None:
    agl.GRPO(token_weights={"name": token_weights.echo, "weight": 0.1})
    first, second = transition([1, 2], [3]), transition([1, 2, 3, 4, 5], [6, 7])
    edited = transition([1, 9], [8])
    found = token_weights.echo([first, second, edited], weight=0.5)
    assert [one.tolist() for one in found] == [[0, 0, 1], [0, 0, 0, 0.5, 0.5, 1, 1], [0, 0, 1]]


# --- self-play ---


def game(*rewards: float) -> RewardedGroup:
    """Rollouts in which each player makes a call."""
    players = [transition([1], [2, 3], agent="first"), transition([1], [4], agent="second")]
    return RewardedGroup([players] * len(rewards), rewards)


def test_rae_compares_each_player_with_what_it_usually_earns() -> None:
    rae = selfplay.RAE(decay=0.9, group_size=2)
    assert [
        [item.advantages.tolist() for item in calls]
        for calls in rae.advantages([game(1.0, -0.5)])[0]
    ] == [
        [[1.0, 1.0], [-1.0]],
        [[-0.5, -0.5], [0.5]],
    ]
    mean = 0.9 * (0.1 * 1.0) + 0.1 * -0.5
    found = rae.step_done([game(1.0, -0.5)])
    assert found == pytest.approx({"role_mean/first": mean, "role_mean/second": -mean})
    first, second = rae.advantages([game(1.0)])[0][0]
    assert (first.advantages[0], second.advantages[0]) == pytest.approx((1 - mean, mean - 1))
    resumed = selfplay.RAE(decay=0.9)
    resumed.restore(rae.state())
    assert resumed.advantages([game(1.0)])[0][0][0].advantages[0] == pytest.approx(1 - mean)
    with pytest.raises(ConfigError, match="decay"):
        selfplay.RAE(decay=1.0)


def test_two_players_get_opposite_credit() -> None:
    grpo = agl.GRPO(group_size=8, returns=selfplay.zero_sum)
    group = game(1.0, -1.0)
    credited = [
        [call for calls in grpo.advantages([own])[0] for call in calls]
        for own in map(only(group), (0, 1))
    ]
    assert [item.advantages[0] for item in credited[0]] == [
        -item.advantages[0] for item in credited[1]
    ]


def only(group: RewardedGroup) -> Any:
    """The group as the policy of each player sees it."""
    return lambda player: RewardedGroup(
        [[calls[player]] for calls in group.transitions], group.rewards
    )


# --- self-distillation ---

HINT = "<|system|>{word}<|end|>"


def test_a_hinted_teacher_judges_what_was_sampled_without_the_hint() -> None:
    with pytest.raises(ConfigError, match="hint"):
        distillation.SelfDistillation(teacher=policy(), hint="think")
    teacher = policy(seed=7)
    learned = distillation.SelfDistillation(teacher=teacher, hint=HINT)
    learned._teacher, learned._tokenizer = (
        open_teacher(teacher, None),
        teacher.tokenizer.backend_tokenizer,
    )
    call = transition([5, 6, 7], [8, 9])
    task = agl.Rollout(rollout_id="r", input=TASKS[0], start_time=0.0)
    item = learned.advantages([RewardedGroup([[call]], [0.0], rollouts=[task])])[0][0][0]
    assert item.transition is call
    hint = teacher.tokenizer.encode(HINT.format(**TASKS[0]), add_special_tokens=False)
    with torch.no_grad():
        found = (
            teacher.model(torch.tensor([[*hint, 5, 6, 7, 8, 9]])).logits[0].float().log_softmax(-1)
        )
    # log-probabilities of the sampler are 0
    expected = [found[len(hint) + 2, 8], found[len(hint) + 3, 9]]
    np.testing.assert_allclose(item.advantages, expected, atol=1e-4)
