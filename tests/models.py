"""Tiny random models for the tests of all rooms."""

from __future__ import annotations

from typing import Any, Literal

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def tiny_model(
    family: Literal["llama", "qwen2", "qwen3"] = "qwen3", seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """A random model with grouped-query attention, peaked enough that its distributions are far
    from uniform.

    `changes` replace fields of its configuration. Biases and norms are random too, so that none can
    be forgotten."""
    make_config, make_model = FAMILIES[family]
    fields: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "initializer_range": 0.2,
    }
    if family == "qwen3":
        fields["head_dim"] = 32
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model(make_config(**{**fields, **changes}))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(std=0.2)
                elif "norm" in name:
                    parameter.normal_(mean=1.0, std=0.2)
    return model.eval()
