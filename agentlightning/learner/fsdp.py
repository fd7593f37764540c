"""A learner on several GPUs, or groups of cores, of one machine, with weights sharded over processes (FSDP2).

Starts the processes, sends each the whole batch, and ends if one of them ends. Their part is in `learner/shards.py`.
The trainer's process has no copy of the weights.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from agentlightning.data.references import mark_of
from agentlightning.data.sequences import TrainingSequence
from agentlightning.data.token_bytes import TokenBytes
from agentlightning.data.transitions import FloatArray
from agentlightning.errors import ConfigError, TrainingError
from agentlightning.learner.base import AdamW, WeightsForm
from agentlightning.learner.losses import Loss
from agentlightning.learner.policy import Policy
from agentlightning.learner.servers import end_of
from agentlightning.learner.torch import MISMATCH_TOLERANCE

_END_SECONDS: Final = 10.0
_LAST_WORDS_SECONDS: Final = 1.0


@dataclass(frozen=True)
class Settings:
    """The first message to each process: the model's directory or id, and how to train it, with layers in `dtype`."""

    model: str
    optimizer: AdamW
    reference: bool
    device: str
    dtype: str
    threads: int | None


class FsdpLearner:
    """A `Learner` of the model in `settings`, in several processes that write to the file `log`. `policy` has its
    tokenizer. TrainingError, with the end of the log, if one of them ends."""

    def __init__(self, policy: Policy, settings: Settings, processes: int, log: Path) -> None:
        self.token_bytes: TokenBytes | None = policy.token_bytes
        self.mismatch_tolerance: float = MISMATCH_TOLERANCE[getattr(torch, settings.dtype)]
        self._log = log
        self._place = tempfile.mkdtemp(prefix="agl-")  # rendezvous directory, readable by this user only
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
                        module = "agentlightning.learner.shards"
                        started = subprocess.Popen(
                            (sys.executable, "-m", module, str(theirs.fileno()), self._place),
                            env=_environment(rank, processes),
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=output,
                            pass_fds=(theirs.fileno(),),
                            start_new_session=True,  # Ctrl-C goes to the trainer, which ends them after saving
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
        return self._call("values", _without_origins(batch))

    def step(self, batch: Sequence[TrainingSequence], loss: Loss, version: int | None = None) -> dict[str, float]:
        asks = mark_of(loss.function, "tokens") or callable(loss.aggregation)
        return self._call("step", batch if asks else _without_origins(batch), loss, version)

    def logprobs(self, batch: Sequence[TrainingSequence], temperature: float = 1.0) -> list[Tensor]:
        return [
            torch.from_numpy(array) for array in self._call("logprobs_as_arrays", _without_origins(batch), temperature)
        ]

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
        with self._explained():
            for rank in self._ranks:
                rank.send_bytes(packed)

    def _answer(self) -> Any:
        """The first process's answer, once all have answered. An error of any process is raised."""
        answers: dict[Connection, tuple[Any, Exception | None]] = {}
        with self._explained():
            while len(answers) < len(self._ranks):
                for rank in wait([rank for rank in self._ranks if rank not in answers]):
                    assert isinstance(rank, Connection)
                    answers[rank] = pickle.loads(rank.recv_bytes())
        for _, error in answers.values():
            if error is not None:
                raise error
        return answers[self._ranks[0]][0]

    @contextlib.contextmanager
    def _explained(self) -> Generator[None]:
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
                f"a process of the FSDP learner has ended ({', '.join(ends)}), and the others with it. "
                f"`--resume` (resume=True) continues from the latest checkpoint{end_of(self._log, self._log_begin)}"
            ) from None


def _without_origins(batch: Sequence[TrainingSequence]) -> list[TrainingSequence]:
    """The batch without tasks, which may be large: each process would read them."""
    return [replace(sequence, origin=None) for sequence in batch]


def check_devices(device: str, processes: int) -> None:
    """ConfigError unless so many processes can train on this device: one GPU each, or all on the CPU."""
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"learner: fsdp runs on cuda, a GPU for each process, or on cpu; device is {device!r}")
    if device == "cuda" and processes > torch.cuda.device_count():
        raise ConfigError(
            f"learner: fsdp: {processes} needs as many GPUs, and {torch.cuda.device_count()} are visible here "
            "(CUDA_VISIBLE_DEVICES)"
        )


def _environment(rank: int, processes: int) -> dict[str, str]:
    """The environment of a process: this one's, plus the module search path, since a user's loss function is imported
    again. Processes communicate on this machine only."""
    threads = str(max(1, (os.cpu_count() or 1) // processes))
    places = os.pathsep.join(place or os.getcwd() for place in sys.path)
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes), "PYTHONPATH": places}
    loopback = "lo" if sys.platform == "linux" else "lo0"
    own |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    return {"OMP_NUM_THREADS": threads, **os.environ, **own}
