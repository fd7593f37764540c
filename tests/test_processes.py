"""Runs as a user starts them, in processes of their own: killed, interrupted, or spread over
three."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl_package
from agentlightning.store.client import LightningStoreClient
from tests import agents
from tests.algorithm.test_resume import Interrupting
from tests.cli.world import start
from tests.postgres import PostgresServer
from tests.test_trainer import TASKS, algorithm, policy, trainer

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and a dataset."""
    folder = tmp_path_factory.mktemp("world")
    policy().save(folder / "model")
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    return folder


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def agl(tmp_path: Path) -> Iterator[Start]:
    """Starts `agl …` and kills it at the end if it still runs."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: object) -> subprocess.Popen[str]:
        started.append(start(tmp_path, *arguments, PYTHONUNBUFFERED="1"))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def wait(process: subprocess.Popen[str], until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not until():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)


BLOCKS = """
import pathlib, time

async def agent(task) -> float:
    with pathlib.Path("begun").open("a") as file:
        file.write("once ")
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["agent", "model"])
def test_interrupts_end_a_run_whose_agent_blocks_the_event_loop_or_that_still_makes_its_model(
    world: Path, agl: Start, tmp_path: Path, where: str
) -> None:
    (tmp_path / "agent.py").write_text(
        f"{BLOCKS}\n\ndef model(seed):\n    open('begun', 'w')\n    time.sleep(600)\n"
    )
    data = (
        "--train-dataset",
        world / "tasks.jsonl",
        "--val-dataset",
        world / "tasks.jsonl",
        "--isolation",
        "none",
    )
    own = ("--algorithm", "baseline") if where == "agent" else ("--model", "agent.py:model")
    process = agl("train", "--agent", "agent.py:agent", *own, *data)
    wait(process, (tmp_path / "begun").exists)
    process.send_signal(signal.SIGINT)
    if where == "agent":
        time.sleep(1)
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130, out + err
    assert "Traceback" not in err
    assert (tmp_path / "begun").read_text() == ("once " if where == "agent" else "")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start_server(agl: Start, store: Path) -> str:
    server = agl("server", "--port", "0", "--store", store)
    assert server.stderr is not None
    greeting = server.stderr.readline()
    found = re.search(r"http://127\.0\.0\.1:\d+", greeting)
    assert found, greeting
    return found[0]


@pytest.mark.slow
def test_what_failed_while_the_trainer_was_away_does_not_count(
    world: Path, agl: Start, tmp_path: Path
) -> None:
    url = start_server(agl, tmp_path / "store.sqlite")
    settings: dict[str, Any] = {"model": world / "model", "server": url, "n_runners": 1}
    settings["algorithm"] = algorithm(steps=1)
    trainer(tmp_path, **settings).fit(Interrupting("train", 6), TASKS, TASKS[:2])

    async def fail_one() -> None:
        store = LightningStoreClient(url)
        leased = await store.dequeue_rollout()
        assert leased is not None
        await store.update_attempt(leased.rollout_id, leased.attempt.attempt_id, status="failed")
        await store.close()

    asyncio.run(fail_one())
    result = trainer(tmp_path, **settings).fit(agents.vowels, TASKS, TASKS[:2], resume=True)
    assert [one.values["val_unrewarded"] for one in result.metrics] == [0, 0]
    assert result.metrics[-1].values["unrewarded"] == 0


class Restarting(agl_package.GRPO):
    """Kills the server after the second step, and starts it again some seconds later."""

    def __init__(self, restart: Callable[[], None], **settings: Any) -> None:
        super().__init__(**settings)
        self._restart = restart
        self._steps = 0

    def step_done(self, groups: Any) -> dict[str, float]:
        self._steps += 1
        if self._steps == 2:
            self._restart()
        return super().step_done(groups)


@pytest.mark.slow
def test_a_server_killed_under_a_training_costs_no_rollout(
    world: Path, agl: Start, tmp_path: Path
) -> None:
    server_of = ("server", "--store", tmp_path / "store.sqlite", "--port", port := free_port())
    servers = [agl(*server_of)]
    url = f"http://127.0.0.1:{port}"
    agl("runner", f"{ROOT / 'tests' / 'agents.py'}:slow_vowels", "--server", url)

    def restart() -> None:
        servers[-1].kill()
        threading.Timer(2.0, lambda: servers.append(agl(*server_of))).start()

    check_nothing_is_lost(tmp_path, restart, model=world / "model", server=url, n_runners=0)


@pytest.mark.slow
def test_a_database_killed_under_a_training_costs_no_rollout(
    world: Path, postgres_server: PostgresServer, tmp_path: Path
) -> None:
    def restart() -> None:
        postgres_server.kill()
        # longer than a connection is tried again
        threading.Timer(12.0, postgres_server.start).start()

    with postgres_server.new_database() as url:
        check_nothing_is_lost(tmp_path, restart, model=world / "model", store=url)


def check_nothing_is_lost(tmp_path: Path, restart: Callable[[], None], **settings: Any) -> None:
    chosen = Restarting(
        restart, steps=5, tasks_per_step=3, group_size=4, max_tokens=6, temperature=2.0
    )
    chosen.max_staleness = 1  # rollouts of the third step run at the end of the second
    result = trainer(tmp_path, algorithm=chosen, **settings).fit(agents.slow_vowels, TASKS)
    assert result.stopped_because == "all steps done"
    assert [one.values["unrewarded"] for one in result.metrics] == [0] * 5


@pytest.mark.slow
@pytest.mark.parametrize("with_server", [True, False], ids=["at a server", "at the trainer's port"])
def test_trainer_and_runner_that_meet_somewhere_learn_the_same(
    world: Path, agl: Start, tmp_path: Path, with_server: bool
) -> None:
    port = free_port()
    url = (
        start_server(agl, tmp_path / "store.sqlite") if with_server else f"http://127.0.0.1:{port}"
    )
    agl("runner", f"{ROOT / 'tests' / 'agents.py'}:vowels", "--server", url)
    settings = {"model": world / "model", "seed": 3, "deterministic": True}
    place = {"server": url} if with_server else {"port": port}
    apart = trainer(tmp_path, run_dir=tmp_path / "apart", n_runners=0, **place, **settings)
    together = trainer(tmp_path, run_dir=tmp_path / "together", **settings)
    runs = [each.fit(agents.vowels, TASKS, TASKS[:2]).metrics for each in (apart, together)]
    for one, other in zip(*runs, strict=True):
        for name in ("reward", "val_reward", "calls", "sampled_tokens"):
            assert one.values.get(name) == pytest.approx(other.values.get(name)), (one.step, name)
