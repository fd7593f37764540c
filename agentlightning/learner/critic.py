"""A critic: what each sampled token is worth, a linear layer on the last hidden state that predicts it.

Knows where that state comes from (the policy, or a model of its own) and its file. It does not know targets, losses or
the optimiser.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils import skip_init
from transformers import PreTrainedModel

from agentlightning.data.sequences import MicroBatch
from agentlightning.learner.base import Critic
from agentlightning.learner.forward import States, predicting_states

CRITIC_FILE: Final = "critic.safetensors"


class ValueModel(torch.nn.Module):
    """`trunk` is a copy of the policy's, but for weights that are not trained, which the two share; None: the policy's
    own. The layer is float32 whatever the trunk is, and says 0 at first."""

    trunk: PreTrainedModel | None

    def __init__(self, model: PreTrainedModel, config: Critic) -> None:
        super().__init__()
        frozen: dict[int, Any] = {id(one): one for one in model.parameters() if not one.requires_grad}
        own = cast(PreTrainedModel, model.base_model)
        self.trunk = copy.deepcopy(own, frozen) if config.trunk == "separate" else None
        size: int = model.config.get_text_config().hidden_size
        self.head = skip_init(torch.nn.Linear, size, 1, device=model.device, dtype=torch.float32)
        for parameter in self.head.parameters():
            torch.nn.init.zeros_(parameter)

    def forward(self, micro: MicroBatch, of_policy: States | None) -> Tensor:
        """The value of each sampled token, float32[N]; `of_policy` are the policy's states where it has no own."""
        states = of_policy if self.trunk is None else predicting_states(self.trunk, micro)
        assert states is not None and states.hidden is not None
        return self.head(states.hidden.float())[:, 0][states.of]

    def save(self, directory: Path) -> None:
        """Write what is trained of it into its file."""
        save_file(dict(self._trained()), directory / CRITIC_FILE)

    def load(self, directory: Path) -> None:
        """Take what `save` wrote. OSError or SafetensorError where it cannot be read, ValueError if it does not fit."""
        own, saved = self._trained(), load_file(directory / CRITIC_FILE)
        if {name: one.shape for name, one in own.items()} != {name: one.shape for name, one in saved.items()}:
            raise ValueError(f"{CRITIC_FILE} is of another critic")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(saved[name])

    def _trained(self) -> dict[str, Tensor]:
        return {name: one.detach() for name, one in self.named_parameters() if one.requires_grad}
