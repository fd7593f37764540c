"""Forward passes over slots: the engine's own, for Llama-like decoders with a static key-value cache, and the model's.

`prefill` computes pieces of sequences end to end without padding, `decode` one token in each of many slots.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from agentlightning.engine.slots import Placement, TokenArray
from agentlightning.engine.weights import LayerWeights, Linear, read_weights, rotary_tables, shape_of


@dataclass(frozen=True)
class Piece:
    """Tokens `[n]` to compute at positions `start …` of a slot, after the copy in its placement (None if the sequence
    was placed before)."""

    slot: int
    start: int
    token_ids: TokenArray
    placement: Placement | None

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)


def cache_bytes(model: PreTrainedModel, slots: int, max_sequence_length: int) -> int:
    """Size of the key-value cache in bytes: keys and values of every layer, slot, position and head."""
    shape = shape_of(model)
    positions = slots * (max_sequence_length + 1)
    return 2 * shape.layers * positions * shape.kv_heads * shape.head_dim * model.dtype.itemsize


class DecoderForward:
    """Logits of a decoder whose weights are shared with its learner."""

    shares_prefixes = True

    def __init__(self, model: PreTrainedModel, slots: int, max_sequence_length: int) -> None:
        self._model = model
        self._device, dtype = model.device, model.dtype
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
        """Overwrite the cache: a masked position's value is multiplied by 0, which a NaN survives."""
        self._keys.zero_()
        self._values.zero_()

    def exchange(self, first: int, second: int, first_length: int, second_length: int) -> None:
        """Swap two slots; their lengths say how much to move."""
        for cache in (self._keys, self._values):
            moved = cache[:, first, :, :first_length].clone()
            cache[:, first, :, :second_length] = cache[:, second, :, :second_length]
            cache[:, second, :, :first_length] = moved

    def prefill(self, pieces: Sequence[Piece]) -> Tensor:
        """Logits `[pieces, vocabulary]` after the last token of each piece. Pieces run in order: one may copy what an
        earlier one computes."""
        token_ids = self._tensor(np.concatenate([piece.token_ids for piece in pieces]))
        positions = self._tensor(np.concatenate([np.arange(piece.start, piece.stop) for piece in pieces]))
        masks = [self._causal_mask(piece) for piece in pieces]
        x = F.embedding(token_ids, self._weights.embedding)
        cosine, sine = self._cosine[positions][:, None], self._sine[positions][:, None]
        for index, layer in enumerate(self._weights.layers):
            query, key, value = self._project(layer, x, cosine, sine)
            x = self._finish(layer, x, self._attend_pieces(index, pieces, masks, query, key, value))
        last = np.cumsum([len(piece.token_ids) for piece in pieces]) - 1
        return self._logits(x[self._tensor(last)])

    def decode(self, slots: TokenArray, token_ids: TokenArray, positions: TokenArray) -> Tensor:
        """Logits `[n, vocabulary]` after one more token in each of the slots `[n]`, in ascending order; idle slots
        between them are computed too. `token_ids` and `positions` `[n]` are that token and its position."""
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
            self._positions[: int(positions.max()) + 1] > place.repeat_interleave(self._shape.kv_heads)[:, None, None]
        )
        mask = torch.where(hidden, self._minus_infinity, self._zero)
        x = F.embedding(self._tensor(token_ids), self._weights.embedding)
        cosine, sine = self._cosine[place][:, None], self._sine[place][:, None]
        for index, layer in enumerate(self._weights.layers):
            query, key, value = self._project(layer, x, cosine, sine)
            self._keys[index][where] = key
            self._values[index][where] = value
            x = self._finish(layer, x, self._attend_slots(index, rows, mask, query))
        return self._logits(x if whole else x[self._tensor(busy)])

    # --- one layer ---

    def _project(self, layer: LayerWeights, x: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden `[n, hidden]` → rotated queries `[n, heads, d]`, rotated keys and values `[n, kv_heads, d]`."""
        shape = self._shape
        rotated_heads = shape.heads + shape.kv_heads
        joined = _apply(layer.qkv, self._norm(x, layer.input_norm)).view(len(x), -1, shape.head_dim)
        heads, value = joined[:, :rotated_heads], joined[:, rotated_heads:]
        if layer.head_norm is not None:
            heads = self._norm(heads, None) * layer.head_norm
        half = shape.head_dim // 2
        swapped = torch.cat((heads[..., half:], heads[..., :half]), -1)
        heads = torch.addcmul(heads * cosine, swapped, sine)
        return heads[:, : shape.heads], heads[:, shape.heads :], value

    def _finish(self, layer: LayerWeights, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of a layer: hidden `[n, hidden]` and attention output `[n, heads · d]` → hidden `[n, hidden]`."""
        x = _add(x, layer.output, attended)
        gate, up = _apply(layer.gate_up, self._norm(x, layer.mlp_norm)).chunk(2, -1)
        return _add(x, layer.down, F.silu(gate) * up)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self._shape.norm_eps)

    def _logits(self, x: Tensor) -> Tensor:
        return F.linear(self._norm(x, self._weights.norm), self._weights.head)

    # --- attention ---

    def _attend_pieces(
        self, index: int, pieces: Sequence[Piece], masks: list[Tensor | None], query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Store keys, values `[n, kv_heads, d]` of the pieces; attend from queries `[n, heads, d]`: `[n, heads·d]`."""
        attended = torch.empty_like(query, memory_format=torch.contiguous_format)
        row = 0
        for piece, mask in zip(pieces, masks, strict=True):
            keys, values = self._keys[index, piece.slot], self._values[index, piece.slot]
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
        """The positions that each token of a continued piece sees, `[n, stop]`; None if no mask is needed."""
        if piece.start == 0 or len(piece.token_ids) == 1:
            return None
        return self._positions[: piece.stop] <= self._positions[piece.start : piece.stop, None]

    def _attend_slots(self, index: int, rows: TokenArray, mask: Tensor, query: Tensor) -> Tensor:
        """Attend from one query in each of neighbouring slots `[n, heads, d]` to its cache: `[n, heads · d]`. `mask`
        `[n · kv_heads, 1, length]` is added to the scores: −∞ beyond a row's position."""
        shape, length = self._shape, mask.shape[-1]
        query = query.reshape(len(query) * shape.kv_heads, shape.groups, shape.head_dim)
        keys, values = (side[index, rows[0] : rows[-1] + 1].flatten(0, 1) for side in (self._keys, self._values))
        # Batched products of three-dimensional views: on CPU about three times as fast as the fused attention kernel
        # for single queries.
        scores = torch.baddbmm(mask, query, keys[:, :length].transpose(1, 2), alpha=shape.head_dim**-0.5)
        weights = scores.softmax(-1, dtype=torch.float32).to(scores.dtype)
        return torch.bmm(weights, values[:, :length]).view(-1, shape.heads * shape.head_dim)

    def _tensor(self, array: TokenArray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _allocate(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, on a CPU in huge pages if available: reading a cache over 4 KiB pages costs a decode step up to a quarter
    of its time."""
    if device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(size) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
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
    """Logits of models that the engine does not compute itself: `model.forward` with one transformers cache per slot,
    which can be continued, but not cut or copied.

    Sequences run one after another. Nothing is padded, and positions, windows and recurrent states are up to the model:
    exact for every architecture, and slow."""

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
        return torch.stack([self._advance(piece.slot, piece.token_ids, piece.start) for piece in pieces])

    def decode(self, slots: TokenArray, token_ids: TokenArray, positions: TokenArray) -> Tensor:
        """Logits `[n, vocabulary]` after one more token in each of the slots `[n]`."""
        rows = zip(slots.tolist(), token_ids[:, None], positions.tolist(), strict=True)
        return torch.stack([self._advance(slot, token_id, position) for slot, token_id, position in rows])

    def _advance(self, slot: int, token_ids: TokenArray, start: int) -> Tensor:
        cache = self._caches[slot] if start > 0 else None
        if cache is None:
            cache = self._caches[slot] = DynamicCache(config=self._model.config)
        model: Any = self._model
        inputs = torch.from_numpy(token_ids).to(self._model.device)[None]
        return model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
