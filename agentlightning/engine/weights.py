"""The weights of a decoder, as the engine's forward pass reads them, and which models it computes itself.

Weights are read in place. Only projections that are computed together are copied, and only in models so small that the
copy does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentlightning.errors import ConfigError

FAMILIES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# Kinds of rotary embedding whose frequencies do not change with the length of the sequence.
STATIC_ROPE = {"default", "linear", "llama3", "yarn"}
# Above this many parameters joined projections gain nothing, and their copies would take memory.
LARGEST_JOINED = 100_000_000

Linear = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder. `groups` query heads read one key-value head."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float

    @property
    def groups(self) -> int:
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class LayerWeights:
    """One layer. `qkv` and `gate_up` are one joined projection, or their parts in order."""

    input_norm: Tensor
    qkv: tuple[Linear, ...]
    head_norm: Tensor | None
    """Weights of Qwen3's norm on queries and keys, `[heads + kv_heads, head_dim]`."""
    output: Linear
    mlp_norm: Tensor
    gate_up: tuple[Linear, ...]
    down: Linear


@dataclass(frozen=True)
class DecoderWeights:
    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor


def why_unsupported(model: PreTrainedModel) -> str | None:
    """Why the engine cannot compute this model itself; None if it can."""
    config: Any = model.config
    if type(model).__name__ not in FAMILIES:
        return f"{type(model).__name__} is not one of {', '.join(FAMILIES)}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act!r}, not 'silu'"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        return f"it has layers of type {', '.join(sorted(kinds - {'full_attention'}))}"
    rotary: Any = model.get_submodule("model.rotary_emb")
    if rotary.rope_type not in STATIC_ROPE:
        return f"its rotary embedding is of type {rotary.rope_type!r}"
    if 2 * rotary.inv_freq.numel() != shape_of(model).head_dim:
        return "its rotary embedding covers only part of a head"
    decoder: Any = model.get_submodule("model")
    for layer in decoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        for module in (*projections, mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            if type(module) is not nn.Linear:
                return f"it has projections of type {type(module).__name__} (an adapter or a quantised layer)"
    return None


def shape_of(model: PreTrainedModel) -> Shape:
    """The sizes of the decoder that generates text. ConfigError for a model without attention, whose state is not
    bounded by lengths and heads."""
    config: Any = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        raise ConfigError(f"{type(model).__name__} has no attention heads, so the engine cannot size its cache for it; "
                          "serve it elsewhere, behind an HTTP backend")  # fmt: skip
    return Shape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        norm_eps=getattr(config, "rms_norm_eps", 0.0),
    )


def read_weights(model: PreTrainedModel) -> DecoderWeights:
    """The current weights. Tensors that are not joined are the model's own."""
    shape = shape_of(model)
    joined = sum(parameter.numel() for parameter in model.parameters()) <= LARGEST_JOINED
    decoder: Any = model.get_submodule("model")

    def linear(module: Any) -> Linear:
        return module.weight.detach(), None if module.bias is None else module.bias.detach()

    def together(*modules: Any) -> tuple[Linear, ...]:
        parts = tuple(linear(module) for module in modules)
        if not joined:
            return parts
        biases = [bias for _, bias in parts if bias is not None]
        return ((torch.cat([weight for weight, _ in parts]), torch.cat(biases) if biases else None),)

    def head_norm(attention: Any) -> Tensor | None:
        if not hasattr(attention, "q_norm"):
            return None
        query, key = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
        return torch.cat([query.expand(shape.heads, -1), key.expand(shape.kv_heads, -1)])

    layers = tuple(
        LayerWeights(
            input_norm=layer.input_layernorm.weight.detach(),
            qkv=together(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
            head_norm=head_norm(layer.self_attn),
            output=linear(layer.self_attn.o_proj),
            mlp_norm=layer.post_attention_layernorm.weight.detach(),
            gate_up=together(layer.mlp.gate_proj, layer.mlp.up_proj),
            down=linear(layer.mlp.down_proj),
        )
        for layer in decoder.layers
    )
    head = cast(nn.Linear, model.get_output_embeddings())
    embedding, norm = decoder.embed_tokens.weight.detach(), decoder.norm.weight.detach()
    return DecoderWeights(embedding, layers, norm, head.weight.detach())


def rotary_tables(model: PreTrainedModel, positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[positions, head_dim]` of the model's own frequencies; the sines of the first half of a head
    are negated, so that rotating is `x · cos + swap_halves(x) · sin`."""
    rotary: Any = model.get_submodule("model.rotary_emb")
    dtype, frequencies = model.dtype, cast(Tensor, rotary.inv_freq).float()
    angles = torch.outer(torch.arange(positions, device=frequencies.device).float(), frequencies)
    cosine, sine = angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling
    return torch.cat([cosine, cosine], -1).to(dtype), torch.cat([-sine, sine], -1).to(dtype)
