"""A store that another process owns can be read, and only read."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentlightning.errors import ConflictError
from agentlightning.store.reader import StoreReader
from agentlightning.store.sql import SqlStore
from agentlightning.types import Metrics

pytestmark = pytest.mark.anyio


async def test_a_reader_keeps_nobody_out_and_sees_what_is_new(tmp_path: Path) -> None:
    await (await SqlStore.open(tmp_path / "store.db")).close()
    reader = await StoreReader.open(tmp_path / "store.db")
    owner = await SqlStore.open(tmp_path / "store.db")
    run = await owner.start_run("grpo", {})
    await owner.add_metrics(Metrics(run_id=run.run_id, step=1, time=1.0, values={"reward": 0.5}))
    leased = await owner.start_rollout("x")
    assert (await reader.query_metrics(run.run_id))[0].values == {"reward": 0.5}
    assert await reader.get_rollout_by_id("nobody") is None
    with pytest.raises(ConflictError, match="reading only"):
        await reader.enqueue_rollout("x")
    assert (await reader.get_latest_attempt(leased.rollout_id)) == leased.attempt

    waiting = asyncio.create_task(reader.finished_after(timeout=30))
    await owner.update_attempt(leased.rollout_id, leased.attempt.attempt_id, status="succeeded")
    assert [rollout.rollout_id for rollout in (await waiting).rollouts] == [leased.rollout_id]
    assert (await reader.finished_after((await waiting).cursor)).rollouts == ()
    await owner.close()
    await reader.close()


TRAINS = """
import asyncio, sys
from agentlightning.store.sql import SqlStore
async def work():
    store = await SqlStore.open(sys.argv[1])
    await store.update_run((await store.start_run("grpo", {}, run_id="ended")).run_id, "succeeded")
    await store.start_run("grpo", {}, run_id="open")
    print("training", flush=True)
    await asyncio.sleep(600)
asyncio.run(work())
"""


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
async def test_a_run_whose_process_was_killed_is_stopped_until_it_is_resumed(
    database: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    sqlite = database == "sqlite"
    address = (
        str(tmp_path / "store.sqlite") if sqlite else request.getfixturevalue("postgres_database")
    )

    async def statuses() -> dict[str, str]:
        return {run.run_id: run.status for run in await reader.query_runs()}

    program = [sys.executable, "-c", TRAINS, address]
    trainer = await asyncio.create_subprocess_exec(*program, stdout=subprocess.PIPE)
    assert trainer.stdout is not None and await trainer.stdout.readline() == b"training\n"
    reader = await StoreReader.open(address)
    assert await statuses() == {"ended": "succeeded", "open": "running"}
    trainer.kill()
    await trainer.wait()
    async with asyncio.timeout(30):
        while (await statuses())["open"] == "running":  # PostgreSQL hears of it a moment later
            await asyncio.to_thread(time.sleep, 0.05)
    assert await statuses() == {"ended": "succeeded", "open": "stopped"}
    resumed = await SqlStore.open(address)
    assert await statuses() == {"ended": "succeeded", "open": "running"}
    await resumed.close()
    await reader.close()


async def test_asking_who_has_a_store_keeps_nobody_from_taking_it(tmp_path: Path) -> None:
    await (await SqlStore.open(tmp_path / "store.sqlite")).close()
    reader = await StoreReader.open(tmp_path / "store.sqlite")
    done = asyncio.Event()

    async def ask() -> None:
        while not done.is_set():
            await reader.query_runs()

    asking = [asyncio.create_task(ask()) for _ in range(4)]
    for _ in range(50):
        await (await SqlStore.open(tmp_path / "store.sqlite")).close()
    done.set()
    await asyncio.gather(*asking)
    await reader.close()
