"""A low-rank adapter on a policy's model, by `peft`, trained beside frozen weights.

The model's layers are replaced in place. Samplers get `merged`, a plain model with base plus
adapter, recomputed from both at each publication, so nothing drifts; untouched weights are shared.
Knows nothing of losses, steps or engines."""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from warnings import catch_warnings, simplefilter

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils.save_and_load import set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from agentlightning.errors import ConfigError
from agentlightning.learner.policy_config import LoRA

WEIGHTS_FILE = "adapter_model.safetensors"


class Adapter:
    """An adapter on `model`, whose own weights are frozen; its initial weights are drawn from
    `seed`.

    ConfigError if the model lacks a target layer, or has an adapter already."""

    def __init__(self, model: PreTrainedModel, lora: LoRA, *, seed: int = 0) -> None:
        if any(isinstance(module, LoraLayer) for module in model.modules()):
            raise ConfigError(
                "this model has a LoRA adapter on it already; load the model again, or unload "
                "that one"
            )
        self.config = lora
        self._trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
        layers = [f".{name}" for name, _ in model.named_modules()]
        for target in [] if isinstance(targets, str) else targets:
            if not any(layer.endswith(f".{target}") for layer in layers):
                raise ConfigError(
                    f"the model has no layer {target!r}, which the LoRA targets {lora.targets!r} "
                    "name"
                )
        config = LoraConfig(
            r=lora.rank,
            lora_alpha=cast(int, lora.alpha),
            target_modules=targets,
            task_type="CAUSAL_LM",
        )
        shared: dict[int, Any] = {
            id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())
        }
        self.merged: PreTrainedModel = copy.deepcopy(model, shared)
        with (
            torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []),
            catch_warnings(),
        ):
            simplefilter("ignore", FutureWarning)  # peft uses a deprecated name of transformers
            torch.manual_seed(seed)
            try:
                self._peft = get_peft_model(model, config)
            except ValueError as error:
                raise ConfigError(
                    f"LoRA targets {lora.targets!r} do not fit this model: {error}"
                ) from None
        self._peft.eval()
        self._layers = {
            name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)
        }

    def publish(self) -> PreTrainedModel:
        """`merged` with the adapter's current weights; added in float32, rounded to the weights'
        dtype."""
        with torch.no_grad():
            for name, layer in self._layers.items():
                base: Tensor = cast(Any, layer.get_base_layer()).weight
                place: Any = self.merged.get_submodule(name)
                if place.weight is base:
                    place.weight = torch.nn.Parameter(torch.empty_like(base), requires_grad=False)
                delta: Tensor = cast(Any, layer).get_delta_weight("default")
                place.weight.copy_(base.float() + delta.float())
        return self.merged

    def base(self) -> PreTrainedModel:
        """`merged` with the base weights."""
        for name, layer in self._layers.items():
            self.merged.get_submodule(name).weight = cast(Any, layer.get_base_layer()).weight
        return self.merged

    @contextmanager
    def off(self) -> Generator[None]:
        """In the block, the model computes without the adapter."""
        with self._peft.disable_adapter():
            yield

    def unload(self) -> None:
        """Restore the model without the adapter, which cannot be used afterwards."""
        cast(Any, self._peft).unload()
        for parameter, trained in self._trained:
            parameter.requires_grad_(trained)

    def save(self, directory: Path) -> None:
        """Write a directory that `peft` loads; it finds the base model if that came from a path or
        a hub."""
        self._peft.save_pretrained(str(directory), save_embedding_layers=False)

    def load(self, directory: Path) -> None:
        """Load the weights that `save` wrote. RuntimeError, OSError or ValueError if they do not
        fit."""
        weights: Mapping[str, Tensor] = load_file(directory / WEIGHTS_FILE)
        found: Any = set_peft_model_state_dict(self._peft, dict(weights))
        ours = sum(parameter.requires_grad for parameter in self._peft.parameters())
        if found.unexpected_keys or len(weights) != ours:
            raise ValueError(
                f"it holds {len(weights)} tensors of an adapter, and this one has {ours}"
            )
