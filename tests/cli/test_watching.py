"""`agl runs --watch` and `agl rollouts --watch`: what happens at the moment, on a real terminal."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from agentlightning.server.app import create_app
from agentlightning.server.serve import HttpServer
from agentlightning.store.sql import SqlStore
from tests.cli.world import add_rollout, add_run, on_a_terminal

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


async def test_runs_are_watched_on_a_terminal(tmp_path: Path) -> None:
    store = await SqlStore.open("runs/mine/store.sqlite")
    await add_run(store, "mine", steps=3)
    with on_a_terminal(tmp_path, "runs", "--watch", "0.1") as terminal:
        await asyncio.to_thread(terminal.until, "mine")
        await add_run(store, "yours")
        await asyncio.to_thread(terminal.until, "yours")
        terminal.process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(terminal.end) == 130
    await store.close()


@pytest.mark.slow
async def test_watching_goes_on_while_its_server_is_away(tmp_path: Path) -> None:
    store = await SqlStore.open(":memory:")
    await add_run(store, "mine")
    http = HttpServer(create_app(store))
    await http.start()
    with on_a_terminal(tmp_path, "runs", "--server", http.url, "--watch", "0.1") as terminal:
        await asyncio.to_thread(terminal.until, "mine")
        await http.stop()
        await asyncio.to_thread(terminal.until, "cannot be reached")
        terminal.process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(terminal.end) == 130
    await store.close()


async def test_rollouts_are_watched_and_the_former_name_means_it(tmp_path: Path) -> None:
    store = await SqlStore.open("agentlightning.sqlite")
    await add_rollout(store, "before", 0.25)
    with on_a_terminal(tmp_path, "rollouts", "tail") as terminal:
        await asyncio.to_thread(terminal.until, "before")
        await add_rollout(store, "and then", 1.0)
        await asyncio.to_thread(terminal.until, "and then")
        terminal.process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(terminal.end) == 130
    await store.close()
