"""One process of a sharded learner (FSDP2), and how it serves the trainer's process.

Each process has a part of every weight, gradient and moment, and computes some micro-batches of the batch, which all
receive whole. It ends when the trainer's end of its socket closes. Knows nothing of algorithms and samplers.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agentlightning.data.sequences import MicroBatch, TrainingSequence
from agentlightning.data.transitions import FloatArray
from agentlightning.errors import AgentLightningError
from agentlightning.learner.base import WeightsForm
from agentlightning.learner.fsdp import Settings
from agentlightning.learner.objective import Totals
from agentlightning.learner.policy import load_policy
from agentlightning.learner.serving import choose_threads
from agentlightning.learner.torch import TorchLearner

T = TypeVar("T")


class ShardedLearner(TorchLearner):
    """A `TorchLearner` whose weights are sharded over the processes of a mesh. Weights and moments are float32; a
    layer's weights are gathered in `dtype` for computing. Its checkpoints are those of a `TorchLearner` of that
    `dtype`."""

    def __init__(self, settings: Settings) -> None:
        device = torch.device(settings.device)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        self._dtype: torch.dtype = getattr(torch, settings.dtype)
        policy, reference = None, False
        for turn in range(dist.get_world_size()):  # in turns, so memory has one whole model at a time
            if turn == dist.get_rank():
                policy = load_policy(settings.model, device="cpu")
                _spread(policy.model, mesh, self._dtype)
                if settings.reference:
                    reference = load_policy(settings.model, device="cpu").model.eval().requires_grad_(False)
                    _spread(reference, mesh, self._dtype)
            dist.barrier()
        assert policy is not None
        choose_threads(policy.model, settings.threads)
        super().__init__(policy, settings.optimizer, reference=reference)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def _run(self, model: PreTrainedModel, work: Callable[[], T]) -> T:
        return cast(Any, model).run(work)

    def _micro_batches(self, batch: Sequence[TrainingSequence], weights: Sequence[FloatArray]) -> Iterator[MicroBatch]:
        """Its share of all micro-batches. If others have one more, it gets an empty one, because all must gather layers
        together."""
        share = list(super()._micro_batches(batch, weights))
        yield from share[dist.get_rank() :: dist.get_world_size()]
        if dist.get_rank() >= len(share) % dist.get_world_size() > 0:
            names = ("rows", "positions", "logprobs", "advantages", "weights", "transitions", "versions", "observed")
            nothing: dict[str, Any] = {name: getattr(share[0], name)[:0] for name in names}
            yield replace(share[0], token_ids=share[0].token_ids[:1, :2], tokens=0, forest=None, **nothing)

    def _over_all(self, totals: Totals) -> Totals:
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, totals)
        return Totals.of_all(parts)

    def _clipped(self, trained: Sequence[Tensor]) -> float:
        norm: Any = torch.nn.utils.clip_grad_norm_(trained, self.config.max_grad_norm)
        return float(norm.full_tensor())

    def _joined(self, parts: Tensor) -> Tensor:
        dist.all_reduce(parts)
        return parts

    def logprobs_as_arrays(self, batch: Sequence[TrainingSequence], temperature: float) -> list[FloatArray]:
        """The log-probabilities as arrays: pickled tensors would include the whole storage that they are views of."""
        return [logprob.numpy() for logprob in self.logprobs(batch, temperature)]

    def export(self, directory: Path, form: WeightsForm) -> None:
        self._write(directory, self._gathered(self.model.state_dict(keep_vars=True)))

    def save(self, directory: Path, resumable: bool = True) -> None:
        weights = self._gathered(self.model.state_dict(keep_vars=True))
        # Before anything is written: if writing fails, the others would wait for this one.
        optimizer = self._gathered(self.optimizer.state_dict()) if resumable else None
        self._write(directory, weights)
        if resumable and dist.get_rank() == 0:
            names = [] if self._dtype == torch.float32 else [name for name, _ in self.model.named_parameters()]
            self._save_state(directory, optimizer, [weights[name] for name in names])

    def _write(self, directory: Path, weights: dict[str, Tensor]) -> None:
        if dist.get_rank() == 0:
            kinds = {id(weight): weight.to(self._dtype) for weight in weights.values()}  # tied weights stay tied
            self.policy.save(directory, {name: kinds[id(weight)] for name, weight in weights.items()})

    def _gathered(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state with whole tensors, on the CPU of the first process; empty in the others. Shared tensors are
        gathered once."""
        found: dict[int, Tensor | None] = {}

        def whole(leaf: Any) -> Any:
            if not isinstance(leaf, DTensor):
                return leaf
            if id(leaf) not in found:
                tensor: Tensor = cast(Any, leaf.detach()).full_tensor()
                found[id(leaf)] = tensor.cpu() if dist.get_rank() == 0 else None
            return found[id(leaf)]

        return tree_map(whole, state)

    def _placed(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        own = self.model.state_dict()
        return {name: _like(weight, own[name]) if name in own else weight for name, weight in weights.items()}

    def _load_state(self, state: Mapping[str, Any]) -> None:
        trained = self._masters.trained
        moments = {
            number: {key: _like(value, trained[number]) if value.dim() else value for key, value in values.items()}
            for number, values in state["optimizer"]["state"].items()
        }
        self.optimizer.load_state_dict({**state["optimizer"], "state": moments})
        with torch.no_grad():
            if masters := state.get("masters"):
                for weight, saved in zip(trained, masters, strict=True):
                    weight.copy_(_like(saved, weight))


def _spread(model: PreTrainedModel, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Shard the model; `model.run(work)` is `work()` with the weights outside of layers gathered."""
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for module in (*layers, model):
        part = fully_shard(module, mesh=mesh, mp_policy=precision)
        part.set_gradient_divide_factor(1.0)  # token weights are over the whole batch: sum gradients
        part.set_force_sum_reduction_for_comms(True)  # gloo supports only this
    cast(Any, model).run = _run
    register_fsdp_forward_method(model, "run")


def _run(work: Callable[[], T]) -> T:
    return work()


def _like(whole: Tensor, own: Tensor) -> Tensor:
    """This process's shard of a tensor that all have read."""
    if not isinstance(own, DTensor):
        return whole
    if whole.shape != own.shape:
        raise ValueError(f"a tensor has the shape {tuple(whole.shape)} instead of {tuple(own.shape)}")
    return distribute_tensor(whole.to(own.device), own.device_mesh, own.placements, src_data_rank=None)


def main(descriptor: int, place: str) -> None:
    """Serve the trainer at the other end of the socket `descriptor`; the processes meet in the directory `place`."""
    rank, trainer = int(os.environ["RANK"]), Connection(descriptor)
    calls: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_read, args=(trainer, calls, place), daemon=True).start()
    settings: Settings = calls.get()
    on_gpu = torch.device(settings.device).type == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        init_method=f"file://{place}/store",  # a store on a port would be reachable from the network
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(hours=1),  # others wait while one loads a model; the trainer notices a process that ends
    )
    learner = ShardedLearner(settings)
    trainer.send_bytes(pickle.dumps((None, None)))
    while True:
        method, arguments = calls.get()
        answer, error = None, None
        try:
            answer = getattr(learner, method)(*arguments)
        except AgentLightningError as raised:  # raised by all processes alike
            error = raised
        except OSError as raised:  # raised by one process, reading or writing files; in a step the others would hang
            if method not in ("save", "export", "load"):
                raise
            error = raised
        trainer.send_bytes(pickle.dumps((answer if rank == 0 else None, error)))


def _read(trainer: Connection, calls: SimpleQueue[Any], place: str) -> None:
    try:
        while True:
            calls.put(pickle.loads(trainer.recv_bytes()))
    except (OSError, EOFError):  # the trainer has ended
        shutil.rmtree(place, ignore_errors=True)
        os._exit(0)
    except Exception:  # noqa: BLE001 - importing a user's loss function may raise anything
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
