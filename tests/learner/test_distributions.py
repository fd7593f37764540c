"""Hidden states are projected some at a time: the same numbers, in memory that does not grow with what is sampled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel, GraniteConfig, GraniteForCausalLM

from agentlightning.learner.forward import Sampled, has_plain_head, sampled
from tests.models import tiny_model

HIDDEN, VOCABULARY, STATES, TOKENS = 16, 50, 37, 60


def world() -> tuple[torch.nn.Linear, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)
    hidden = (3 * torch.randn(STATES, HIDDEN)).requires_grad_()
    of = torch.cat([torch.randperm(STATES), torch.randint(STATES, (TOKENS - STATES,))])  # some are drawn from twice
    return head, hidden, torch.randint(VOCABULARY, (TOKENS,)), of


def loss(values: Sampled) -> torch.Tensor:
    weights = torch.linspace(-1, 2, TOKENS)
    return (values.logprobs * weights + 0.3 * values.entropy * weights.square()).sum()


def test_all_at_once_is_the_definition() -> None:
    head, hidden, targets, of = world()
    values = sampled(head, hidden, targets, of, 0.7, at_once=STATES)
    distributions = torch.distributions.Categorical(logits=head(hidden)[of] / 0.7)
    torch.testing.assert_close(values.logprobs, distributions.log_prob(targets))
    torch.testing.assert_close(values.entropy, distributions.entropy())


@pytest.mark.parametrize("at_once", [1, 7, 36])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_values_and_gradients_are_those_of_all_at_once(at_once: int, entropy_gradient: bool) -> None:
    results: list[tuple[torch.Tensor, ...]] = []
    for size in (STATES, at_once):
        head, hidden, targets, of = world()
        values = sampled(head, hidden, targets, of, 0.7, entropy_gradient=entropy_gradient, at_once=size)
        loss(values).backward()
        assert hidden.grad is not None and head.weight.grad is not None
        results.append((values.logprobs, values.entropy, hidden.grad, head.weight.grad))
    for whole, parts in zip(*results, strict=True):
        assert float((parts - whole).detach().norm() / whole.detach().norm()) < 1e-5


def test_heads_that_do_more_than_project_are_found_out() -> None:
    small: dict[str, Any] = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 16,
    }  # fmt: skip
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_layer=1, n_head=2, n_positions=32))
    assert has_plain_head(tiny_model()) and has_plain_head(gpt2.eval())
    assert not has_plain_head(Gemma2ForCausalLM(Gemma2Config(**small)).eval())  # capped
    assert not has_plain_head(GraniteForCausalLM(GraniteConfig(**small, logits_scaling=8.0)).eval())  # scaled
