"""`agl top` and `agl rollouts tail`: what happens at the moment, on a real terminal and elsewhere."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest

from agentlightning.cli.main import run
from agentlightning.gateway.app import Gateway
from agentlightning.gateway.backends.http import HttpBackend
from agentlightning.gateway.models import ModelEntry, ModelTable
from agentlightning.server.app import create_app
from agentlightning.server.serve import HttpServer
from agentlightning.store.sql import SqlStore
from tests.cli.world import add_rollout, add_run, on_a_terminal

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


async def test_top_follows_a_job_on_a_terminal_until_q(tmp_path: Path) -> None:
    store = await SqlStore.open("runs/mine/store.sqlite")
    await add_run(store, "mine", steps=3)
    with on_a_terminal(tmp_path, "top", "--interval", "0.1") as terminal:
        await asyncio.to_thread(terminal.until, "no rollouts")
        await asyncio.to_thread(terminal.until, "mine")
        await add_rollout(store, "x", 1.0)
        await asyncio.to_thread(terminal.until, "1 succeeded")
        await asyncio.to_thread(terminal.until, "worker-1")
        terminal.type("q")
        assert await asyncio.to_thread(terminal.end) == 0
    assert terminal.shown.endswith("\x1b[?25h\x1b[?1049l")  # the cursor, and what was on the screen before
    await store.close()


async def test_top_shows_the_servers_behind_a_gateway(capsys: pytest.CaptureFixture[str]) -> None:
    store = await SqlStore.open(":memory:")
    entry = ModelEntry("policy", HttpBackend("http://127.0.0.1:1/v1", kind="vllm"), trainable=True)
    gateway = Gateway(ModelTable([entry]), store)
    async with HttpServer(create_app(store, gateway=gateway, admin_key="an-admin-key")) as http:
        asked = ("top", "--server", http.url, "--key", "an-admin-key")
        assert await asyncio.to_thread(run, [*asked, "--json"]) == 0
        [backend] = json.loads(capsys.readouterr().out)["backends"]
        assert (backend["model"], backend["base_url"], backend["healthy"]) == ("policy", "http://127.0.0.1:1/v1", False)
        assert await asyncio.to_thread(run, asked) == 0
        shown = capsys.readouterr().out
        assert "Backends" in shown and "ejected" in shown and "\x1b" not in shown
    await gateway.close()
    await store.close()


@pytest.mark.slow
async def test_top_stays_while_its_server_is_away(tmp_path: Path) -> None:
    store = await SqlStore.open(":memory:")
    http = HttpServer(create_app(store))
    await http.start()
    with on_a_terminal(tmp_path, "top", "--server", http.url, "--interval", "0.1") as terminal:
        await asyncio.to_thread(terminal.until, "no rollouts")
        await http.stop()
        await asyncio.to_thread(terminal.until, "\x1b[31m")
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
