"""The torch learner: exact gradients however the batch is packed, safe steps, whole checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
from agentlightning.errors import ConfigError, TrainingError
from agentlightning.learner.losses import Loss
from agentlightning.learner.policy import Policy, open_policy
from agentlightning.learner.policy_config import AdamW, Schedule
from agentlightning.learner.torch import TorchLearner
from tests.models import tiny_model
from tests.transitions import transition

LOSS = Loss(clip_high=0.28, aggregation="sequence-mean", entropy_coefficient=0.01, temperature=0.8)


def learner(
    tokenizer: Any, family: Any = "qwen3", reference: bool = False, **changes: Any
) -> TorchLearner:
    return TorchLearner(
        Policy(tiny_model(family), tokenizer), AdamW(**changes), reference=reference
    )


def conversation(seed: int) -> list[CreditedTransition]:
    """Three turns that extend one another, then one with an edited history; advantages differ per
    turn."""
    random = np.random.default_rng(seed)
    history = random.integers(2, 96, 5).tolist()
    out: list[CreditedTransition] = []
    for turn in range(4):
        if turn == 3:
            history = history[:4] + random.integers(2, 96, 3).tolist()
        answer = random.integers(2, 96, int(random.integers(1, 7))).tolist()
        logprobs = random.uniform(-6, -3, len(answer)).astype(np.float32)
        call = transition(
            history, answer, rollout_id=f"r{seed}", call_index=turn, logprobs=logprobs
        )
        out.append(CreditedTransition(call, np.full(len(answer), random.normal(), np.float32)))
        history = history + answer + random.integers(2, 96, 3).tolist()
    return out


def batch(level: Level = "trajectory", rollouts: int = 4) -> list[TrainingSequence]:
    return [
        sequence
        for seed in range(rollouts)
        for sequence in build_sequences(conversation(seed), level)
    ]


class Still(torch.optim.SGD):
    """Moves nothing, whatever rate a learner sets."""

    def step(self, closure: Any = None) -> None:
        pass


def gradient(
    one: TorchLearner, sequences: Sequence[TrainingSequence], loss: Loss = LOSS
) -> torch.Tensor:
    """The gradient that `step` would apply, read through an optimiser that moves nothing."""
    one.optimizer = Still(one.model.parameters(), lr=0.0)
    one.step(sequences, loss)
    return torch.cat([p.grad.flatten() for p in one.model.parameters() if p.grad is not None])


def mean_gradient(
    model: Any, calls: Sequence[tuple[str, torch.Tensor]], aggregation: str
) -> torch.Tensor:
    """Of the losses of the tokens of calls, each beside its rollout; every mean is taken in plain
    Python."""
    rollouts = [torch.cat([own for name, own in calls if name == of]) for of in dict(calls)]
    total = {
        "token-mean": lambda: torch.cat([own for _, own in calls]).mean(),
        "sequence-mean": lambda: torch.stack([own.mean() for _, own in calls]).mean(),
        "rollout-mean": lambda: torch.stack([own.mean() for own in rollouts]).mean(),
        "constant": lambda: torch.stack([own.sum() / 7 for own in rollouts]).mean(),
    }[aggregation]()
    return torch.cat(
        [part.flatten() for part in torch.autograd.grad(total, list(model.parameters()))]
    )


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_logprobs_are_those_of_each_transition_alone(tokenizer: Any, family: Any) -> None:
    one = learner(tokenizer, family)
    for sequence, logprobs in zip(batch(), one.logprobs(batch(), temperature=0.8), strict=True):
        ids = torch.from_numpy(sequence.token_ids.astype(np.int64))
        with torch.no_grad():
            full = torch.log_softmax(one.model(ids[None]).logits[0] / 0.8, -1)
        positions = torch.from_numpy(sequence.positions.astype(np.int64))
        torch.testing.assert_close(logprobs, full[positions - 1, ids[positions]], atol=1e-5, rtol=0)


def test_the_gradient_does_not_depend_on_micro_batches_or_merging(tokenizer: Any) -> None:
    whole = gradient(
        learner(tokenizer, max_grad_norm=1e9, micro_batch_tokens=100_000), batch("transition")
    )
    pieces = gradient(
        learner(tokenizer, max_grad_norm=1e9, micro_batch_tokens=40), batch("transition")
    )
    merged = gradient(
        learner(tokenizer, max_grad_norm=1e9, micro_batch_tokens=64), batch("trajectory")
    )
    assert relative(pieces, whole) < 1e-5
    assert relative(merged, whole) < 1e-5


def test_kl_to_the_reference_is_zero_at_first_and_pulls_back_later(tokenizer: Any) -> None:
    one = learner(tokenizer, reference=True, learning_rate=1e-2)
    loss = Loss(kl_coefficient=0.04)
    assert one.step(batch(), loss)["reference_kl"] == pytest.approx(0.0, abs=1e-6)
    assert one.step(batch(), loss)["reference_kl"] > 1e-4
    with pytest.raises(ConfigError, match="reference=True"):
        learner(tokenizer).step(batch(), loss)


def test_a_step_that_is_not_finite_is_not_taken(tokenizer: Any) -> None:
    one = learner(tokenizer)
    before = [parameter.detach().clone() for parameter in one.model.parameters()]
    poisoned = batch()
    poisoned[0].advantages[0] = np.nan
    with pytest.raises(TrainingError, match="weights are unchanged"):
        one.step(poisoned, LOSS)
    assert all(torch.equal(a, b) for a, b in zip(before, one.model.parameters(), strict=True))
    assert one.step(batch(), LOSS)["tokens"] > 0


def test_a_checkpoint_continues_bit_for_bit_and_loads_in_transformers(
    tokenizer: Any, tmp_path: Path
) -> None:
    falling: dict[str, Any] = {"learning_rate": 1e-3, "schedule": "linear", "total_steps": 4}
    straight, resumed = learner(tokenizer, **falling), learner(tokenizer, **falling)
    assert straight.step(batch(), LOSS)["learning_rate"] == pytest.approx(1e-3)
    straight.save(tmp_path)
    straight.step(batch(), LOSS)
    resumed.load(tmp_path)
    assert resumed.step(batch(), LOSS)["learning_rate"] == pytest.approx(0.75e-3)
    for a, b in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert (
        AutoModelForCausalLM.from_pretrained(tmp_path).num_parameters()
        == straight.model.num_parameters()
    )


def test_a_checkpoint_of_another_model_or_half_a_checkpoint_is_refused(
    tokenizer: Any, tmp_path: Path
) -> None:
    learner(tokenizer, "llama").save(tmp_path)
    with pytest.raises(ConfigError, match="checkpoint"):
        learner(tokenizer, "qwen3").load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"half")
    with pytest.raises(ConfigError, match="cannot be resumed"):
        learner(tokenizer, "llama").load(tmp_path)


def test_a_model_may_be_made_by_a_function_of_the_seed(tmp_path: Path) -> None:
    maker = tmp_path / "made_here.py"
    maker.write_text(
        "from agentlightning.learner.policy import Policy\n"
        "from tests.models import tiny_model\n"
        "make = lambda seed: Policy(tiny_model(), f'of seed {seed}')\n"
        "wrong = lambda seed: 'gpt'\n"
        "without = lambda: None\n"
    )
    assert open_policy(f"{maker}:make", seed=3).tokenizer == "of seed 3"
    with pytest.raises(ConfigError, match="wrong made a str; it must return a Policy"):
        open_policy(f"{maker}:wrong", seed=3)
    with pytest.raises(
        ConfigError, match="without must be a function that takes a seed and returns a Policy"
    ):
        open_policy(f"{maker}:without", seed=3)


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


def test_steps_too_small_for_bfloat16_add_up(tokenizer: Any, tmp_path: Path) -> None:
    def small_steps(**policy: Any) -> TorchLearner:
        return TorchLearner(
            open_policy(Policy(tiny_model(), tokenizer), seed=0, **policy),
            AdamW(learning_rate=1e-4),
        )

    begun = open_policy(Policy(tiny_model(), tokenizer), seed=0, dtype="bfloat16").model

    def moved(one: TorchLearner) -> float:
        now, start = (
            model.get_input_embeddings().weight.detach().float() for model in (one.model, begun)
        )
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
    assert all(
        torch.equal(a, b)
        for a, b in zip(half.model.parameters(), resumed.model.parameters(), strict=True)
    )


def test_gradients_in_bfloat16_are_summed_in_float32(tokenizer: Any) -> None:
    """That of many micro-batches is as near to float32's as that of one."""

    def of(tokens: int) -> torch.Tensor:
        policy = open_policy(Policy(tiny_model(), tokenizer), seed=0, dtype="bfloat16")
        one = TorchLearner(policy, AdamW(max_grad_norm=1e9, micro_batch_tokens=tokens))
        one.step(batch("transition"), LOSS)
        return torch.cat(
            [master.grad.flatten() for master in one._masters.trained if master.grad is not None]
        )

    exact = gradient(learner(tokenizer, max_grad_norm=1e9), batch("transition"))
    assert relative(of(20), exact) < 1.5 * relative(of(100_000), exact)


@pytest.mark.parametrize("level", ["trajectory", "tree"])
def test_layers_computed_again_give_the_same_gradient(tokenizer: Any, level: Any) -> None:
    kept = gradient(learner(tokenizer, max_grad_norm=1e9), batch(level))
    again = gradient(
        learner(tokenizer, max_grad_norm=1e9, gradient_checkpointing=True), batch(level)
    )
    assert relative(again, kept) < 1e-6
