"""What an optimiser steps on where weights are in lower precision, and layers that are computed again for a gradient.

Knows parameters, gradients and layers. It does not know losses, batches or the optimiser's rule.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agentlightning.errors import ConfigError
from agentlightning.learner.forest import attention_of


class MasterWeights:
    """`trained` are float32 tensors for an optimiser: parameters that are float32, and float32 copies of the others.

    Small steps vanish in bfloat16, whose numbers have 8 bits, and so do small gradients when they are summed. So those
    of a copied parameter are added to its copy's as they are made, and `write_back` rounds the copies once a step."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.trained: list[Tensor] = []
        self._copied: list[tuple[torch.nn.Parameter, Tensor]] = []
        self._hooks: list[RemovableHandle] = []
        for parameter in parameters:
            if parameter.dtype == torch.float32:
                self.trained.append(parameter)
                continue
            master = parameter.detach().float().requires_grad_()
            self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(_add_gradient, master)))
            self.trained.append(master)
            self._copied.append((parameter, master))

    def write_back(self) -> None:
        with torch.no_grad():
            for parameter, master in self._copied:
                parameter.copy_(master)

    def close(self) -> None:
        """Leave the parameters' gradients to whoever trains them next."""
        for hook in self._hooks:
            hook.remove()

    def state(self) -> list[Tensor]:
        """The copies, for a checkpoint: what their parameters have was rounded."""
        return [master.detach() for _, master in self._copied]

    def load(self, state: Sequence[Tensor]) -> None:
        """ValueError where these are not the copies of the same parameters."""
        if len(state) != len(self._copied):
            raise ValueError("it was trained in another dtype than this run is: give the same `dtype`")
        with torch.no_grad():
            for (_, master), saved in zip(self._copied, state, strict=True):
                master.copy_(saved)


def _add_gradient(master: Tensor, parameter: Tensor) -> None:
    assert parameter.grad is not None
    gradient = parameter.grad.float()
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)
    parameter.grad = None


@contextmanager
def recomputed(model: PreTrainedModel) -> Generator[None]:
    """Inside, a forward keeps the inputs of the model's layers; a backward computes the rest again.

    Not by transformers' switch, which takes effect in training mode alone, where dropout would too. ConfigError for a
    model without layers that can be."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} has no layers that can be computed again; leave gradient_checkpointing out"
        )
    config: Any = model.config
    context = partial(_as_in_forward, config)
    for layer in layers:
        usual: Callable[..., Any] = layer.forward
        layer.forward = partial(checkpoint, usual, use_reentrant=False, preserve_rng_state=False, context_fn=context)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # that of the class again


def _as_in_forward(config: Any) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a forward, which is now, and of its repetition in a backward: with the attention of now."""
    return nullcontext(), attention_of(config, config._attn_implementation)
