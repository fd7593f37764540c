"""Stores with something in them, and commands as processes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentlightning.store.base import LightningStore
from agentlightning.store.sql import SqlStore
from agentlightning.tracing.context import AttemptTracer, bind
from agentlightning.tracing.emit import emit_reward
from agentlightning.types import EnqueueRolloutRequest, Metrics

ROOT = Path(__file__).parents[2]
HOSTILE = "\x1b]0;owned\x07\x1b[31m\x9b31m[bold]\u202e<script>alert(1)</script>"


async def add_run(
    store: LightningStore, run_id: str, *, steps: int = 10, rise: float = 0.05
) -> None:
    """A run that began with a reward of 0.2 and gets better by `rise` a step."""
    run = await store.start_run(
        "grpo", {"seed": 3, "command": ["agl", "train"], "commit": "c0ffee"}, run_id=run_id
    )
    for step in range(steps + 1):
        values = {"val_reward": 0.2 + step * rise} if step in (0, steps) else {}
        if step:
            values |= {
                "reward": 0.2 + step * rise,
                "loss": -0.01 * step,
                "rollouts": 8.0,
                "sampled_tokens": 100.0,
            }
        await store.add_metrics(
            Metrics(run_id=run_id, step=step, time=run.start_time + 2 * step, values=values)
        )


async def add_rollout(
    store: LightningStore, given: object, reward: float, run_id: str | None = None
) -> str:
    """A rollout of a worker that has ended well; its id."""
    [queued] = await store.enqueue_many_rollouts(
        [EnqueueRolloutRequest(input=given, run_id=run_id)]
    )
    [leased] = await store.dequeue_many_rollouts(worker_id="worker-1")
    tracer = AttemptTracer(leased.rollout_id, leased.attempt.attempt_id)
    with bind(tracer):
        emit_reward(reward)
    await store.add_many_spans(tracer.drain())
    await store.update_attempt(leased.rollout_id, leased.attempt.attempt_id, status="succeeded")
    return queued.rollout_id


def make_runs(*run_ids: str, rise: float = 0.05) -> None:
    """Directories below runs/ with a run each."""

    async def work() -> None:
        for index, run_id in enumerate(run_ids, start=1):
            store = await SqlStore.open(f"runs/{run_id}-dir/store.sqlite")
            await add_run(store, run_id, rise=rise * index)
            await store.close()

    asyncio.run(work())


def start(
    folder: Path, *arguments: object, stdin: int | None = None, **environment: str
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "agentlightning.cli.main", *map(str, arguments)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    return subprocess.Popen(
        command,
        cwd=folder,
        env=variables,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=240)
    assert process.returncode == code, err
    assert "Traceback" not in err
    return out, err


@contextmanager
def staying_up(
    folder: Path, *arguments: object, **environment: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A command that serves: the process and the URL it announces. Ends by SIGTERM, and must end
    well."""
    process = start(folder, *arguments, **environment)
    try:
        assert process.stderr is not None
        greeting = process.stderr.readline()
        found = re.search(r"http://[\d.]+:\d+", greeting)
        assert found, greeting + process.stderr.read()
        yield process, found[0]
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=240)
        assert process.returncode == 0
        assert "Traceback" not in err and "Unclosed" not in err
    finally:
        process.kill()
        process.wait()


def shown_by(
    main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs one command; its exit code, stdout and stderr."""

    def command(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return command
