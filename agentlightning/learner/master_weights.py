"""Float32 copies of weights of another type, which the optimiser steps on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle


class MasterWeights:
    """`trained` are float32 tensors for an optimiser: float32 parameters, and float32 copies of the
    others.

    In bfloat16, with 8 bits of precision, small updates vanish, and so do small gradients in sums.
    So gradients of a copied parameter are added to its copy as they are computed, and `write_back`
    rounds the copies once per step."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.trained: list[Tensor] = []
        self._copied: list[tuple[torch.nn.Parameter, Tensor]] = []
        self._hooks: list[RemovableHandle] = []
        for parameter in parameters:
            if parameter.dtype == torch.float32:
                self.trained.append(parameter)
                continue
            master = parameter.detach().float().requires_grad_()
            self._hooks.append(
                parameter.register_post_accumulate_grad_hook(partial(_add_gradient, master))
            )
            self.trained.append(master)
            self._copied.append((parameter, master))

    def write_back(self) -> None:
        with torch.no_grad():
            for parameter, master in self._copied:
                parameter.copy_(master)

    def close(self) -> None:
        """Leave the parameters' gradients to the next learner."""
        for hook in self._hooks:
            hook.remove()

    def state(self) -> list[Tensor]:
        """The copies, for a checkpoint: the parameters are rounded."""
        return [master.detach() for _, master in self._copied]

    def load(self, state: Sequence[Tensor]) -> None:
        """ValueError if these are not copies of the same parameters."""
        if len(state) != len(self._copied):
            raise ValueError(
                "it was trained in another dtype than this run is: give the same `dtype`"
            )
        with torch.no_grad():
            for (_, master), saved in zip(self._copied, state, strict=True):
                master.copy_(saved)


def _add_gradient(master: Tensor, parameter: Tensor) -> None:
    assert parameter.grad is not None
    gradient = parameter.grad.float()
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)
    parameter.grad = None
