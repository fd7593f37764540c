"""`agl runner` told to stop: what is at hand may end, for so long; the rest is handed back."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from agentlightning.server.app import create_app
from agentlightning.server.serve import HttpServer
from agentlightning.store.sql import SqlStore
from agentlightning.types import Attempt, RolloutConfig

pytestmark = pytest.mark.anyio

AGENT = """
import pathlib, time

def agent(task):
    print("begun", flush=True)
    pathlib.Path("begun").touch()
    time.sleep(task)
    return 1.0
"""


@pytest.mark.parametrize(
    ("takes", "drain", "isolation", "signals", "code", "status"),
    [
        (1.0, "20s", "none", 1, 0, "succeeded"),
        (1.0, "20s", "process", 1, 0, "succeeded"),
        (60.0, "0.2s", "none", 1, 130, "unresponsive"),
        (60.0, "0.2s", "process", 1, 130, "unresponsive"),
        (60.0, "20s", "process", 2, 130, "unresponsive"),
    ],
)
async def test_a_runner_told_to_stop_drains_for_so_long_and_hands_back_the_rest(
    store: SqlStore, tmp_path: Path, takes: float, drain: str, isolation: str, signals: int, code: int, status: str
) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    server = HttpServer(create_app(store), port=0)
    await server.start()
    config = RolloutConfig(max_attempts=2, retry_condition=("unresponsive",))
    rollouts = [await store.enqueue_rollout(takes, config=config) for _ in range(2)]
    options = ("--server", server.url, "--concurrency", "1", "--isolation", isolation, "--drain", drain)
    command = (
        sys.executable,
        "-c",
        "from agentlightning.cli.main import main; main()",
        "runner",
        "agent.py:agent",
        *options,
    )
    pipe = asyncio.subprocess.PIPE
    runner = await asyncio.create_subprocess_exec(*command, cwd=tmp_path, stderr=pipe)
    async with asyncio.timeout(60):
        while not (tmp_path / "begun").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert runner.stderr is not None
    await runner.stderr.readline()  # who it is
    for _ in range(signals):
        runner.send_signal(signal.SIGTERM)
        assert b"leasing nothing more" in await runner.stderr.readline() or signals > 1
    said = (await asyncio.wait_for(runner.communicate(), 60))[1]
    assert runner.returncode == code, said
    attempts: list[Attempt] = [one for each in rollouts for one in await store.query_attempts(each.rollout_id)]
    assert [attempt.status for attempt in attempts] == [status]
    await server.stop()
