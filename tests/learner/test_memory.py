"""What training will take is told before a model is loaded, and refused with what to change."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from agentlightning.errors import ConfigError
from agentlightning.learner.losses import Loss
from agentlightning.learner.memory import _kept_bytes, estimate_memory, left_of_container
from agentlightning.learner.pairs import PairOpener
from agentlightning.learner.policy import Policy, open_policy
from agentlightning.learner.policy_config import AdamW, LoRA, PolicyConfig
from tests.models import tiny_model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, LoRA(rank=8)])
def test_what_a_micro_batch_keeps_is_never_more_than_estimated(
    tokenizer: Any, dtype: Any, lora: LoRA | None
) -> None:
    model = tiny_model(vocab_size=256, hidden_size=96, intermediate_size=256, num_hidden_layers=6)
    rounded = open_policy(Policy(model, tokenizer), seed=0, dtype=dtype).model
    estimate = estimate_memory(
        rounded, AdamW(micro_batch_tokens=512), lora=lora, max_sequence_length=64
    )
    trained = open_policy(Policy(rounded, tokenizer), seed=0, lora=lora).model
    kept = _kept_bytes(trained, torch.zeros(4, 128, dtype=torch.long))
    assert 1 <= estimate.activations / kept < 1.1


def test_what_does_not_fit_is_refused_before_it_is_loaded(tokenizer: Any, tmp_path: Path) -> None:
    Policy(tiny_model(vocab_size=len(tokenizer)), tokenizer).save(tmp_path)
    phases: list[str] = []
    config = PolicyConfig(device="cpu", threads=1)
    given: dict[str, Any] = {"models": {"policy": tmp_path}, "loss": Loss()}
    optimizer = AdamW(micro_batch_tokens=10**9)
    greedy = PairOpener(msgspec.structs.replace(config, optimizer=optimizer), **given)
    with pytest.raises(
        ConfigError,
        match=r"training needs about .* GiB are free.*smaller optimizer.micro_batch_tokens",
    ):
        greedy.open(tmp_path, phases.append).__enter__()
    assert not phases
    with PairOpener(config, **given).open(tmp_path, phases.append):
        pass
    assert re.fullmatch(r"load the model \(training takes up to .* GiB, .* are free\)", phases[0])


def test_a_container_s_file_cache_is_not_memory_in_use(tmp_path: Path) -> None:
    for name, text in {
        "max": "1000\n",
        "current": "900\n",
        "stat": "anon 100\ninactive_file 700\n",
    }.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert left_of_container(tmp_path) == [800]
    assert left_of_container(tmp_path / "none") == []
