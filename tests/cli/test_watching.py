"""`agl runs --watch` and `agl rollouts tail`: what happens at the moment, on a real terminal and elsewhere."""

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


async def test_tail_shows_what_ended_before_and_what_ends_then(tmp_path: Path) -> None:
    store = await SqlStore.open("agentlightning.sqlite")
    for reward in (0.25, 0.5, 0.75):
        await add_rollout(store, f"before {reward}", reward)
    with on_a_terminal(tmp_path, "rollouts", "tail", "-n", "2") as terminal:
        await asyncio.to_thread(terminal.until, "before 0.75")
        assert "before 0.25" not in terminal.shown and terminal.shown.count("before") == 2
        await add_rollout(store, "and then", 1.0)
        await asyncio.to_thread(terminal.until, "and then")
        assert "reward 1 " in terminal.shown.splitlines()[-1]
        terminal.process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(terminal.end) == 130
    assert terminal.shown.count("before") == 2 and terminal.shown.count("and then") == 1
    await store.close()


async def test_tail_of_a_server_shows_only_what_was_asked_for(tmp_path: Path) -> None:
    store = await SqlStore.open(":memory:")
    await add_run(store, "mine")
    async with HttpServer(create_app(store)) as http:
        wanted = ("--run", "mine", "--mode", "train", "-n", "0", "--json")
        with on_a_terminal(tmp_path, "rollouts", "tail", "--server", http.url, *wanted) as terminal:
            for number in range(40):  # until it has begun to listen
                await add_rollout(store, "other", 0.0)
                await add_rollout(store, f"its {number}", 0.5, "mine")
                if terminal.shown:
                    break
                with_patience = asyncio.to_thread(terminal.until, "its", 0.5)
                await asyncio.gather(with_patience, return_exceptions=True)
            assert '"reward":0.5' in terminal.shown and "other" not in terminal.shown
    await store.close()
