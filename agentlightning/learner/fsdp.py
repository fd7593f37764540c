"""A learner on several GPUs, or groups of cores, of one machine, with weights sharded over
processes (FSDP2).

The trainer's process starts the others and sends each the whole batch; it has no copy of the
weights. Each of them has a part of every weight, gradient and moment, and computes some
micro-batches. They end when one of them or the trainer does."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, TypeVar, cast

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
from agentlightning.data.token_bytes import TokenBytes
from agentlightning.data.transitions import FloatArray
from agentlightning.errors import AgentLightningError, ConfigError, TrainingError
from agentlightning.learner.base import WeightsForm
from agentlightning.learner.embedded_sampler import choose_threads
from agentlightning.learner.losses import Loss, Totals
from agentlightning.learner.policy import Policy, load_policy
from agentlightning.learner.policy_config import AdamW
from agentlightning.learner.servers import end_of
from agentlightning.learner.torch import MISMATCH_TOLERANCE, TorchLearner

_END_SECONDS: Final = 10.0
_LAST_WORDS_SECONDS: Final = 1.0

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """The first message to each process: the model's directory or id, and how to train it, with
    layers in `dtype`."""

    model: str
    optimizer: AdamW
    reference: bool
    device: str
    dtype: str
    threads: int | None


class FsdpLearner:
    """A `Learner` of the model in `settings`, in several processes that write to the file `log`.
    `policy` has its tokenizer. TrainingError, with the end of the log, if one of them ends."""

    def __init__(self, policy: Policy, settings: Settings, processes: int, log: Path) -> None:
        self.token_bytes: TokenBytes | None = policy.token_bytes
        self.mismatch_tolerance: float = MISMATCH_TOLERANCE[getattr(torch, settings.dtype)]
        self._log = log
        # rendezvous directory, readable by this user only
        self._place = tempfile.mkdtemp(prefix="agl-")
        self._ranks: list[Connection] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with log.open("ab") as output:
                self._log_begin = output.tell()
                for rank in range(processes):
                    ours, theirs = Pipe()
                    self._ranks.append(ours)
                    with theirs:
                        own = (str(theirs.fileno()), self._place, str(rank), str(processes))
                        started = subprocess.Popen(
                            (sys.executable, "-m", __name__, *own),
                            env=_environment(processes),
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=output,
                            pass_fds=(theirs.fileno(),),
                            # Ctrl-C goes to the trainer, which ends them after saving
                            start_new_session=True,
                        )
                    self.processes.append(started)
            self._send(settings)
            self._answer()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes."""
        for rank in self._ranks:
            rank.close()  # they end when it closes
        give_up = time.monotonic() + _END_SECONDS
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, give_up - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self._place, ignore_errors=True)

    def values(self, batch: Sequence[TrainingSequence]) -> list[FloatArray]:
        return self._call("values", batch)

    def step(
        self, batch: Sequence[TrainingSequence], loss: Loss, version: int | None = None
    ) -> dict[str, float]:
        return self._call("step", batch, loss, version)

    def logprobs(self, batch: Sequence[TrainingSequence], temperature: float = 1.0) -> list[Tensor]:
        return [torch.from_numpy(array) for array in self._call("logprobs", batch, temperature)]

    def export(self, directory: Path, form: WeightsForm) -> None:
        self._call("export", directory.absolute(), form)

    def save(self, directory: Path, resumable: bool = True) -> None:
        self._call("save", directory.absolute(), resumable)

    def load(self, directory: Path) -> None:
        self._call("load", directory.absolute())

    def _call(self, method: str, *arguments: Any) -> Any:
        self._send((method, arguments))
        return self._answer()

    def _send(self, message: Any) -> None:
        packed = pickle.dumps(message)
        with self._errors_translated():
            for rank in self._ranks:
                rank.send_bytes(packed)

    def _answer(self) -> Any:
        """The first process's answer, once all have answered. An error of any process is raised."""
        answers: dict[Connection, tuple[Any, Exception | None]] = {}
        with self._errors_translated():
            while len(answers) < len(self._ranks):
                for rank in wait([rank for rank in self._ranks if rank not in answers]):
                    assert isinstance(rank, Connection)
                    answers[rank] = pickle.loads(rank.recv_bytes())
        for _, error in answers.values():
            if error is not None:
                raise error
        return answers[self._ranks[0]][0]

    @contextlib.contextmanager
    def _errors_translated(self) -> Generator[None]:
        try:
            yield
        except (OSError, EOFError):
            time.sleep(_LAST_WORDS_SECONDS)
            ends = [
                f"number {rank} with {signal.Signals(-code).name if code < 0 else code}"
                for rank, process in enumerate(self.processes)
                if (code := process.poll()) is not None
            ]
            self.close()
            raise TrainingError(
                f"a process of the FSDP learner has ended ({', '.join(ends)}), and the others "
                "with it. `--resume` (resume=True) continues from the latest "
                f"checkpoint{end_of(self._log, self._log_begin)}"
            ) from None


def check_devices(device: str, processes: int) -> None:
    """ConfigError unless so many processes can train on this device: one GPU each, or all on the
    CPU."""
    if device not in ("cpu", "cuda"):
        raise ConfigError(
            f"learner: fsdp runs on cuda, a GPU for each process, or on cpu; device is {device!r}"
        )
    if device == "cuda" and processes > torch.cuda.device_count():
        raise ConfigError(
            f"learner: fsdp: {processes} needs as many GPUs, and {torch.cuda.device_count()} are "
            "visible here (CUDA_VISIBLE_DEVICES)"
        )


def _environment(processes: int) -> dict[str, str]:
    """The environment of a process: this one's, plus the module search path, since a user's loss
    function is imported again. Processes communicate on this machine only."""
    threads = str(max(1, (os.cpu_count() or 1) // processes))
    places = os.pathsep.join(place or os.getcwd() for place in sys.path)
    loopback = "lo" if sys.platform == "linux" else "lo0"
    own = {"PYTHONPATH": places, "GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    return {"OMP_NUM_THREADS": threads, **os.environ, **own}


# --- one of the processes ---


class ShardedLearner(TorchLearner):
    """A `TorchLearner` whose weights are sharded over the processes of a mesh. Weights and moments
    are float32; a layer's weights are gathered in `dtype` for computing. Its checkpoints are those
    of a `TorchLearner` of that `dtype`."""

    def __init__(self, settings: Settings) -> None:
        device = torch.device(settings.device)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        self._dtype: torch.dtype = getattr(torch, settings.dtype)
        policy = None
        reference = False
        # in turns, so memory has one whole model at a time
        for turn in range(dist.get_world_size()):
            if turn == dist.get_rank():
                policy = load_policy(settings.model, device="cpu")
                _shard(policy.model, mesh, self._dtype)
                if settings.reference:
                    reference = (
                        load_policy(settings.model, device="cpu").model.eval().requires_grad_(False)
                    )
                    _shard(reference, mesh, self._dtype)
            dist.barrier()
        assert policy is not None
        choose_threads(policy.model, settings.threads)
        super().__init__(policy, settings.optimizer, reference=reference)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def _run(self, model: PreTrainedModel, work: Callable[[], T]) -> T:
        return cast(Any, model).run(work)

    def _micro_batches(
        self, batch: Sequence[TrainingSequence], weights: Sequence[FloatArray]
    ) -> Iterator[MicroBatch]:
        """Its share of all micro-batches. If others have one more, it gets an empty one, because
        all must gather layers together."""
        share = list(super()._micro_batches(batch, weights))
        yield from share[dist.get_rank() :: dist.get_world_size()]
        if dist.get_rank() >= len(share) % dist.get_world_size() > 0:
            names = (
                "rows",
                "positions",
                "logprobs",
                "advantages",
                "weights",
                "transitions",
                "versions",
                "observed",
            )
            nothing: dict[str, Any] = {name: getattr(share[0], name)[:0] for name in names}
            yield replace(
                share[0], token_ids=share[0].token_ids[:1, :2], tokens=0, forest=None, **nothing
            )

    def _reduced(self, totals: Totals) -> Totals:
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, totals)
        return Totals.of_all(parts)

    def _clipped(self, trained: Sequence[Tensor]) -> float:
        norm: Any = torch.nn.utils.clip_grad_norm_(trained, self.config.max_grad_norm)
        return float(norm.full_tensor())

    def _all_reduced(self, parts: Tensor) -> Tensor:
        dist.all_reduce(parts)
        return parts

    def export(self, directory: Path, form: WeightsForm) -> None:
        self._write(directory, self._gathered(self.model.state_dict(keep_vars=True)))

    def save(self, directory: Path, resumable: bool = True) -> None:
        weights = self._gathered(self.model.state_dict(keep_vars=True))
        # Before anything is written: if writing fails, the others would wait for this one.
        optimizer = self._gathered(self.optimizer.state_dict()) if resumable else None
        self._write(directory, weights)
        if resumable and dist.get_rank() == 0:
            names = (
                []
                if self._dtype == torch.float32
                else [name for name, _ in self.model.named_parameters()]
            )
            self._save_state(directory, optimizer, [weights[name] for name in names])

    def _write(self, directory: Path, weights: dict[str, Tensor]) -> None:
        if dist.get_rank() == 0:
            # tied weights stay tied
            kinds = {id(weight): weight.to(self._dtype) for weight in weights.values()}
            self.policy.save(
                directory, {name: kinds[id(weight)] for name, weight in weights.items()}
            )

    def _gathered(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state with whole tensors, on the CPU of the first process; empty in the others.
        Shared tensors are gathered once."""
        found: dict[int, Tensor | None] = {}

        def whole(leaf: Any) -> Any:
            if not isinstance(leaf, DTensor):
                return leaf
            if id(leaf) not in found:
                tensor: Tensor = cast(Any, leaf.detach()).full_tensor()
                found[id(leaf)] = tensor.cpu() if dist.get_rank() == 0 else None
            return found[id(leaf)]

        return tree_map(whole, state)

    def _sharded(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        own = self.model.state_dict()
        return {
            name: _local_shard(weight, own[name]) if name in own else weight
            for name, weight in weights.items()
        }

    def _load_state(self, state: Mapping[str, Any]) -> None:
        trained = self._masters.trained
        moments = {
            number: {
                key: _local_shard(value, trained[number]) if value.dim() else value
                for key, value in values.items()
            }
            for number, values in state["optimizer"]["state"].items()
        }
        self.optimizer.load_state_dict({**state["optimizer"], "state": moments})
        with torch.no_grad():
            if masters := state.get("masters"):
                for weight, saved in zip(trained, masters, strict=True):
                    weight.copy_(_local_shard(saved, weight))


def _shard(model: PreTrainedModel, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Shard the model; `model.run(work)` is `work()` with the weights outside of layers
    gathered."""
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    layers = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    for module in (*layers, model):
        part = fully_shard(module, mesh=mesh, mp_policy=precision)
        # token weights are over the whole batch: sum gradients
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo supports only this
    cast(Any, model).run = _run
    register_fsdp_forward_method(model, "run")


def _run(work: Callable[[], T]) -> T:
    return work()


def _local_shard(whole: Tensor, own: Tensor) -> Tensor:
    """This process's shard of a tensor that all have read."""
    if not isinstance(own, DTensor):
        return whole
    if whole.shape != own.shape:
        raise ValueError(
            f"a tensor has the shape {tuple(whole.shape)} instead of {tuple(own.shape)}"
        )
    return distribute_tensor(
        whole.to(own.device), own.device_mesh, own.placements, src_data_rank=None
    )


def main(descriptor: int, place: str, rank: int, processes: int) -> None:
    """Serve the trainer at the other end of the socket `descriptor`; the processes meet in the
    directory `place`."""
    trainer = Connection(descriptor)
    calls: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_read, args=(trainer, calls, place), daemon=True).start()
    settings: Settings = calls.get()
    on_gpu = torch.device(settings.device).type == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        # a store on a port would be reachable from the network
        init_method=f"file://{place}/store",
        rank=rank,
        world_size=processes,
        # others wait while one loads a model; the trainer notices a process that ends
        timeout=timedelta(hours=1),
    )
    learner = ShardedLearner(settings)
    trainer.send_bytes(pickle.dumps((None, None)))
    while True:
        method, arguments = calls.get()
        answer = None
        error = None
        try:
            answer = getattr(learner, method)(*arguments)
            # pickled tensors would include the whole storage that they are views of
            if method == "logprobs":
                answer = [logprob.numpy() for logprob in answer]
        except AgentLightningError as raised:  # raised by all processes alike
            error = raised
        except OSError as raised:
            # raised by one process, reading or writing files; in a step the others would hang
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
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
