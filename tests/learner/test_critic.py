"""A critic beside the policy: values and gradients are exact however a batch is packed, and it is
saved with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from agentlightning.data.sequences import (
    CreditedTransition,
    Level,
    TrainingSequence,
    build_sequences,
)
from agentlightning.errors import ConfigError
from agentlightning.learner import losses
from agentlightning.learner.base import Critic, CriticTrunk
from agentlightning.learner.losses import Loss
from agentlightning.learner.policy import Policy, open_policy
from agentlightning.learner.policy_config import AdamW, LoRA
from agentlightning.learner.torch import TorchLearner
from agentlightning.learner.training_forward import CRITIC_FILE
from tests.golden import INPUTS, OUTPUTS, sampled
from tests.learner.test_torch import Still, conversation, relative
from tests.models import tiny_model

TRUNKS: tuple[CriticTrunk, ...] = get_args(CriticTrunk)


LOSS = Loss(value_coefficient=0.7, value_clip=0.1, entropy_coefficient=0.01)


def judged(seed: int) -> list[CreditedTransition]:
    """A conversation whose calls a critic has judged, wrongly."""
    random = np.random.default_rng(seed)

    def said(item: CreditedTransition) -> np.ndarray:
        return random.normal(size=len(item.advantages)).astype(np.float32)

    return [
        replace(item, values=said(item) / 10, value_targets=said(item))
        for item in conversation(seed)
    ]


def batch(level: Level = "trajectory", rollouts: int = 4) -> list[TrainingSequence]:
    return [
        sequence for seed in range(rollouts) for sequence in build_sequences(judged(seed), level)
    ]


def with_critic(
    tokenizer: Any, trunk: CriticTrunk = "shared", policy: Policy | None = None, **adam: Any
) -> TorchLearner:
    """One whose critic says something already."""
    critic = Critic(trunk, learning_rate=adam.pop("critic_rate", None))
    one = TorchLearner(policy or Policy(tiny_model(), tokenizer), AdamW(**adam), critic=critic)
    assert one.critic is not None
    with torch.no_grad():
        one.critic.head.weight.copy_(torch.linspace(-0.3, 0.3, 64)[None])
        one.critic.head.bias.fill_(0.1)
    return one


def gradient(
    one: TorchLearner, sequences: Sequence[TrainingSequence], loss: Loss = LOSS
) -> torch.Tensor:
    assert one.critic is not None
    one.optimizer = Still(one._masters.trained, lr=0.0)
    one.step(sequences, loss)
    return torch.cat(
        [tensor.grad.flatten() for tensor in one._masters.trained if tensor.grad is not None]
    )


@pytest.mark.parametrize("trunk", TRUNKS)
def test_a_critic_is_trained_of_sampled_tokens_alone(tokenizer: Any, trunk: CriticTrunk) -> None:
    observing = [
        replace(
            item,
            weights=np.ones(len(item.transition.prompt_ids) + len(item.advantages), np.float32),
        )
        for seed in range(4)
        for item in judged(seed)
    ]
    both = [made for item in observing for made in build_sequences([item], "transition")]
    one, other = (with_critic(tokenizer, trunk, micro_batch_tokens=64) for _ in range(2))
    observed, plain = one.step(both, LOSS), other.step(batch("transition"), LOSS)
    for name in ("value_loss", "value_clip_fraction", "tokens"):
        assert observed[name] == pytest.approx(plain[name], rel=1e-5)


@pytest.mark.parametrize("trunk", TRUNKS)
def test_values_and_gradients_do_not_depend_on_how_calls_are_packed(
    tokenizer: Any, trunk: CriticTrunk
) -> None:
    def alone(tokens: int = 100_000) -> TorchLearner:
        return with_critic(tokenizer, trunk, max_grad_norm=1e9, micro_batch_tokens=tokens)

    calls = batch("transition")
    whole, said = gradient(alone(), calls), np.sort(np.concatenate(alone().values(calls)))
    assert relative(gradient(alone(40), calls), whole) < 1e-5
    more_than_a_projection = alone()
    more_than_a_projection._head_is_plain = False
    assert relative(gradient(more_than_a_projection, calls), whole) < 1e-5
    for level in ("trajectory", "tree"):
        assert relative(gradient(alone(64), batch(level)), whole) < 1e-4
        values = np.concatenate(alone(64).values(batch(level)))
        np.testing.assert_allclose(np.sort(values), said, atol=1e-5)


@pytest.mark.parametrize("trunk", TRUNKS)
def test_the_gradient_is_that_of_the_formula(tokenizer: Any, trunk: CriticTrunk) -> None:
    """Against one call at a time, by nothing but the model, its head and autograd."""
    one, sequences = with_critic(tokenizer, trunk, max_grad_norm=1e9), batch("transition", 2)
    model, head = one.model, one.critic.head  # type: ignore[union-attr]
    trunk_model = one.critic.trunk or model.base_model  # type: ignore[union-attr]
    total, tokens = torch.zeros(()), sum(len(sequence.positions) for sequence in sequences)
    for sequence in sequences:
        ids = torch.from_numpy(sequence.token_ids.astype(np.int64))
        places = torch.from_numpy(sequence.positions.astype(np.int64))
        old, target = torch.from_numpy(sequence.values), torch.from_numpy(sequence.value_targets)
        advantages = torch.from_numpy(sequence.advantages)
        logprobs = torch.log_softmax(model(ids[None]).logits[0], -1)[places - 1, ids[places]]
        ratio = (logprobs - torch.from_numpy(sequence.logprobs)).exp()
        policy = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages)
        values = head(trunk_model(ids[None]).last_hidden_state[0])[places - 1, 0]
        kept = old + (values - old).clamp(-0.1, 0.1)
        critic = 0.5 * torch.maximum((values - target) ** 2, (kept - target) ** 2)
        total = total + (policy + 0.7 * critic).sum() / tokens
    parameters = [*model.parameters(), *one.critic.parameters()]  # type: ignore[union-attr]
    expected = torch.autograd.grad(total, parameters)
    found = gradient(one, sequences, replace(LOSS, entropy_coefficient=0.0))
    assert relative(found, torch.cat([part.flatten() for part in expected])) < 1e-4


def test_the_value_loss_is_verls() -> None:
    old = sampled(INPUTS["values"])
    loss, clipped = losses.value_loss(
        old + 0.3, old, sampled(OUTPUTS["verl.gae(.99,.95).returns"]), 0.2
    )
    assert float(loss.mean()) == pytest.approx(OUTPUTS["verl.value_loss(clip.2)"], abs=1e-6)
    assert 0 < int(clipped.sum()) < len(clipped)


@pytest.mark.parametrize("trunk", TRUNKS)
def test_a_checkpoint_holds_the_critic_bit_for_bit(
    tokenizer: Any, tmp_path: Path, trunk: CriticTrunk
) -> None:
    straight, resumed = (with_critic(tokenizer, trunk, learning_rate=1e-3) for _ in range(2))
    straight.step(batch(), LOSS)
    straight.save(tmp_path)
    resumed.load(tmp_path)
    for one in (straight, resumed):
        one.step(batch(), LOSS)
    for a, b in zip(straight._masters.trained, resumed._masters.trained, strict=True):
        assert torch.equal(a, b)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.num_parameters() == straight.model.num_parameters()
    other: CriticTrunk = "separate" if trunk == "shared" else "shared"
    with pytest.raises(ConfigError, match="cannot be resumed"):
        with_critic(tokenizer, other).load(tmp_path)
    (tmp_path / CRITIC_FILE).unlink()
    with pytest.raises(ConfigError, match="cannot be resumed"):
        resumed.load(tmp_path)


@pytest.mark.parametrize("trunk", TRUNKS)
def test_beside_an_adapter_a_critic_shares_the_model_below(
    tokenizer: Any, tmp_path: Path, trunk: CriticTrunk
) -> None:
    def adapted() -> TorchLearner:
        return with_critic(
            tokenizer,
            trunk,
            open_policy(Policy(tiny_model(), tokenizer), seed=1, lora=LoRA(rank=4)),
        )

    one, other = adapted(), adapted()
    assert one.critic is not None
    frozen = {id(parameter) for parameter in one.model.parameters() if not parameter.requires_grad}
    trunk_parameters = [] if one.critic.trunk is None else list(one.critic.trunk.parameters())
    assert all(
        id(parameter) in frozen for parameter in trunk_parameters if not parameter.requires_grad
    )
    before = one.values(batch())
    assert one.step(batch(), LOSS)["critic_grad_norm"] > 0
    assert np.abs(np.concatenate(one.values(batch())) - np.concatenate(before)).max() > 1e-6
    one.save(tmp_path)
    other.load(tmp_path)
    assert np.array_equal(
        np.concatenate(one.values(batch())), np.concatenate(other.values(batch()))
    )
    assert (tmp_path / CRITIC_FILE).stat().st_size < 200_000  # no copy of the model
