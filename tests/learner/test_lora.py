"""Training an adapter: the model stays, the adapter learns, and whoever samples gets both in
one."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM

from agentlightning.errors import ConfigError
from agentlightning.learner.embedded_sampler import serve_policy
from agentlightning.learner.losses import Loss
from agentlightning.learner.policy import Policy, load_policy, open_policy
from agentlightning.learner.policy_config import AdamW, LoRA
from agentlightning.learner.torch import TorchLearner
from tests.learner.test_torch import batch
from tests.models import tiny_model

RANK = 4


def learner(
    tokenizer: Any, *, dtype: Any = None, reference: bool = False, **lora: Any
) -> TorchLearner:
    """One whose adapter has learned something already."""
    policy = open_policy(
        Policy(tiny_model(), tokenizer),
        seed=1,
        dtype=dtype,
        lora=LoRA(rank=RANK, **{"alpha": 8.0, **lora}),
    )
    one = TorchLearner(policy, AdamW(learning_rate=1e-2), reference=reference)
    one.step(batch(), Loss())
    return one


def base_weights(one: TorchLearner) -> list[torch.Tensor]:
    return [
        parameter.detach().clone()
        for parameter in one.model.parameters()
        if not parameter.requires_grad
    ]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(2, 12)[None]).logits


def test_what_samples_is_the_model_with_the_adapter_merged_and_never_drifts(tokenizer: Any) -> None:
    one = learner(tokenizer)
    assert one.policy.adapter is not None
    before = base_weights(one)
    first = one.policy.adapter.publish()
    weights = first.get_submodule("model.layers.0.mlp.up_proj").weight.clone()  # type: ignore[union-attr]
    for _ in range(50):
        assert one.policy.adapter.publish() is first
    assert torch.equal(first.get_submodule("model.layers.0.mlp.up_proj").weight, weights)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(before, base_weights(one), strict=True))
    torch.testing.assert_close(logits(first), logits(one.model), atol=1e-5, rtol=0)
    # what is the same is shared
    assert first.get_input_embeddings().weight is one.model.get_input_embeddings().weight


@pytest.mark.anyio
async def test_new_weights_are_served_whether_or_not_the_engine_is_held(tokenizer: Any) -> None:
    one = TorchLearner(
        open_policy(
            Policy(tiny_model(vocab_size=len(tokenizer)), tokenizer), seed=1, lora=LoRA(rank=RANK)
        ),
        AdamW(learning_rate=1e-2),
    )
    served = serve_policy(one.policy, concurrency=1, threads=1)
    try:
        for version in (1, 2):
            one.step(batch(), Loss())
            async with served.service.exclusive() if version == 1 else nullcontext():
                await served.service.update_weights(version)
            torch.testing.assert_close(logits(served.model), logits(one.model), atol=1e-5, rtol=0)
    finally:
        served.service.close()


def test_the_reference_is_the_model_without_the_adapter(tokenizer: Any) -> None:
    one = learner(tokenizer, reference=True)
    assert one.reference is None  # no copy is kept
    with_copy = learner(tokenizer, reference=True)
    with_copy.reference = tiny_model()
    loss = Loss(kl_coefficient=0.04)
    without, beside = one.step(batch(), loss), with_copy.step(batch(), loss)
    assert without["reference_kl"] > 1e-4
    assert without["reference_kl"] == pytest.approx(beside["reference_kl"], rel=1e-5)
    assert without["grad_norm"] == pytest.approx(beside["grad_norm"], rel=1e-5)


def test_a_checkpoint_is_an_adapter_that_peft_loads_and_training_goes_on_from(
    tokenizer: Any, tmp_path: Path
) -> None:
    # With a tokenizer beside it, peft cuts the model to that one's size.
    Policy(tiny_model(vocab_size=len(tokenizer)), tokenizer).save(tmp_path / "base")
    policy = open_policy(tmp_path / "base", seed=1, device="cpu", lora=LoRA(rank=RANK))
    straight = TorchLearner(policy, AdamW(learning_rate=1e-2))
    straight.step(batch(), Loss())
    straight.save(tmp_path / "saved")
    alone = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    beside = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "saved"
    )
    torch.testing.assert_close(logits(alone), logits(straight.model))
    torch.testing.assert_close(logits(beside.eval()), logits(straight.model))
    torch.testing.assert_close(
        logits(load_policy(tmp_path / "saved").model), logits(straight.model)
    )
    assert not list((tmp_path / "saved").glob("model*.safetensors"))
    resumed = TorchLearner(
        open_policy(tmp_path / "base", seed=2, device="cpu", lora=LoRA(rank=RANK)),
        AdamW(learning_rate=1e-2),
    )
    resumed.load(tmp_path / "saved")
    for one in (straight, resumed):
        one.step(batch(), Loss())
    assert all(
        torch.equal(a, b)
        for a, b in zip(straight.model.parameters(), resumed.model.parameters(), strict=True)
    )


def test_a_checkpoint_of_another_adapter_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    learner(tokenizer).save(tmp_path / "small")
    for other in ({"rank": 8}, {"targets": ("q_proj",)}):
        policy = open_policy(
            Policy(tiny_model(), tokenizer), seed=1, lora=LoRA(**{"rank": RANK, **other})
        )
        with pytest.raises(ConfigError, match="cannot be resumed"):
            TorchLearner(policy).load(tmp_path / "small")
    with pytest.raises(ConfigError, match="checkpoint"):
        TorchLearner(Policy(tiny_model(), tokenizer)).load(tmp_path / "small")


def test_a_model_whose_adapter_was_unloaded_is_as_it_was_and_takes_another(tokenizer: Any) -> None:
    model = tiny_model()
    before, lora = logits(model), LoRA(rank=RANK)
    adapter = open_policy(Policy(model, tokenizer), seed=1, lora=lora).adapter
    with pytest.raises(ConfigError, match="adapter on it already"):
        open_policy(Policy(model, tokenizer), seed=1, lora=lora)
    assert adapter is not None
    adapter.unload()
    assert torch.equal(logits(model), before) and all(
        one.requires_grad for one in model.parameters()
    )
    assert open_policy(Policy(model, tokenizer), seed=1, lora=lora).adapter is not None
