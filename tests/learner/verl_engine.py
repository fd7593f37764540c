"""One process of verl's FSDP engine on a CPU: computes the gradient of our losses on its share of a
batch and writes it down. Started by test_verl.py, in verl's environment.

Its arguments are a directory with `model` and `work.pkl`, its rank and how many processes there
are."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed

from agentlightning.data.aggregation import aggregation_weights
from agentlightning.data.sequences import TrainingSequence
from agentlightning.learner import losses
from agentlightning.learner.losses import Loss


@dataclass(frozen=True)
class Work:
    """The batch of all processes, and the most tokens computed at once."""

    batch: Sequence[TrainingSequence]
    losses: Sequence[Loss]
    tokens: int


@dataclass(frozen=True)
class Told:
    """What the engine told of a loss: its value, the norm of its gradient and the gradient; and in
    how many micro-batches the first process computed them."""

    loss: float
    norm: float
    gradient: dict[str, torch.Tensor]
    micro_batches: int


def use_the_cpu() -> None:
    """Tell verl that its accelerator is the CPU: it knows GPUs and NPUs. What its engine does not
    use is None."""
    from verl.plugin.platform import PlatformBase, set_platform

    members = {
        "device_name": "cpu",
        "vendor_name": "cpu",
        "device_module": torch.cpu,
        "is_available": lambda self: True,
        "current_device": lambda self: "cpu",
        "device_count": lambda self: 1,
        "communication_backend_name": lambda self: "gloo",
        "manual_seed": lambda self, seed: torch.manual_seed(seed),
        "empty_cache": lambda self: None,
        "is_ipc_supported": lambda self: False,
    }
    unused: dict[str, Any] = {
        name: None for name in PlatformBase.__abstractmethods__ if name not in members
    }
    set_platform(type("CPU", (PlatformBase,), members | unused)())


def as_tensors(work: Work, loss: Loss, rank: int, processes: int) -> Any:
    """A process's share of the batch as verl takes it: jagged rows, which have what belongs to a
    sampled token at the place that predicts it, where verl tells its log-probability. The weights
    hold the denominators of the whole batch."""
    from verl.utils import tensordict_utils as tu

    rows: dict[str, list[torch.Tensor]] = {}
    weights = aggregation_weights(work.batch, loss.aggregation, loss.constant_length)
    first = 0
    for number, (sequence, own) in enumerate(zip(work.batch, weights, strict=True)):
        columns = {
            "loss_mask": np.ones(len(own), bool),
            "old_log_probs": sequence.logprobs,
            "advantages": sequence.advantages,
            "weights": own,
            "transitions": sequence.transitions.astype(np.int64) + first,
        }
        first += int(sequence.transitions[-1]) + 1
        if number % processes != rank:
            continue
        rows.setdefault("input_ids", []).append(
            torch.from_numpy(sequence.token_ids.astype(np.int64))
        )
        rows.setdefault("position_ids", []).append(torch.arange(len(sequence)))
        for name, values in columns.items():
            row = np.zeros(len(sequence), values.dtype)
            row[sequence.positions - 1] = values
            rows.setdefault(name, []).append(torch.from_numpy(row))
    jagged = {
        name: torch.nested.as_nested_tensor(one, layout=torch.jagged) for name, one in rows.items()
    }
    said = {
        "temperature": loss.temperature,
        "calculate_entropy": True,
        "use_remove_padding": False,
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": work.tokens,
    }
    return tu.get_tensordict(jagged, said)


def as_verl_takes_it(loss: Loss) -> Callable[..., tuple[torch.Tensor, dict[str, Any]]]:
    """`loss` over the tokens of a micro-batch. verl's engine averages gradients over the processes,
    and ours are to be summed."""

    def of_micro_batch(
        model_output: Any, data: Any, dp_group: Any = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        sampled = data["loss_mask"].values().bool()
        logprobs, entropy = (
            model_output[name].values()[sampled] for name in ("log_probs", "entropy")
        )
        old, advantages, weights, transitions = (
            data[name].values()[sampled]
            for name in ("old_log_probs", "advantages", "weights", "transitions")
        )
        transitions = torch.unique(transitions, return_inverse=True)[1]
        per_token, *_ = losses.policy_loss(logprobs, old, advantages, transitions, loss)
        total = ((per_token - loss.entropy_coefficient * entropy) * weights).sum()
        return total * data["dp_size"], {"loss": float(total.detach())}

    return of_micro_batch


def main(directory: Path, rank: int, processes: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{directory / 'meet'}", rank=rank, world_size=processes
    )
    use_the_cpu()
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    work: Work = pickle.loads((directory / "work.pkl").read_bytes())
    float32 = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
    engine = FSDPEngineWithLMHead(
        HFModelConfig(
            path=str(directory / "model"),
            use_remove_padding=False,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "sdpa"},
        ),
        FSDPEngineConfig(strategy="fsdp2", mixed_precision=float32, use_torch_compile=False),
        FSDPOptimizerConfig(lr=0.0, weight_decay=0.0, clip_grad=1e9, total_training_steps=1),
        CheckpointConfig(),
    )
    engine.initialize()
    out: list[Told] = []
    for loss in work.losses:
        with engine.train_mode(zero_grad_on_exit=False):
            told = engine.train_batch(
                as_tensors(work, loss, rank, processes), as_verl_takes_it(loss)
            )["metrics"]
            gradient = {
                name: one.grad.full_tensor() for name, one in engine.module.named_parameters()
            }
        value = torch.tensor(sum(told["loss"]))
        distributed.all_reduce(value)
        out.append(Told(float(value), float(told["grad_norm"]), gradient, len(told["loss"])))
    if rank == 0:
        (directory / "told.pkl").write_bytes(pickle.dumps(out))
    distributed.destroy_process_group()


if __name__ == "__main__":
    from tests.learner import verl_engine  # what is pickled here is read elsewhere

    verl_engine.main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
