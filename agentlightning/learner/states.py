"""A micro-batch through a model: the last hidden states at the places that predict its sampled tokens.

Knows how rows, padding and forests are run. It does not know what is made of the states.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentlightning.data.sequences import MicroBatch
from agentlightning.learner.forest import forest_hidden


@dataclass(frozen=True)
class States:
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
