"""Schedules, weights in bfloat16, layers computed again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from agentlightning.errors import ConfigError
from agentlightning.learner.base import AdamW, Schedule
from agentlightning.learner.policy import Policy, open_policy
from agentlightning.learner.torch import TorchLearner
from tests.learner.test_torch import LOSS, batch, gradient, learner, relative, tokenizer
from tests.models import tiny_model

__all__ = ["tokenizer"]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]),
        ("cosine", [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447, 0.0]),
    ],
)
def test_the_learning_rate_rises_and_falls(schedule: Schedule, rates: list[float]) -> None:
    config = AdamW(learning_rate=1.0, warmup_steps=2, schedule=schedule, total_steps=6)
    assert [config.rate(step) for step in range(1, 8)] == pytest.approx(rates, abs=1e-6)


def test_a_schedule_without_an_end_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="total_steps"):
        learner(tokenizer, schedule="cosine")
    with pytest.raises(ConfigError, match="more than warmup_steps"):
        AdamW(schedule="linear", warmup_steps=5, total_steps=5)
    with pytest.raises(ConfigError, match="constant, linear, cosine"):
        AdamW(schedule="step")  # type: ignore[arg-type]


def test_a_step_uses_the_rate_of_its_number_after_a_resume_too(tokenizer: Any, tmp_path: Path) -> None:
    config: dict[str, Any] = {"learning_rate": 1e-3, "schedule": "linear", "total_steps": 4}
    one, other = learner(tokenizer, **config), learner(tokenizer, **config)
    assert one.step(batch(), LOSS)["learning_rate"] == pytest.approx(1e-3)
    one.save(tmp_path)
    other.load(tmp_path)
    assert other.step(batch(), LOSS)["learning_rate"] == pytest.approx(0.75e-3)


def test_steps_too_small_for_bfloat16_add_up(tokenizer: Any, tmp_path: Path) -> None:
    def small_steps(**policy: Any) -> TorchLearner:
        return TorchLearner(open_policy(Policy(tiny_model(), tokenizer), seed=0, **policy), AdamW(learning_rate=1e-4))

    begun = open_policy(Policy(tiny_model(), tokenizer), seed=0, dtype="bfloat16").model

    def moved(one: TorchLearner) -> float:
        now, start = (model.get_input_embeddings().weight.detach().float() for model in (one.model, begun))
        return float((now - start).abs().sum())

    full, half, few = small_steps(), small_steps(dtype="bfloat16"), batch(rollouts=1)
    for _ in range(20):
        full.step(few, LOSS)
        half.step(few, LOSS)
    assert half.model.dtype == torch.bfloat16
    assert moved(half) == pytest.approx(moved(full), rel=0.3)
    half.save(tmp_path)
    resumed = small_steps(dtype="bfloat16")
    resumed.load(tmp_path)
    for one in (half, resumed):
        one.step(few, LOSS)
    assert all(torch.equal(a, b) for a, b in zip(half.model.parameters(), resumed.model.parameters(), strict=True))


def test_gradients_in_bfloat16_are_summed_in_float32(tokenizer: Any) -> None:
    """That of many micro-batches is as near to float32's as that of one."""

    def of(tokens: int) -> torch.Tensor:
        policy = open_policy(Policy(tiny_model(), tokenizer), seed=0, dtype="bfloat16")
        one = TorchLearner(policy, AdamW(max_grad_norm=1e9, micro_batch_tokens=tokens))
        one.step(batch("transition"), LOSS)
        return torch.cat([master.grad.flatten() for master in one._masters.trained if master.grad is not None])

    exact = gradient(learner(tokenizer, max_grad_norm=1e9), batch("transition"))
    assert relative(of(20), exact) < 1.5 * relative(of(100_000), exact)


@pytest.mark.parametrize("level", ["trajectory", "tree"])
def test_layers_computed_again_give_the_same_gradient(tokenizer: Any, level: Any) -> None:
    kept = gradient(learner(tokenizer, max_grad_norm=1e9), batch(level))
    again = gradient(learner(tokenizer, max_grad_norm=1e9, gradient_checkpointing=True), batch(level))
    assert relative(again, kept) < 1e-6


def test_layers_computed_again_have_no_dropout(tokenizer: Any) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    model = GPT2LMHeadModel(config)
    gradients = [
        gradient(TorchLearner(Policy(model, tokenizer), AdamW(gradient_checkpointing=again)), batch())
        for again in (False, True)
    ]
    assert config.resid_pdrop > 0
    assert relative(*gradients) < 1e-4
