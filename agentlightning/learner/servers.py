"""A vLLM server started for a run: its share of the GPUs, its program, and its end with the run.

Knows nothing of weights and calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agentlightning.errors import ConfigError
from agentlightning.gateway.backends.connection import BackendConnection
from agentlightning.learner.memory import GIB, MemoryEstimate

_READY_SECONDS: Final = 900.0  # loading a large model and compiling kernels
_SHOWN: Final = 3000  # characters of the log
_WATCH: Final = 'read -r _; kill -TERM "-$1"; sleep "$2"; kill -KILL "-$1"; rm -rf "$3"'
_MARGIN: Final = 2 * GIB  # CUDA contexts and fragmentation
_LEAST_CACHE: Final = GIB


_FLAGS: Final = (
    "--served-model-name",
    "policy",
    "--logprobs-mode",
    "processed_logprobs",
    "--enable-scale-out",
)
_SETTINGS: Final = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class Share:
    """A server's share of the GPUs: `flags` and `environment` to start it with. With `sleeps` it
    frees its memory while a step is computed."""

    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    sleeps: bool = False


def other_gpus(processes: int | None, *, devices: int, first: int = 0) -> Share | None:
    """The `devices` that the learner's `processes` leave (None: it uses the `first` device, in the
    trainer's process); None if the learner has the only one. ConfigError if several processes leave
    none."""
    learners = processes or 1
    known = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(devices)))
    if left := [
        device
        for place, device in enumerate(known.split(","))
        if not first <= place < first + learners
    ]:
        return Share(environment={"CUDA_VISIBLE_DEVICES": ",".join(left)})
    if processes is None:
        return None
    raise ConfigError(
        f"learner: {processes} processes leave none of the {devices} GPUs to the sampler: take "
        "fewer, or name a server elsewhere, as in sampler: {vllm: http://host:8000/v1}"
    )


def part_of_gpu(
    estimate: MemoryEstimate | None, overlaps: bool, *, weights: int, free: int, total: int
) -> Share:
    """The share of its GPU that the learner leaves, given its bytes in `total` and `free` with its
    `weights` loaded. If sampling `overlaps` steps, the server cannot sleep. ConfigError if a second
    copy of the weights does not fit."""
    kept = 0
    if estimate is not None:
        in_steps = 0 if overlaps else estimate.gradients + estimate.activations + estimate.logits
        kept = estimate.total - estimate.weights - in_steps
    left = free - kept - _MARGIN
    if left < weights + _LEAST_CACHE:
        raise ConfigError(
            f"the GPU has {free / GIB:.1f} GiB free, training keeps {kept / GIB:.1f} of them, and "
            f"the sampler needs {weights / GIB:.1f} for the weights and some for keys and values. "
            "What helps: lora: {}, or a sampler elsewhere ({vllm: http://host:8000/v1})"
        )
    flags = ("--gpu-memory-utilization", f"{left / total:.3f}")
    return Share(flags) if overlaps else Share((*flags, "--enable-sleep-mode"), sleeps=True)


def find_program(program: str | None) -> str:
    """The path of the program that starts vLLM. ConfigError if there is none."""
    found = shutil.which(os.path.expanduser(program or "vllm"))
    if found is None:
        raise ConfigError(
            f"there is no program {program or 'vllm'!r} to start: install vLLM in its own "
            "environment and name it, as in {vllm: start, program: /path/to/bin/vllm}, or give "
            "the URL of a server"
        )
    return found


class StartedServer:
    """A vLLM server for `model`, with `environment` added to this process's, that writes to the
    file `log`. ConfigError if there is no such `program` (default: `vllm`).

    It listens on a `socket` in a directory that only this user can enter, so nobody else can load
    weights."""

    url: Final = "http://localhost/v1"
    end_seconds: float = 10.0

    def __init__(
        self,
        program: str | None,
        model: str,
        flags: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        found = find_program(program)
        # a socket's path has at most 107 bytes
        short = len(os.fsencode(tempfile.gettempdir())) < 80
        self._directory = Path(tempfile.mkdtemp(prefix="agl-", dir=None if short else "/tmp"))
        self.socket = str(self._directory / "vllm")
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        # It has its own packages.
        own = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "VIRTUAL_ENV")
        }
        with log.open("ab") as output:
            self._log_begin = output.tell()
            self._process = subprocess.Popen(
                [found, "serve", model, "--uds", self.socket, *_FLAGS, *flags],
                env={**own, **_SETTINGS, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C goes to the trainer, which stops it at the end
            )
        # If this process is killed, its end of the pipe closes.
        watch = (
            "sh",
            "-c",
            _WATCH,
            "sh",
            str(self._process.pid),
            f"{self.end_seconds:g}",
            str(self._directory),
        )
        self._watcher = subprocess.Popen(
            watch, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )

    async def ready(self, connection: BackendConnection) -> None:
        """Wait until it answers. ConfigError, with the end of its log, if it ends first or takes
        too long."""
        try:
            async with asyncio.timeout(_READY_SECONDS):
                while not await connection.healthy(2.0, control=True):
                    if ended := self.ended():
                        raise ConfigError(ended)
                    await asyncio.sleep(0.5)
        except TimeoutError:
            log_end = end_of(self._log, self._log_begin)
            raise ConfigError(
                f"vLLM does not answer after {_READY_SECONDS:g} seconds{log_end}"
            ) from None

    def ended(self) -> str | None:
        """The way its program ended, and the end of its log; None while it runs."""
        if (code := self._process.poll()) is None:
            return None
        return f"vLLM has ended with exit code {code}{end_of(self._log, self._log_begin)}"

    def stop(self) -> None:
        """End it, with all its child processes."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(self.end_seconds)
        self._watcher.kill()
        self._watcher.communicate()
        shutil.rmtree(self._directory, ignore_errors=True)


def end_of(log: Path, begin: int) -> str:
    """The end of a message about a process: the last lines of its log, in which earlier processes
    wrote the first `begin` bytes."""
    output = log.read_bytes()[begin:].decode(errors="replace")[-_SHOWN:]
    return f". The end of {log}:\n{output}" if output.strip() else f", and nothing in {log}"
