"""The forward of models the engine does not compute itself: the model's own, one transformers cache per slot.

Sequences run one after another, so nothing is padded and positions, windows and recurrent states are the model's own
business: exact for every architecture, and slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from agentlightning.engine.forward import Piece
from agentlightning.engine.request import TokenArray


class ModelForward:
    """Logits from `model.forward`. A slot's cache can be continued and nothing else: not cut back, not copied."""

    shares_prefixes = False

    def __init__(self, model: PreTrainedModel, slots: int) -> None:
        self._model = model
        self._caches: list[DynamicCache | None] = [None] * slots

    def reload(self) -> None:
        """The model is its own weights: only what was computed with the old ones has to go."""
        self._caches = [None] * len(self._caches)

    def exchange(self, first: int, second: int, first_length: int, second_length: int) -> None:
        """Two slots change places."""
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
