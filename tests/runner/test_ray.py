"""`agl runner --ray N` with a real Ray on this machine: it grows, shrinks, replaces what died and
cleans up."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from agentlightning.server.app import create_app
from agentlightning.server.serve import HttpServer
from agentlightning.store.sql import SqlStore
from agentlightning.types import Rollout, RolloutConfig
from tests.frameworks.world import bin_of
from tests.runner.world import enqueue, until

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif("AGL_ENGINES" not in os.environ, reason="`make engines` runs these"),
]

KEY = "an admin's key"
AGAIN = RolloutConfig(max_attempts=3, retry_condition=("unresponsive",))
AGENT = """
import time

def agent(task):
    time.sleep(task)
    return 1.0
"""


class RunningPool:
    """A pool in a process of its own, with what it has said."""

    def __init__(self, process: Process, url: str) -> None:
        self.process, self._url = process, url
        self.said = ""

    async def read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            self.said += line.decode()
            print(line.decode(), end="", flush=True)

    def runners(self) -> list[int]:
        """The processes of its runners."""
        found: list[int] = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if (
                    b"runner" in words
                    and b"-c" in words
                    and f"--server={self._url}".encode() in words
                ):
                    found.append(int(entry.name))
        return found

    async def until_runners(self, number: int) -> list[int]:
        await until(lambda: len(self.runners()) == number)
        return self.runners()

    async def interrupted(self) -> int:
        """Ctrl-C before a terminal reaches the whole group of processes. The exit code."""
        os.killpg(self.process.pid, signal.SIGINT)
        return await asyncio.wait_for(self.process.wait(), 60)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@asynccontextmanager
async def pool_of(
    store: SqlStore, folder: Path, *options: str, agent: str = "agent.py:agent"
) -> AsyncGenerator[RunningPool]:
    (folder / "agent.py").write_text(AGENT)
    programs = bin_of("ray")
    async with HttpServer(create_app(store, admin_key=KEY), port=0) as server:
        process = await asyncio.create_subprocess_exec(
            *(
                programs / "agl",
                "runner",
                agent,
                "--server",
                server.url,
                "--isolation",
                "none",
                *options,
            ),
            cwd=folder,
            env={
                **os.environ,
                "AGL_KEY": KEY,
                "RAY_ADDRESS": "local",
                "PATH": f"{programs}:{os.environ['PATH']}",
            },
            stdout=PIPE,
            stderr=STDOUT,
            start_new_session=True,
        )
        pool = RunningPool(process, server.url)
        reading = asyncio.create_task(pool.read())
        try:
            yield pool
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            reading.cancel()  # Ray's own processes hold the pipe a little longer


async def until_at_hand(store: SqlStore, number: int) -> None:
    async def found() -> bool:
        return len(await store.query_rollouts(status_in=["preparing", "running"])) >= number

    await until(found)


async def finished(store: SqlStore, ids: list[str]) -> list[Rollout]:
    rollouts = await store.wait_for_rollouts(ids, timeout=90)
    assert [rollout.status for rollout in rollouts] == ["succeeded"] * len(ids)
    return rollouts


async def test_it_grows_with_the_queue_and_shrinks_to_none(
    brief_store: SqlStore, tmp_path: Path
) -> None:
    ids = await enqueue(brief_store, *[0.5] * 6, config=AGAIN)
    async with pool_of(
        brief_store, tmp_path, "--ray", "2", "--concurrency", "1", "--idle", "1s"
    ) as pool:
        await finished(brief_store, ids)
        attempts = [one for each in ids for one in await brief_store.query_attempts(each)]
        assert len(attempts) == 6 and len({one.worker_id for one in attempts}) == 2
        await pool.until_runners(0)
        await finished(brief_store, await enqueue(brief_store, *[0.1] * 1, config=AGAIN))
        assert await pool.interrupted() == 0
    assert "error" not in pool.said.lower()


@pytest.mark.parametrize("whole_machine", [False, True])
async def test_an_actor_that_is_killed_is_replaced_and_no_rollout_is_lost(
    brief_store: SqlStore, tmp_path: Path, whole_machine: bool
) -> None:
    ids = await enqueue(brief_store, *[3.0] * 4, config=AGAIN)
    async with pool_of(
        brief_store, tmp_path, "--ray", "2", "--concurrency", "1", "--idle", "1s"
    ) as pool:
        victim = (await pool.until_runners(2))[0]
        await until_at_hand(brief_store, 1)
        os.kill(parent_of(victim), signal.SIGKILL)  # its keeper
        if whole_machine:
            os.kill(victim, signal.SIGKILL)
        await until(lambda: "failed: " in pool.said)
        await finished(brief_store, ids)
        await pool.until_runners(0)
        assert await pool.interrupted() == 0


async def test_ctrl_c_lets_rollouts_at_hand_end_and_leaves_nothing_running(
    brief_store: SqlStore, tmp_path: Path
) -> None:
    ids = await enqueue(brief_store, *[3.0] * 3, config=AGAIN)
    async with pool_of(brief_store, tmp_path, "--ray", "2", "--concurrency", "1") as pool:
        await until_at_hand(brief_store, 2)
        assert await pool.interrupted() == 0
        assert pool.runners() == []
    ended = await brief_store.query_rollouts(rollout_id_in=ids)
    assert sorted(one.status for one in ended) == ["queuing", "succeeded", "succeeded"]
