"""Runs a micro-batch through a model: hidden states, forests, and each sampled token's
log-probability, entropy and value.

Logits are as wide as the vocabulary: for all sampled tokens at once they would not fit into memory.
So hidden states are projected in chunks, and again for the gradient.

In a forest each slot attends to its ancestors and itself, at its position in its sequences. This is
a named attention implementation of `transformers`, active only while a forest runs; no model is
patched. It computes branch by branch, with the keys gathered along the path, without a mask over
the whole forest."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.nn.utils import skip_init
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agentlightning.data.forest import Forest, prefix_order
from agentlightning.data.sequences import MicroBatch, TrainingSequence
from agentlightning.engine.forward import STATIC_ROPE
from agentlightning.errors import ConfigError
from agentlightning.learner.base import Critic
from agentlightning.learner.losses import entropy

# elements of a [tokens, vocabulary] tensor, 256 MiB in float32; about four are in memory
LOGITS_AT_ONCE: Final = 2**26
CRITIC_FILE: Final = "critic.safetensors"
ATTENTION: Final = "agentlightning_forest"

# Pre-norm decoders with rotary positions, whose tokens interact only through keys and values.
ARCHITECTURES: Final = frozenset({"llama", "mistral", "qwen2", "qwen3"})

QUERIES_AT_ONCE: Final = 512  # with a mask, half of each block's square is wasted


class States(NamedTuple):
    """The U positions that predict N sampled tokens: token n is predicted at `of`[n], int64[N].
    `hidden` float[U, H] are the last hidden states there, `logits` float[U, V]; None if not
    requested."""

    of: Tensor
    hidden: Tensor | None = None
    logits: Tensor | None = None


def predicting_states(
    model: PreTrainedModel, micro: MicroBatch, *, hidden: bool = True, logits: bool = False
) -> States:
    """Run `model` over a micro-batch; differentiable. A forest gives hidden states and no logits.

    Right padding needs no mask: with causal attention, nothing before a padded position sees it."""
    device = model.device
    places, of = np.unique(micro.predictors, return_inverse=True)
    at = tuple(
        torch.from_numpy(part).to(device) for part in divmod(places, micro.token_ids.shape[1])
    )
    numbers = torch.from_numpy(of).to(device)
    if micro.forest is not None:
        return States(numbers, forest_hidden(model, micro.forest)[at])
    ids = torch.from_numpy(micro.token_ids[:, :-1].astype(np.int64)).to(device)
    if not logits:
        return States(
            numbers, model.base_model(input_ids=ids, use_cache=False).last_hidden_state[at]
        )
    out = model(input_ids=ids, use_cache=False, output_hidden_states=hidden)
    return States(numbers, out.hidden_states[-1][at] if hidden else None, out.logits[at])


class ValueModel(torch.nn.Module):
    """A critic: the value of a sampled token, a linear layer on the last hidden state before it.
    `trunk` is a copy of the policy that shares its frozen weights; None: the policy itself. The
    layer is always float32 and starts at 0."""

    trunk: PreTrainedModel | None

    def __init__(self, model: PreTrainedModel, config: Critic) -> None:
        super().__init__()
        frozen: dict[int, Any] = {
            id(parameter): parameter
            for parameter in model.parameters()
            if not parameter.requires_grad
        }
        own = cast(PreTrainedModel, model.base_model)
        self.trunk = copy.deepcopy(own, frozen) if config.trunk == "separate" else None
        size: int = model.config.get_text_config().hidden_size
        self.head = skip_init(torch.nn.Linear, size, 1, device=model.device, dtype=torch.float32)
        for parameter in self.head.parameters():
            torch.nn.init.zeros_(parameter)

    def forward(self, micro: MicroBatch, of_policy: States | None) -> Tensor:
        """The value of each sampled token, float32[N]; `of_policy` are the policy's states, for a
        critic without a trunk."""
        states = of_policy if self.trunk is None else predicting_states(self.trunk, micro)
        assert states is not None and states.hidden is not None
        return self.head(states.hidden.float())[:, 0][states.of]

    def save(self, directory: Path) -> None:
        """Write its trained weights into its file."""
        save_file(dict(self._trained()), directory / CRITIC_FILE)

    def load(self, directory: Path) -> None:
        """Load what `save` wrote. OSError or SafetensorError if it cannot be read, ValueError if it
        does not fit."""
        own = self._trained()
        saved = load_file(directory / CRITIC_FILE)
        if {name: weight.shape for name, weight in own.items()} != {
            name: weight.shape for name, weight in saved.items()
        }:
            raise ValueError(f"{CRITIC_FILE} belongs to another critic")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(saved[name])

    def _trained(self) -> dict[str, Tensor]:
        return {
            name: parameter.detach()
            for name, parameter in self.named_parameters()
            if parameter.requires_grad
        }


class Sampled(NamedTuple):
    """For each sampled token, float32[N]: its log-probability, and the entropy of its distribution,
    in nats."""

    logprobs: Tensor
    entropy: Tensor


def sampled(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    of: Tensor,
    temperature: float,
    *,
    entropy_gradient: bool = False,
    at_once: int,
) -> Sampled:
    """Log-probabilities and entropies of N tokens: token `targets`[n] was sampled at
    `hidden`[`of`[n]]; hidden float[U, H], targets and of int64[N].

    `head` computes the logits float[·, V] of hidden states, `at_once` at a time. Values and
    gradients are as for all at once; the entropy has a gradient only with `entropy_gradient`."""

    def project(some: Tensor, rows: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        log_probabilities = torch.log_softmax(head(some).float() / temperature, -1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
            uncertainty = entropy(log_probabilities)
        return log_probabilities[rows, tokens], uncertainty

    if len(hidden) <= at_once:
        logprobs, uncertainty = project(hidden, of, targets)
        return Sampled(logprobs, uncertainty[of])
    order = of.argsort(stable=True)
    starts = torch.arange(0, len(hidden), at_once, device=of.device)
    counts = torch.bincount(of // at_once, minlength=len(starts)).tolist()
    groups = zip(starts.tolist(), order.split(counts), strict=True)
    parts = [
        checkpoint(
            project,
            hidden[start : start + at_once],
            of[group] - start,
            targets[group],
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for start, group in groups
    ]
    logprobs = torch.cat([part for part, _ in parts])[order.argsort()]
    return Sampled(logprobs, torch.cat([part for _, part in parts])[of])


def has_plain_head(model: PreTrainedModel) -> bool:
    """Whether logits are a plain projection of the last hidden state: not scaled, capped or
    shifted.

    Tested on a few tokens, bit for bit."""
    head: Any = model.get_output_embeddings()
    if head is None:
        return False
    ids = torch.arange(8, device=model.device)[None] % model.config.get_text_config().vocab_size
    with torch.no_grad():
        hidden = getattr(
            model.base_model(input_ids=ids, use_cache=False), "last_hidden_state", None
        )
        return hidden is not None and torch.equal(
            head(hidden), model(input_ids=ids, use_cache=False).logits
        )


@contextmanager
def recomputed(model: PreTrainedModel) -> Generator[None]:
    """In the block, a forward pass keeps only the inputs of the model's layers; the backward pass
    recomputes the rest.

    This does not use the switch of transformers, which works only in training mode, where dropout
    is active. ConfigError for a model whose layers cannot be recomputed."""
    layers = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} has no layers that can be computed again; leave "
            "gradient_checkpointing out"
        )
    config: Any = model.config

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts for the forward pass and for its repetition in the backward pass, with the
        current attention."""
        return nullcontext(), attention_of(config, config._attn_implementation)

    for layer in layers:
        usual: Callable[..., Any] = layer.forward
        layer.forward = partial(
            checkpoint, usual, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
        )
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # restores the method of the class


def unsupported(model: PreTrainedModel) -> str | None:
    """Why this model cannot run over a forest, or None."""
    config = model.config
    if config.model_type not in ARCHITECTURES:
        return (
            f"it is not known to be exact for {config.model_type} (known: "
            f"{', '.join(sorted(ARCHITECTURES))})"
        )
    if getattr(config, "sliding_window", None) is not None:
        return "the model attends to a sliding window"
    rotation = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rotation not in STATIC_ROPE:
        return f"positions are turned by {rotation!r}, which depends on what is in the batch"
    return None


def forest_hidden(model: PreTrainedModel, forest: Forest) -> Tensor:
    """The last hidden state of every slot, float[1, L, hidden]; differentiable, and equal to that
    of each sequence alone."""
    device = model.device
    ids = torch.from_numpy(forest.token_ids.astype("int64"))[None].to(device)
    positions = torch.from_numpy(forest.depths)[None].to(device)
    attention = _Gathered(forest, device)
    with attention_of(model.config, ATTENTION):
        return model.base_model(
            input_ids=ids, position_ids=positions, use_cache=False, forest=attention
        ).last_hidden_state


def branching_pair(batch: Sequence[TrainingSequence]) -> list[TrainingSequence]:
    """Two sequences, in prefix order, with a shared prefix: the shortest example of a forest in the
    batch."""
    order, shared = prefix_order([sequence.token_ids for sequence in batch])
    ordered = [batch[i] for i in order]
    places = range(1, len(ordered))
    branching = [place for place in places if 0 < shared[place] < len(ordered[place])] or places
    best = min(
        branching, key=lambda place: len(ordered[place - 1]) + len(ordered[place]), default=0
    )
    return ordered[max(0, best - 1) : best + 1]


class _Gathered:
    """The slots of each branch's keys, `slots` int64[ΣM + L]: its path, then itself."""

    def __init__(self, forest: Forest, device: torch.device) -> None:
        self.sizes = [branch.stop - branch.start for branch in forest.branches]
        self.reaches = [
            len(branch.before) + size
            for branch, size in zip(forest.branches, self.sizes, strict=True)
        ]
        parts = [
            (branch.before, np.arange(branch.start, branch.stop)) for branch in forest.branches
        ]
        self.slots = torch.from_numpy(
            np.concatenate([slots for pair in parts for slots in pair])
        ).to(device)


@contextmanager
def attention_of(config: Any, implementation: str) -> Generator[None]:
    """In the block, models with this config use the attention that `transformers` knows under that
    name."""
    usual = config._attn_implementation
    config._attn_implementation = implementation
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
    """The interface that `transformers` calls, branch by branch: query float[1, H, L, D], key and
    value float[1, K, L, D] → float[1, L, H, D]."""
    # [K, H / K, n, D]: no key is repeated
    queries = query[0].unflatten(0, (key.shape[1], -1)).split(forest.sizes, 2)
    keys, values = (
        side[0].index_select(1, forest.slots).split(forest.reaches, 1) for side in (key, value)
    )
    out = [
        _branch_attention(*branch, scaling) for branch in zip(queries, keys, values, strict=True)
    ]
    return torch.cat(out, 2).flatten(0, 1)[None].transpose(1, 2), None


def _branch_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """The last n of m tokens attend to all before them: query [K, G, n, D], key and value [K, m, D]
    → [K, G, n, D]."""
    grown = query.shape[2]
    reach = key.shape[1]
    key, value = (side[:, None].expand(-1, query.shape[1], -1, -1) for side in (key, value))
    path = reach - grown
    # the kernel for causal squares needs no mask: cheaper, although the path's rows are discarded
    if path < grown:
        whole = pad(query, (0, 0, path, 0))
        return scaled_dot_product_attention(whole, key, value, is_causal=True, scale=scaling)[
            :, :, path:
        ]
    out: list[Tensor] = []
    for start in range(0, grown, QUERIES_AT_ONCE):
        block = query[:, :, start : start + QUERIES_AT_ONCE]
        seen = path + start + block.shape[2]
        mask = torch.ones(block.shape[2], seen, dtype=torch.bool, device=query.device).tril(
            path + start
        )
        out.append(
            scaled_dot_product_attention(
                block, key[:, :, :seen], value[:, :, :seen], attn_mask=mask, scale=scaling
            )
        )
    return torch.cat(out, 2)


AttentionInterface.register(ATTENTION, _forest_attention)
