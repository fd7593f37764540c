"""From a micro-batch through a model's hidden states to what a loss needs of each sampled token: its log-probability,
and an entropy.

A distribution has as many numbers as the vocabulary; of all sampled tokens together they would fill the memory before
anything else does. So hidden states are projected some at a time, and for a gradient each time again. Knows how
rows, padding and forests are run; nothing of losses or what the model is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from agentlightning.data.sequences import MicroBatch
from agentlightning.learner.forest import forest_hidden
from agentlightning.learner.losses import entropy


class States(NamedTuple):
    """The U places that predict N sampled tokens: token n is predicted at `of`[n], int64[N]. `hidden` float[U, H] are
    the last hidden states there, and `logits` float[U, V]; None where not asked for."""

    of: Tensor
    hidden: Tensor | None = None
    logits: Tensor | None = None


def predicting_states(
    model: PreTrainedModel, micro: MicroBatch, *, hidden: bool = True, logits: bool = False
) -> States:
    """Run `model` over a micro-batch; differentiable. A forest has hidden states and no logits.

    Right padding needs no mask: under causal attention nothing before a padded position sees it."""
    device = model.device
    places, of = np.unique(micro.predictors, return_inverse=True)
    at = tuple(torch.from_numpy(part).to(device) for part in divmod(places, micro.token_ids.shape[1]))
    numbers = torch.from_numpy(of).to(device)
    if micro.forest is not None:
        return States(numbers, forest_hidden(model, micro.forest)[at])
    ids = torch.from_numpy(micro.token_ids[:, :-1].astype(np.int64)).to(device)
    if not logits:
        return States(numbers, model.base_model(input_ids=ids, use_cache=False).last_hidden_state[at])
    out = model(input_ids=ids, use_cache=False, output_hidden_states=hidden)
    return States(numbers, out.hidden_states[-1][at] if hidden else None, out.logits[at])


LOGITS_AT_ONCE: Final = 2**26  # numbers of one [tokens, vocabulary] tensor, 256 MiB in float32; about four are held


class Sampled(NamedTuple):
    """Of each sampled token, float32[N]: its log-probability, and the entropy of what it was drawn from, in nats."""

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
    """Token `targets`[n] was drawn at `hidden`[`of`[n]]: hidden float[U, H], targets and of int64[N].

    `head` gives the logits float[·, V] of some of the hidden states; `at_once` is of how many. Values and gradients are
    those of all at once; the entropy has a gradient only if asked for."""

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
            project, hidden[start : start + at_once], of[group] - start, targets[group], use_reentrant=False,
            preserve_rng_state=False,
        )
        for start, group in groups
    ]  # fmt: skip
    logprobs = torch.cat([part for part, _ in parts])[order.argsort()]
    return Sampled(logprobs, torch.cat([part for _, part in parts])[of])


def has_plain_head(model: PreTrainedModel) -> bool:
    """Whether logits are the projection of the last hidden state and nothing else: not scaled, capped or shifted.

    Found out on a few tokens, to the last bit."""
    head: Any = model.get_output_embeddings()
    if head is None:
        return False
    ids = torch.arange(8, device=model.device)[None] % model.config.get_text_config().vocab_size
    with torch.no_grad():
        hidden = getattr(model.base_model(input_ids=ids, use_cache=False), "last_hidden_state", None)
        return hidden is not None and torch.equal(head(hidden), model(input_ids=ids, use_cache=False).logits)
