"""Estimates how much memory training a model takes, before loading it. Only activations are
measured."""

from __future__ import annotations

import copy
import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from transformers import PreTrainedModel

from agentlightning.engine.forward import LARGEST_JOINED, cache_bytes, shape_of
from agentlightning.errors import ConfigError
from agentlightning.learner.base import Critic
from agentlightning.learner.policy_config import AdamW, LoRA
from agentlightning.learner.training_forward import LOGITS_AT_ONCE

FLOAT32: Final = 4
_log = logging.getLogger(__name__)

_MEASURED_TOKENS: Final = 256
LOGITS_HELD: Final = 4  # tensors of the size of a chunk's logits that its gradient needs at once
GIB: Final = 2**30


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by purpose. `critic` is everything of a separate critic, `engine` the engine's copy of
    the weights, `cache` its key-value cache, `activations` what a micro-batch keeps for its
    gradient, `logits` those of a chunk."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    reference: int = 0
    critic: int = 0
    engine: int = 0
    cache: int = 0
    activations: int = 0
    logits: int = 0

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))

    def over(self, processes: int, *, shared_memory: bool) -> MemoryEstimate:
        """The estimate for weights sharded over so many processes: the total in one memory, or that
        of a single process."""
        parts = (
            ("activations", "logits")
            if shared_memory
            else ("weights", "gradients", "optimizer", "reference")
        )
        factor = processes if shared_memory else 1 / processes
        return dataclasses.replace(
            self, **{name: int(getattr(self, name) * factor) for name in parts}
        )

    def check(self, available: int, *, loaded: bool = False) -> None:
        """ConfigError if more is needed than is available; the weights may be loaded already.
        Memory may be full for a moment, so a model that needs little is never refused."""
        if self.total - (self.weights if loaded else 0) <= max(available, GIB):
            return
        parts = ", ".join(
            f"{name} {size / GIB:.2f}" for name, size in dataclasses.asdict(self).items() if size
        )
        raise ConfigError(
            f"training needs about {self.total / GIB:.2f} GiB ({parts}), and "
            f"{available / GIB:.2f} GiB are free. What helps: for activations a smaller "
            "optimizer.micro_batch_tokens, or optimizer.gradient_checkpointing: true; for "
            "optimizer and reference lora: {} (an adapter is trained, the weights are not); "
            "for weights dtype: bfloat16, or a smaller model; for cache a smaller "
            "max_sequence_length, or fewer n_runners"
        )


def estimate_memory(
    model: PreTrainedModel,
    config: AdamW,
    *,
    lora: LoRA | None = None,
    reference: bool = False,
    critic: Critic | None = None,
    own_weights: bool = False,
    slots: int = 0,
    max_sequence_length: int = 4096,
    device: torch.device | str = "cpu",
) -> MemoryEstimate:
    """For training `model` (which may be an `empty_model`) on a device, and sampling from it in an
    engine with so many slots (0: none).

    Assumes a full micro-batch: `micro_batch_tokens`, or one sequence of the maximum length."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    weights = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    embedding: Any = model.get_input_embeddings()
    # At most the joined projections of a small model.
    engine = (
        weights - embedding.weight.numel() * embedding.weight.itemsize
        if parameters <= LARGEST_JOINED
        else 0
    )
    if lora is not None:
        targets = _targets(model, lora)
        trained = sum(lora.rank * (target.in_features + target.out_features) for target in targets)
        moments = 2
        engine += sum(target.weight.numel() * target.weight.itemsize for target in targets)
        weights += trained * FLOAT32
    else:
        rounded = any(parameter.dtype != torch.float32 for parameter in model.parameters())
        trained = parameters
        moments = 3 if rounded else 2
        engine += weights if own_weights else 0
    tokens = max(config.micro_batch_tokens, max_sequence_length)
    vocabulary = int(model.config.get_text_config().vocab_size)
    gradients = trained * FLOAT32
    optimizer = trained * FLOAT32 * moments
    try:
        activations = int(
            tokens * _activations_per_token(model, lora, config.gradient_checkpointing, device)
        )
    except (AttributeError, ValueError, TypeError, RuntimeError) as error:
        # architectures without these attributes
        _log.warning(
            "the activations of a %s are not in the estimate of memory: %s",
            type(model).__name__,
            error,
        )
        activations = 0
    own = weights if lora is None else trained * FLOAT32
    separate = critic is not None and critic.trunk == "separate"
    return MemoryEstimate(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        reference=weights if reference and lora is None else 0,
        critic=own + gradients + optimizer + activations if separate else 0,
        engine=engine if slots else 0,
        cache=cache_bytes(model, slots, max_sequence_length),
        activations=activations,
        logits=LOGITS_HELD * FLOAT32 * min(tokens * vocabulary, LOGITS_AT_ONCE),
    )


def available_memory(device: torch.device) -> int | None:
    """Bytes that a process can still allocate there; None if unknown (not Linux)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    memory = Path("/proc/meminfo")
    if device.type != "cpu" or not memory.is_file():
        return None
    found = dict(line.split(":") for line in memory.read_text().splitlines())
    return min([int(found["MemAvailable"].split()[0]) * 1024, *left_of_container()])


def left_of_container(group: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """The bytes that a container's limit (cgroup, version 2) leaves; the page cache counts as
    free."""
    try:
        limit, used, about = (
            (group / f"memory.{name}").read_text().strip() for name in ("max", "current", "stat")
        )
    except OSError:
        return []
    cached = dict(line.split() for line in about.splitlines()).get("inactive_file", "0")
    return [] if limit == "max" else [int(limit) - int(used) + int(cached)]


def _activations_per_token(
    model: PreTrainedModel, lora: LoRA | None, checkpointing: bool, device: torch.device | str
) -> float:
    """Bytes per token that are kept for the gradient: measured on two layers with the model's
    shapes and dtypes and the device's kernels, with an adapter if one is trained."""
    layers = shape_of(model).layers
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    text.num_hidden_layers = 2
    text.vocab_size = 8
    text.pad_token_id = None
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:2]
    with torch.device("meta"):
        small = cast(Any, type(model))._from_config(config, dtype=model.dtype).eval()
    small.to_empty(device=device)  # the values do not matter
    if lora is not None:
        from agentlightning.learner.lora import Adapter  # peft takes a second to import

        Adapter(small, lora)
    ids = torch.zeros(1, 2 * _MEASURED_TOKENS, dtype=torch.long, device=device)
    more = _kept_bytes(small, ids) - _kept_bytes(
        small, ids[:, :_MEASURED_TOKENS]
    )  # without padding to a chunk
    layer = more / _MEASURED_TOKENS / 2
    if checkpointing:
        return layer + layers * shape_of(model).hidden * model.dtype.itemsize
    return layers * layer


def _kept_bytes(model: PreTrainedModel, ids: torch.Tensor) -> int:
    """Bytes that autograd keeps of a forward pass, without the model's own tensors."""
    own = {
        tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())
    }
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor  # keeps its memory from being reused

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        states = cast(Any, model).base_model(input_ids=ids, use_cache=False)
    del states
    return sum(size for place, size in kept.items() if place not in own)


def _targets(model: PreTrainedModel, lora: LoRA) -> list[Any]:
    head = model.get_output_embeddings()
    names = (lora.targets,) if isinstance(lora.targets, str) else lora.targets
    linear = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    ]
    return [
        module
        for name, module in linear
        if names == ("all-linear",) or name.rpartition(".")[2] in names
    ]
