"""Servers that die while they sample for a run: `kill -9` in an update and between."""

from __future__ import annotations

import asyncio
import itertools
import socket
import sqlite3
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import BackendError
from agentlightning.gateway.backend import Sampling
from agentlightning.learner.base import Weights
from agentlightning.learner.pair_specs import SamplerSpec
from agentlightning.learner.policy import load_policy
from agentlightning.learner.remote import RemoteSampler
from agentlightning.learner.servers import StartedServer
from agentlightning.trainer import FitResult
from tests import agents
from tests.learner.engines import ROOT, save_model, server
from tests.test_trainer import TASKS, algorithm, trainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CALL, UPDATE = "/v1/chat/completions", "/collective_rpc"
ALONE = 60  # rollouts before the others wait for a server to be there again
revived, begun = threading.Event(), itertools.count()


@agl.rollout
async def patient(task: dict, llm: agl.LLM) -> float:
    if next(begun) > ALONE:
        await asyncio.to_thread(revived.wait)
    return await agents.vowels(task, llm)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", tied=True)


def started(directory: Path, dies: str) -> dict[str, Any]:
    """A sampler that the run starts, which dies as is said."""
    program = directory / "vllm"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.learner.vllm_standin "$@"\n')
    program.chmod(0o755)
    environment = {"PYTHONPATH": str(ROOT), "STANDIN_DIES": dies, "OMP_NUM_THREADS": "1"}
    return {"vllm": "start", "program": str(program), "environment": environment}


def fit(directory: Path, model: Path, sampler: Any, **changes: Any) -> FitResult:
    resume, agent = changes.pop("resume", False), changes.pop("agent", agents.slow_vowels)
    settings: dict[str, Any] = {"steps": 4, "temperature": 1.0, "checkpoint_every": 1} | changes
    return trainer(directory, model=model, sampler=sampler, algorithm=algorithm(**settings)).fit(
        agent, TASKS, resume=resume
    )


def check(result: FitResult) -> None:
    assert result.stopped_because == "all steps done"
    mismatch = [
        one.values["inference_mismatch"]
        for one in result.metrics
        if "inference_mismatch" in one.values
    ]
    assert all(one < 1e-3 for one in mismatch)
    with sqlite3.connect(result.directory / "store.sqlite") as store:
        assert store.execute("SELECT DISTINCT status FROM rollouts").fetchall() == [("succeeded",)]


@pytest.mark.parametrize("dies", [f"{CALL} 30", f"{UPDATE} 2"])
def test_a_run_whose_own_sampler_dies_ends_and_resumes(
    tmp_path: Path, model: Path, dies: str
) -> None:
    with pytest.raises(BackendError, match=r"vLLM has ended with exit code -9|has loaded version"):
        fit(tmp_path, model, started(tmp_path, dies))
    check(fit(tmp_path, model, started(tmp_path, ""), resume=True))


@pytest.mark.anyio
async def test_one_that_shares_a_gpu_sleeps_while_a_step_is_computed(
    tmp_path: Path, model: Path
) -> None:
    """And wakes up before it is given new weights."""
    sampling = started(tmp_path, "")
    log = tmp_path / "log"
    server = StartedServer(
        sampling["program"], str(model), [], environment=sampling["environment"], log=log
    )
    sampler = RemoteSampler(SamplerSpec(**sampling), load_policy(model), server, sleeps=True)
    try:
        await sampler.check(Sampling())
        async with sampler.exclusive():
            said = log.read_text()
            await sampler.publish(Weights(1, model))
        assert said.endswith("/sleep\n")
        update = [
            "/pause",
            "/collective_rpc",
            "/reset_prefix_cache",
            "/update_weight_version",
            "/resume",
        ]
        assert log.read_text().removeprefix(said).split() == ["/wake_up", *update]
        async with sampler.exclusive():
            pass
        assert log.read_text().endswith("/sleep\n/wake_up\n")
    finally:
        await sampler.close()
        server.stop()


@pytest.mark.parametrize("dies", [f"{CALL} 20", f"{UPDATE} 2"])
def test_of_two_the_other_goes_on_and_the_dead_one_is_taken_up_again(
    tmp_path: Path, model: Path, dies: str
) -> None:
    global begun
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as two,
    ):
        ports = [one.getsockname()[1], two.getsockname()[1]]
    with ExitStack() as stack:

        def serve(port: int, name: str, dies: str = "") -> tuple[str, subprocess.Popen[bytes]]:
            command = [
                sys.executable,
                "-m",
                "tests.learner.vllm_standin",
                "serve",
                model,
                "--port",
                str(port),
            ]
            environment = {"PYTHONPATH": str(ROOT), "STANDIN_DIES": dies, "OMP_NUM_THREADS": "1"}
            return stack.enter_context(server(command, port, environment, tmp_path / name))

        revived.clear()
        begun = itertools.count()
        (first, dying), (second, _) = serve(ports[0], "first", dies), serve(ports[1], "second")

        def revive() -> None:
            dying.wait()
            serve(ports[0], "revived")
            revived.set()

        reviving = threading.Thread(target=revive)
        reviving.start()
        check(fit(tmp_path, model, {"vllm": [first, second]}, agent=patient, steps=12))
        reviving.join(1)
        assert "/update_weight_version" in (tmp_path / "revived").read_text()
