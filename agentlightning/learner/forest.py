"""A model's forward over a forest: each slot sees its ancestors and itself, at the position it has in its sequences.

The attention is one of `transformers`' named implementations, in force only while a forest is run; no model is patched.
It takes each branch by itself, its keys gathered along its path, without a mask over the whole. Knows which
architectures that is exact for; whether it is for a certain model, the learner finds out.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from agentlightning.data.forest import Forest, prefix_order
from agentlightning.data.sequences import TrainingSequence
from agentlightning.engine.weights import STATIC_ROPE

ATTENTION: Final = "agentlightning_forest"

# Pre-norm decoders with rotary positions, in which a token is known to others by its keys and values alone.
ARCHITECTURES: Final = frozenset({"llama", "mistral", "qwen2", "qwen3"})

QUERIES_AT_ONCE: Final = 512  # with a mask, each block of queries computes half of its square in vain


def unsupported(model: PreTrainedModel) -> str | None:
    """Why this model cannot run over a forest, or None."""
    config = model.config
    if config.model_type not in ARCHITECTURES:
        return f"it is not known to be exact for {config.model_type} (known: {', '.join(sorted(ARCHITECTURES))})"
    if getattr(config, "sliding_window", None) is not None:
        return "the model attends to a sliding window"
    rotation = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rotation not in STATIC_ROPE:
        return f"positions are turned by {rotation!r}, which depends on what is in the batch"
    return None


def forest_hidden(model: PreTrainedModel, forest: Forest) -> Tensor:
    """The last hidden state of every slot, float[1, L, hidden]; differentiable, and equal to what each sequence of the
    forest would have alone."""
    device = model.device
    ids = torch.from_numpy(forest.token_ids.astype("int64"))[None].to(device)
    positions = torch.from_numpy(forest.depths)[None].to(device)
    attention = _Gathered(forest, device)
    with attention_of(model.config, ATTENTION):
        return model.base_model(
            input_ids=ids, position_ids=positions, use_cache=False, forest=attention
        ).last_hidden_state


def branching_pair(batch: Sequence[TrainingSequence]) -> list[TrainingSequence]:
    """The two sequences, in prefix order, that show in the fewest tokens what a forest does: one hangs on the other."""
    order, shared = prefix_order([sequence.token_ids for sequence in batch])
    ordered = [batch[i] for i in order]
    places = range(1, len(ordered))
    branching = [place for place in places if 0 < shared[place] < len(ordered[place])] or places
    best = min(branching, key=lambda place: len(ordered[place - 1]) + len(ordered[place]), default=0)
    return ordered[max(0, best - 1) : best + 1]


class _Gathered:
    """Branch by branch. `slots` int64[ΣM + L] says where the keys of each are: its path, and then itself."""

    def __init__(self, forest: Forest, device: torch.device) -> None:
        self.sizes = [branch.stop - branch.start for branch in forest.branches]
        self.reaches = [len(branch.before) + size for branch, size in zip(forest.branches, self.sizes, strict=True)]
        own = [torch.arange(branch.start, branch.stop) for branch in forest.branches]
        parts = [part for branch, one in zip(forest.branches, own, strict=True)
                 for part in (torch.from_numpy(branch.before), one)]  # fmt: skip
        self.slots = torch.cat(parts).to(device)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """query float[1, H, L, D], key and value float[1, K, L, D] → float[1, H, L, D]."""
        heads = key.shape[1]
        queries = query[0].unflatten(0, (heads, -1)).split(self.sizes, 2)  # [K, H / K, n, D]: keys are never repeated
        keys, values = (side[0].index_select(1, self.slots).split(self.reaches, 1) for side in (key, value))
        out = [_branch_attention(*one, scaling) for one in zip(queries, keys, values, strict=True)]
        return torch.cat(out, 2).flatten(0, 1)[None]


@contextmanager
def attention_of(config: Any, implementation: str) -> Generator[None]:
    """Inside, the model of this config attends by what `transformers` knows under that name."""
    usual, config._attn_implementation = config._attn_implementation, implementation
    try:
        yield
    finally:
        config._attn_implementation = usual


def _forest_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    forest: _Gathered,
    **_: Any,
) -> tuple[Tensor, None]:
    """As `transformers` asks for it: query float[1, H, L, D], key and value float[1, K, L, D] → float[1, L, H, D]."""
    return forest(query, key, value, scaling).transpose(1, 2), None


def _branch_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """The last n of m tokens attend to all before them: query [K, G, n, D], key and value [K, m, D] → [K, G, n, D]."""
    grown, reach = query.shape[2], key.shape[1]
    key, value = (side[:, None].expand(-1, query.shape[1], -1, -1) for side in (key, value))
    path = reach - grown
    if path < grown:  # the kernel for causal squares needs no mask: cheaper, though the path's own rows are thrown away
        whole = pad(query, (0, 0, path, 0))
        return scaled_dot_product_attention(whole, key, value, is_causal=True, scale=scaling)[:, :, path:]
    out: list[Tensor] = []
    for start in range(0, grown, QUERIES_AT_ONCE):
        block = query[:, :, start : start + QUERIES_AT_ONCE]
        seen = path + start + block.shape[2]
        mask = torch.ones(block.shape[2], seen, dtype=torch.bool, device=query.device).tril(path + start)
        out.append(
            scaled_dot_product_attention(block, key[:, :, :seen], value[:, :, :seen], attn_mask=mask, scale=scaling)
        )
    return torch.cat(out, 2)


AttentionInterface.register(ATTENTION, _forest_attention)
