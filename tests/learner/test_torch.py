"""The torch learner: exact gradients however the batch is packed, safe steps, whole checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from agentlightning.data.sequences import CreditedTransition, Level, TrainingSequence, build_sequences
from agentlightning.data.transitions import Transition
from agentlightning.errors import ConfigError, TrainingError
from agentlightning.learner.base import AdamW
from agentlightning.learner.losses import Loss
from agentlightning.learner.policy import Policy, open_policy
from agentlightning.learner.tiny import make_tokenizer
from agentlightning.learner.torch import TorchLearner
from tests.models import tiny_model

LOSS = Loss(clip_high=0.28, aggregation="sequence-mean", entropy_coefficient=0.01, temperature=0.8)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(["a plain corpus of a few words"], 300)


def learner(tokenizer: Any, family: Any = "qwen3", reference: bool = False, **changes: Any) -> TorchLearner:
    return TorchLearner(Policy(tiny_model(family), tokenizer), AdamW(**changes), reference=reference)


def conversation(seed: int) -> list[CreditedTransition]:
    """Three turns that extend one another, then one with an edited history; advantages differ per turn."""
    random = np.random.default_rng(seed)
    history = random.integers(2, 96, 5).tolist()
    out: list[CreditedTransition] = []
    for turn in range(4):
        if turn == 3:
            history = history[:4] + random.integers(2, 96, 3).tolist()
        answer = random.integers(2, 96, int(random.integers(1, 7))).tolist()
        transition = Transition(
            rollout_id=f"r{seed}",
            attempt_id="a",
            span_id=str(turn),
            call_index=turn,
            choice=0,
            model="policy",
            prompt_ids=np.array(history, np.int32),
            response_ids=np.array(answer, np.int32),
            logprobs=random.uniform(-6, -3, len(answer)).astype(np.float32),
            versions=np.zeros(len(answer), np.int32),
            finish_reason="stop",
        )
        out.append(CreditedTransition(transition, np.full(len(answer), random.normal(), np.float32)))
        history = history + answer + random.integers(2, 96, 3).tolist()
    return out


def batch(level: Level = "trajectory", rollouts: int = 4) -> list[TrainingSequence]:
    return [sequence for seed in range(rollouts) for sequence in build_sequences(conversation(seed), level)]


def gradient(one: TorchLearner, sequences: Sequence[TrainingSequence], loss: Loss = LOSS) -> torch.Tensor:
    """The gradient that `step` would apply, read through an optimiser that moves nothing."""
    one.optimizer = torch.optim.SGD(one.model.parameters(), lr=0.0)
    one.step(sequences, loss)
    return torch.cat([p.grad.flatten() for p in one.model.parameters() if p.grad is not None])


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
    whole = gradient(learner(tokenizer, max_grad_norm=1e9, micro_batch_tokens=100_000), batch("transition"))
    pieces = gradient(learner(tokenizer, max_grad_norm=1e9, micro_batch_tokens=40), batch("transition"))
    merged = gradient(learner(tokenizer, max_grad_norm=1e9, micro_batch_tokens=64), batch("trajectory"))
    assert relative(pieces, whole) < 1e-5
    assert relative(merged, whole) < 1e-5


def test_an_architecture_whose_logits_are_scaled_goes_through_its_own_head(tokenizer: Any) -> None:
    plain = learner(tokenizer)
    foreign = learner(tokenizer)
    foreign._head_is_plain = False
    torch.testing.assert_close(
        torch.cat(plain.logprobs(batch())), torch.cat(foreign.logprobs(batch())), atol=1e-6, rtol=0
    )


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


def test_a_checkpoint_continues_bit_for_bit_and_loads_in_transformers(tokenizer: Any, tmp_path: Path) -> None:
    straight = learner(tokenizer, learning_rate=1e-3)
    straight.step(batch(), LOSS)
    straight.save(tmp_path)
    straight.step(batch(), LOSS)
    resumed = learner(tokenizer, learning_rate=1e-3)
    resumed.load(tmp_path)
    resumed.step(batch(), LOSS)
    for a, b in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).num_parameters() == straight.model.num_parameters()


def test_a_checkpoint_of_another_model_or_half_a_checkpoint_is_refused(tokenizer: Any, tmp_path: Path) -> None:
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
        "make = lambda seed: Policy(tiny_model(), None, name=f'of seed {seed}')\n"
        "wrong = lambda seed: 'gpt'\n"
        "without = lambda: None\n"
        "name = 'gpt'\n"
    )
    assert open_policy(f"{maker}:make", seed=3).name == "of seed 3"
    with pytest.raises(ConfigError, match="wrong made a str; it must return a Policy"):
        open_policy(f"{maker}:wrong", seed=3)
    for name in ("without", "name"):
        with pytest.raises(ConfigError, match=f"{name} must be a function that takes a seed and returns a Policy"):
            open_policy(f"{maker}:{name}", seed=3)
