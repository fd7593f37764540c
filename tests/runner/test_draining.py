"""`agl runner` told to stop: what is at hand may end, for so long; the rest is handed back."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agentlightning.server.app import create_app
from agentlightning.server.serve import HttpServer
from agentlightning.store.sql import SqlStore
from agentlightning.types import RolloutConfig
from tests.runner.world import AGAIN, enqueue, statuses, until

pytestmark = pytest.mark.anyio

AGENT = """
import asyncio, os, pathlib, time

def agent(task):
    pathlib.Path("begun").touch()
    time.sleep(task)
    return 1.0


async def deaf(task):
    pathlib.Path("begun").touch()
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            pass


async def blocks(task):
    pathlib.Path("begun").touch()
    time.sleep(600)


async def threaded(task):
    pathlib.Path("begun").touch()
    await asyncio.to_thread(time.sleep, 600)
"""


@asynccontextmanager
async def runner_of(
    store: SqlStore, folder: Path, agent: str, *options: str
) -> AsyncIterator[Process]:
    """`agl runner` with one of the agents above, in a process of its own, and the server it leases
    from."""
    (folder / "agent.py").write_text(AGENT)
    main = "from agentlightning.cli.main import main; main()"
    async with HttpServer(create_app(store), port=0) as server:
        command = (
            sys.executable,
            "-c",
            main,
            "runner",
            f"agent.py:{agent}",
            "--server",
            server.url,
            *options,
        )
        yield await asyncio.create_subprocess_exec(
            *command, cwd=folder, stderr=asyncio.subprocess.PIPE
        )


async def begun(folder: Path) -> None:
    await until((folder / "begun").exists)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("takes", "drain", "isolation", "signals", "code", "status"),
    [
        (1.0, "20s", "none", 1, 0, "succeeded"),
        (1.0, "20s", "process", 1, 0, "succeeded"),
        (60.0, "0.2s", "process", 1, 130, "unresponsive"),
        (60.0, "20s", "process", 2, 130, "unresponsive"),
    ],
)
async def test_a_runner_told_to_stop_drains_for_so_long_and_hands_back_the_rest(
    store: SqlStore,
    tmp_path: Path,
    takes: float,
    drain: str,
    isolation: str,
    signals: int,
    code: int,
    status: str,
) -> None:
    rollouts = await enqueue(store, takes, takes, config=AGAIN)
    options = ("--concurrency", "1", "--isolation", isolation, "--drain", drain)
    async with runner_of(store, tmp_path, "agent", *options) as runner:
        await begun(tmp_path)
        assert runner.stderr is not None
        await runner.stderr.readline()  # who it is
        for _ in range(signals):
            runner.send_signal(signal.SIGTERM)
            assert b"no more leases" in await runner.stderr.readline() or signals > 1
        said = (await asyncio.wait_for(runner.communicate(), 60))[1]
    assert runner.returncode == code, said
    assert sorted(await statuses(store, *rollouts)) == [[], [status]]


@pytest.mark.slow
async def test_a_thread_that_goes_on_after_its_rollout_does_not_keep_a_runner_from_its_end(
    store: SqlStore, tmp_path: Path
) -> None:
    rollout = await store.enqueue_rollout(1.0, config=RolloutConfig(timeout_seconds=0.2))
    async with runner_of(store, tmp_path, "threaded", "--isolation", "none") as runner:
        assert [
            one.status for one in await store.wait_for_rollouts([rollout.rollout_id], timeout=60)
        ] == ["failed"]
        runner.send_signal(signal.SIGTERM)
        said = (await asyncio.wait_for(runner.communicate(), 20))[1]
    assert runner.returncode == 0, said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "says"), [("deaf", "abandoned"), ("blocks", "does not let the process end")]
)
async def test_no_agent_keeps_a_runner_from_its_end(
    store: SqlStore, tmp_path: Path, agent: str, says: str
) -> None:
    await store.enqueue_rollout(1.0)
    async with runner_of(store, tmp_path, agent, "--isolation", "none", "--drain", "0s") as runner:
        await begun(tmp_path)
        since = asyncio.get_running_loop().time()
        runner.send_signal(signal.SIGTERM)
        said = (await asyncio.wait_for(runner.communicate(), 60))[1].decode()
    assert (runner.returncode, says in said) == (130, True), said
    assert asyncio.get_running_loop().time() - since < 15
