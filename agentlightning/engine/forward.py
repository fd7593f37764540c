"""Forward passes over slots: the engine's own, for Llama-like decoders with a static key-value
cache, and the model's. Weights are read in place; only projections that are computed together are
copied, and only in small models.

`prefill` computes pieces of sequences end to end without padding, `decode` one token in each of
many slots."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from agentlightning.engine.slots import Placement, TokenArray
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
        attention = layer.self_attn
        mlp = layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        for module in (*projections, mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            if type(module) is not nn.Linear:
                return (
                    f"it has projections of type {type(module).__name__} (an adapter or a "
                    "quantised layer)"
                )
    return None


def shape_of(model: PreTrainedModel) -> Shape:
    """The sizes of the decoder that generates text. ConfigError for a model without attention,
    whose state is not bounded by lengths and heads."""
    config: Any = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        raise ConfigError(
            f"{type(model).__name__} has no attention heads, so the engine cannot size its cache "
            "for it; serve it elsewhere, behind an HTTP backend"
        )
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

    def fused(*modules: Any) -> tuple[Linear, ...]:
        parts = tuple(linear(module) for module in modules)
        if not joined:
            return parts
        biases = [bias for _, bias in parts if bias is not None]
        return (
            (torch.cat([weight for weight, _ in parts]), torch.cat(biases) if biases else None),
        )

    def head_norm(attention: Any) -> Tensor | None:
        if not hasattr(attention, "q_norm"):
            return None
        query = attention.q_norm.weight.detach()
        key = attention.k_norm.weight.detach()
        return torch.cat([query.expand(shape.heads, -1), key.expand(shape.kv_heads, -1)])

    layers = tuple(
        LayerWeights(
            input_norm=layer.input_layernorm.weight.detach(),
            qkv=fused(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
            head_norm=head_norm(layer.self_attn),
            output=linear(layer.self_attn.o_proj),
            mlp_norm=layer.post_attention_layernorm.weight.detach(),
            gate_up=fused(layer.mlp.gate_proj, layer.mlp.up_proj),
            down=linear(layer.mlp.down_proj),
        )
        for layer in decoder.layers
    )
    head = cast(nn.Linear, model.get_output_embeddings())
    embedding = decoder.embed_tokens.weight.detach()
    norm = decoder.norm.weight.detach()
    return DecoderWeights(embedding, layers, norm, head.weight.detach())


def rotary_tables(model: PreTrainedModel, positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[positions, head_dim]` of the model's own frequencies; the sines of the
    first half of a head are negated, so that rotating is `x · cos + swap_halves(x) · sin`."""
    rotary: Any = model.get_submodule("model.rotary_emb")
    dtype = model.dtype
    frequencies = cast(Tensor, rotary.inv_freq).float()
    angles = torch.outer(torch.arange(positions, device=frequencies.device).float(), frequencies)
    cosine = angles.cos() * rotary.attention_scaling
    sine = angles.sin() * rotary.attention_scaling
    return torch.cat([cosine, cosine], -1).to(dtype), torch.cat([-sine, sine], -1).to(dtype)


@dataclass(frozen=True)
class Piece:
    """Tokens `[n]` to compute at positions `start …` of a slot, after the copy in its placement
    (None if the sequence was placed before)."""

    slot: int
    start: int
    token_ids: TokenArray
    placement: Placement | None

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)


def cache_bytes(model: PreTrainedModel, slots: int, max_sequence_length: int) -> int:
    """Size of the key-value cache in bytes: keys and values of every layer, slot, position and
    head."""
    shape = shape_of(model)
    positions = slots * (max_sequence_length + 1)
    return 2 * shape.layers * positions * shape.kv_heads * shape.head_dim * model.dtype.itemsize


class DecoderForward:
    """Logits of a decoder whose weights are shared with its learner."""

    shares_prefixes = True

    def __init__(self, model: PreTrainedModel, slots: int, max_sequence_length: int) -> None:
        self._model = model
        self._device = model.device
        dtype = model.dtype
        self._shape = shape_of(model)
        shape = self._shape
        # One column more than sequences have: idle rows of a decode write there.
        self._spare = max_sequence_length
        size = (shape.layers, slots, shape.kv_heads, max_sequence_length + 1, shape.head_dim)
        self._keys = _allocate(size, dtype, self._device)
        self._values = _allocate(size, dtype, self._device)
        self._cosine, self._sine = rotary_tables(model, max_sequence_length + 1)
        self._positions = torch.arange(max_sequence_length + 1, device=self._device)
        self._minus_infinity = torch.tensor(float("-inf"), dtype=dtype, device=self._device)
        self._zero = torch.zeros((), dtype=dtype, device=self._device)
        self.reload()

    def reload(self) -> None:
        """Read the model's weights again. The cache is stale from now on."""
        self._weights = read_weights(self._model)

    def clear(self) -> None:
        """Overwrite the cache: a masked position's value is multiplied by 0, which a NaN
        survives."""
        self._keys.zero_()
        self._values.zero_()

    def exchange(self, first: int, second: int, first_length: int, second_length: int) -> None:
        """Swap two slots; their lengths say how much to move."""
        for cache in (self._keys, self._values):
            moved = cache[:, first, :, :first_length].clone()
            cache[:, first, :, :second_length] = cache[:, second, :, :second_length]
            cache[:, second, :, :first_length] = moved

    def prefill(self, pieces: Sequence[Piece]) -> Tensor:
        """Logits `[pieces, vocabulary]` after the last token of each piece. Pieces run in order:
        one may copy what an earlier one computes."""
        token_ids = self._tensor(np.concatenate([piece.token_ids for piece in pieces]))
        positions = self._tensor(
            np.concatenate([np.arange(piece.start, piece.stop) for piece in pieces])
        )
        masks = [self._causal_mask(piece) for piece in pieces]
        x = F.embedding(token_ids, self._weights.embedding)
        cosine = self._cosine[positions][:, None]
        sine = self._sine[positions][:, None]
        for index, layer in enumerate(self._weights.layers):
            query, key, value = self._project(layer, x, cosine, sine)
            x = self._finish(layer, x, self._attend_pieces(index, pieces, masks, query, key, value))
        last = np.cumsum([len(piece.token_ids) for piece in pieces]) - 1
        return self._logits(x[self._tensor(last)])

    def decode(self, slots: TokenArray, token_ids: TokenArray, positions: TokenArray) -> Tensor:
        """Logits `[n, vocabulary]` after one more token in each of the slots `[n]`, in ascending
        order; idle slots between them are computed too. `token_ids` and `positions` `[n]` are that
        token and its position."""
        rows = np.arange(slots[0], slots[-1] + 1)
        busy = slots - slots[0]
        whole = len(rows) == len(slots)
        write = positions
        if not whole:
            token_ids, positions, write = (
                _spread(values, busy, len(rows), idle)
                for values, idle in ((token_ids, 0), (positions, 0), (positions, self._spare))
            )
        where = (self._tensor(rows), slice(None), self._tensor(write))
        place = self._tensor(positions)
        hidden = (
            self._positions[: int(positions.max()) + 1]
            > place.repeat_interleave(self._shape.kv_heads)[:, None, None]
        )
        mask = torch.where(hidden, self._minus_infinity, self._zero)
        x = F.embedding(self._tensor(token_ids), self._weights.embedding)
        cosine = self._cosine[place][:, None]
        sine = self._sine[place][:, None]
        for index, layer in enumerate(self._weights.layers):
            query, key, value = self._project(layer, x, cosine, sine)
            self._keys[index][where] = key
            self._values[index][where] = value
            x = self._finish(layer, x, self._attend_slots(index, rows, mask, query))
        return self._logits(x if whole else x[self._tensor(busy)])

    # --- one layer ---

    def _project(
        self, layer: LayerWeights, x: Tensor, cosine: Tensor, sine: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden `[n, hidden]` → rotated queries `[n, heads, d]`, rotated keys and values
        `[n, kv_heads, d]`."""
        shape = self._shape
        rotated_heads = shape.heads + shape.kv_heads
        joined = _apply(layer.qkv, self._norm(x, layer.input_norm)).view(len(x), -1, shape.head_dim)
        heads = joined[:, :rotated_heads]
        value = joined[:, rotated_heads:]
        if layer.head_norm is not None:
            heads = self._norm(heads, None) * layer.head_norm
        half = shape.head_dim // 2
        swapped = torch.cat((heads[..., half:], heads[..., :half]), -1)
        heads = torch.addcmul(heads * cosine, swapped, sine)
        return heads[:, : shape.heads], heads[:, shape.heads :], value

    def _finish(self, layer: LayerWeights, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of a layer: hidden `[n, hidden]` and attention output `[n, heads · d]` → hidden
        `[n, hidden]`."""
        x = _add(x, layer.output, attended)
        gate, up = _apply(layer.gate_up, self._norm(x, layer.mlp_norm)).chunk(2, -1)
        return _add(x, layer.down, F.silu(gate) * up)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self._shape.norm_eps)

    def _logits(self, x: Tensor) -> Tensor:
        return F.linear(self._norm(x, self._weights.norm), self._weights.head)

    # --- attention ---

    def _attend_pieces(
        self,
        index: int,
        pieces: Sequence[Piece],
        masks: list[Tensor | None],
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        """Store keys, values `[n, kv_heads, d]` of the pieces; attend from queries `[n, heads, d]`:
        `[n, heads·d]`."""
        attended = torch.empty_like(query, memory_format=torch.contiguous_format)
        row = 0
        for piece, mask in zip(pieces, masks, strict=True):
            keys = self._keys[index, piece.slot]
            values = self._values[index, piece.slot]
            copy = piece.placement
            if copy is not None and copy.copied > copy.start:
                span = slice(copy.start, copy.copied)
                keys[:, span] = self._keys[index, copy.source, :, span]
                values[:, span] = self._values[index, copy.source, :, span]
            rows = slice(row, row + len(piece.token_ids))
            keys[:, piece.start : piece.stop] = key[rows].transpose(0, 1)
            values[:, piece.start : piece.stop] = value[rows].transpose(0, 1)
            attended[rows] = F.scaled_dot_product_attention(
                query[rows].transpose(0, 1)[None],
                keys[None, :, : piece.stop],
                values[None, :, : piece.stop],
                attn_mask=mask,
                is_causal=piece.start == 0 and len(piece.token_ids) > 1,
                enable_gqa=self._shape.groups > 1,
            )[0].transpose(0, 1)
            row = rows.stop
        return attended.flatten(1)

    def _causal_mask(self, piece: Piece) -> Tensor | None:
        """The positions that each token of a continued piece sees, `[n, stop]`; None if no mask is
        needed."""
        if piece.start == 0 or len(piece.token_ids) == 1:
            return None
        return self._positions[: piece.stop] <= self._positions[piece.start : piece.stop, None]

    def _attend_slots(self, index: int, rows: TokenArray, mask: Tensor, query: Tensor) -> Tensor:
        """Attend from one query in each of neighbouring slots `[n, heads, d]` to its cache:
        `[n, heads · d]`. `mask` `[n · kv_heads, 1, length]` is added to the scores: −∞ beyond a
        row's position."""
        shape = self._shape
        length = mask.shape[-1]
        query = query.reshape(len(query) * shape.kv_heads, shape.groups, shape.head_dim)
        keys, values = (
            side[index, rows[0] : rows[-1] + 1].flatten(0, 1) for side in (self._keys, self._values)
        )
        # Batched products of three-dimensional views: on CPU about three times as fast as the fused
        # attention kernel for single queries.
        scores = torch.baddbmm(
            mask, query, keys[:, :length].transpose(1, 2), alpha=shape.head_dim**-0.5
        )
        weights = scores.softmax(-1, dtype=torch.float32).to(scores.dtype)
        return torch.bmm(weights, values[:, :length]).view(-1, shape.heads * shape.head_dim)

    def _tensor(self, array: TokenArray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _allocate(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, on a CPU in huge pages if available: reading a cache over 4 KiB pages costs a decode
    step up to a quarter of its time."""
    if device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=dtype, device=device)
    memory = mmap.mmap(
        -1, math.prod(size) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    # A kernel built without them refuses the advice; the memory is as good without.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(size)


def _spread(values: TokenArray, places: TokenArray, size: int, idle: int) -> TokenArray:
    spread = np.full(size, idle, dtype=np.int64)
    spread[places] = values
    return spread


def _apply(parts: tuple[Linear, ...], x: Tensor) -> Tensor:
    if len(parts) == 1:
        return F.linear(x, *parts[0])
    return torch.cat([F.linear(x, weight, bias) for weight, bias in parts], -1)


def _add(x: Tensor, linear: Linear, inputs: Tensor) -> Tensor:
    """`x + linear(inputs)`, in one kernel if there is no bias."""
    weight, bias = linear
    if bias is None:
        return torch.addmm(x, inputs, weight.t())
    return x + F.linear(inputs, weight, bias)


class ModelForward:
    """Logits of models that the engine does not compute itself: `model.forward` with one
    transformers cache per slot, which can be continued, but not cut or copied.

    Sequences run one after another. Nothing is padded, and positions, windows and recurrent states
    are up to the model: exact for every architecture, and slow."""

    shares_prefixes = False

    def __init__(self, model: PreTrainedModel, slots: int) -> None:
        self._model = model
        self._caches: list[DynamicCache | None] = [None] * slots

    def clear(self) -> None:
        """Forget what was computed."""
        self._caches = [None] * len(self._caches)

    reload = clear  # the model is its own weights

    def exchange(self, first: int, second: int, first_length: int, second_length: int) -> None:
        """Swap two slots."""
        self._caches[first], self._caches[second] = self._caches[second], self._caches[first]

    def prefill(self, pieces: Sequence[Piece]) -> Tensor:
        """Logits `[pieces, vocabulary]` after the last token of each piece."""
        return torch.stack(
            [self._advance(piece.slot, piece.token_ids, piece.start) for piece in pieces]
        )

    def decode(self, slots: TokenArray, token_ids: TokenArray, positions: TokenArray) -> Tensor:
        """Logits `[n, vocabulary]` after one more token in each of the slots `[n]`."""
        rows = zip(slots.tolist(), token_ids[:, None], positions.tolist(), strict=True)
        return torch.stack(
            [self._advance(slot, token_id, position) for slot, token_id, position in rows]
        )

    def _advance(self, slot: int, token_ids: TokenArray, start: int) -> Tensor:
        cache = self._caches[slot] if start > 0 else None
        if cache is None:
            cache = self._caches[slot] = DynamicCache(config=self._model.config)
        model: Any = self._model
        inputs = torch.from_numpy(token_ids).to(self._model.device)[None]
        return model(
            input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits[0, -1]
