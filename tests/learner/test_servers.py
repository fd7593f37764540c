"""A server of the run's own: its part of the GPUs, when it is said not to come, and that nothing of
it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentlightning.errors import ConfigError
from agentlightning.gateway.backends.connection import BackendConnection
from agentlightning.learner.memory import GIB, MemoryEstimate
from agentlightning.learner.servers import Share, StartedServer, other_gpus, part_of_gpu

pytestmark = pytest.mark.anyio


def program(directory: Path, script: str) -> str:
    path = directory / "vllm"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def start(directory: Path, script: str, *flags: str) -> StartedServer:
    log = directory / "vllm.log"
    return StartedServer(
        program(directory, script), "a-model", flags, environment={"SAID": "hello"}, log=log
    )


def gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def written_ids(file: Path) -> list[int]:
    while not file.is_file() or not file.read_text().strip():
        time.sleep(0.01)
    return [int(one) for one in file.read_text().split()]


def wait_until_gone(processes: list[int]) -> None:
    give_up = time.monotonic() + 30
    while not all(map(gone, processes)):
        assert time.monotonic() < give_up, processes
        time.sleep(0.05)


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no program 'no-such-vllm'.*or give the URL"):
        StartedServer("no-such-vllm", "m", [], environment={}, log=tmp_path / "log")


async def test_a_server_that_ends_is_reported_with_its_last_words(tmp_path: Path) -> None:
    server = start(tmp_path, 'echo "$SAID $*: unrecognized"; exit 2', "--flag")
    connection = BackendConnection(server.url)
    with pytest.raises(
        ConfigError, match=r"exit code 2(.|\n)*hello serve a-model .*--flag: unrecognized"
    ):
        await server.ready(connection)
    server.stop()
    await connection.close()


def test_nothing_of_it_is_left_when_the_run_ends(tmp_path: Path) -> None:
    server = start(
        tmp_path, f"trap '' TERM; sleep 600 & echo $$ $! > {tmp_path}/ids; wait; sleep 600"
    )
    processes = written_ids(tmp_path / "ids")
    server.end_seconds = 0.2
    directory = Path(server.socket).parent
    assert directory.stat().st_mode & 0o077 == 0  # nobody else can enter it
    server.stop()
    wait_until_gone(processes)
    assert not directory.exists()


def test_nor_when_the_trainer_is_killed(tmp_path: Path) -> None:
    script = program(tmp_path, f"sleep 600 & echo $$ $! > {tmp_path}/ids; wait")
    code = (
        "import time; from pathlib import Path; from agentlightning.learner.servers import "
        "StartedServer\n"
        f"StartedServer({script!r}, 'm', [], environment={{}}, "
        f"log=Path({str(tmp_path / 'log')!r}))\n"
        "print('started', flush=True); time.sleep(600)"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert trainer.stdout is not None and trainer.stdout.readline() == b"started\n"
    processes = written_ids(tmp_path / "ids")
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.communicate()
    wait_until_gone(processes)


def test_what_a_step_takes_is_the_servers_while_it_samples() -> None:
    parts = {"weights": 8, "gradients": 4, "optimizer": 24, "activations": 10, "logits": 2}
    estimate = MemoryEstimate(**{name: size * GIB for name, size in parts.items()})
    gpu = {"weights": 8 * GIB, "free": 70 * GIB, "total": 80 * GIB}
    asleep = ("--gpu-memory-utilization", "0.550", "--enable-sleep-mode")
    assert part_of_gpu(estimate, False, **gpu) == Share(asleep, sleeps=True)
    assert part_of_gpu(estimate, True, **gpu).flags == ("--gpu-memory-utilization", "0.350")
    assert part_of_gpu(None, False, **gpu).flags[1] == "0.850"
    with pytest.raises(
        ConfigError, match=r"34.0 GiB free, training keeps 24.0 .* 8.0 for the weights.*lora: \{\}"
    ):
        part_of_gpu(estimate, False, **gpu | {"free": 34 * GIB})


def test_gpus_that_the_learner_leaves_are_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert other_gpus(None, devices=1) is None
    assert other_gpus(None, devices=2) == Share(environment={"CUDA_VISIBLE_DEVICES": "1"})
    assert other_gpus(None, devices=3, first=1) == Share(
        environment={"CUDA_VISIBLE_DEVICES": "0,2"}
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert other_gpus(2, devices=4) == Share(environment={"CUDA_VISIBLE_DEVICES": "6,7"})
    with pytest.raises(ConfigError, match=r"4 processes leave none of the 4 GPUs"):
        other_gpus(4, devices=4)
