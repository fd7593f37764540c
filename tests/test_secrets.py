"""A secret in what an agent raises, or a program writes, is nowhere afterwards: not in the store
and its log, not in copies, exports and answers, and not on a terminal."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from msgspec.structs import replace

from agentlightning.store.base import LightningStore
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.sql import SqlStore
from agentlightning.types import Attempt, EnqueueRolloutRequest
from tests.cli.world import finish, start, staying_up

KEY = "sk-proj-h3Yp0q9Vb1K2mZr7T5wXcDfG"
TOKEN = "8kd0aa93jJf0s9a8"
PASSWORD = "geheim1907"
SECRETS = (KEY, TOKEN, PASSWORD)
# Which the agents read where nothing looks, so that whatever is found later was written by us.
GIVEN = {"A": KEY, "B": f"Bearer {TOKEN}", "C": f"postgresql://me:{PASSWORD}@db/x"}

AGENTS = """
import os, sys
import agentlightning as agl

A, B, C = (os.environ[name] for name in "ABC")

@agl.rollout
def raises(task):
    try:
        raise ConnectionError(f"{C} is away")
    except ConnectionError as error:
        failure = ValueError(f"no access with {A}")
        failure.add_note(f"asked with {B}")
        raise failure from error

@agl.rollout
async def raises_async(task):
    raises.task = None
    raise LookupError(f"{A} and {B} at {C} " + "x" * 40_000 + f" {A}")

program = agl.command([sys.executable, "program.py"])
"""
PROGRAM = """
import os, sys

sys.stderr.write(os.environ["A"] + "\\n" + os.environ["B"] + "\\n" + os.environ["C"] + "\\n")
sys.exit(f"no access with {os.environ['A']}" + "x" * 1990)
"""
FAILING = [("raises", "none"), ("raises", "process"), ("raises_async", "none"), ("program", "none")]


def written(folder: Path) -> None:
    (folder / "agents.py").write_text(AGENTS)
    (folder / "program.py").write_text(PROGRAM)


def found_in(data: bytes) -> list[str]:
    """The secrets in some bytes, and the halves of them that a cut may have left."""
    text = data.decode(errors="replace")
    halves = [
        half
        for secret in SECRETS
        for half in (secret[: len(secret) // 2], secret[-len(secret) // 2 :])
    ]
    return [half for half in halves if half in text]


def leaks(folder: Path) -> dict[str, list[str]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.name: found for path in files if (found := found_in(path.read_bytes()))}


async def failed(store: LightningStore) -> tuple[Attempt, str]:
    """The latest attempt of the one rollout that has just failed, and the reason in the rollout's
    row."""
    [*_, rollout] = await store.query_rollouts()
    assert rollout.status == "failed"
    attempt = await store.get_latest_attempt(rollout.rollout_id)
    assert attempt is not None and rollout.error is not None
    return attempt, rollout.error


@pytest.mark.slow
@pytest.mark.parametrize("capture", ["full", "tokens", "off"])
def test_no_secret_of_a_failure_is_written_by_a_server_or_a_runner(
    tmp_path: Path, capture: str
) -> None:
    written(tmp_path)
    serves = (
        "server",
        "--store",
        "store.sqlite",
        "--port",
        "0",
        "--capture",
        capture,
        "--log-format",
        "json",
    )
    shown: list[str] = []
    with staying_up(tmp_path, *serves) as (server, url):
        for name, isolation in FAILING:
            asyncio.run(_enqueue(url))
            options = ("--isolation", isolation, "--idle", "1s", "-v")
            runner = start(
                tmp_path, "runner", f"agents.py:{name}", "--server", url, *options, **GIVEN
            )
            out, err = runner.communicate(timeout=240)
            assert runner.returncode == 0, err
            assert "failed: " in err
            shown += [out, err]
            attempt, error = asyncio.run(_failed_at(url))
            assert attempt.metadata["reason"] == error
            kind = {"raises": "ValueError", "raises_async": "LookupError"}.get(
                name, "CommandFailedError"
            )
            if capture == "full":
                assert error.startswith(f"{kind}: ") and "[redacted]" in error
            else:
                assert error == kind
            with urllib.request.urlopen(
                f"{url}/api/v1/dashboard/rollouts/{attempt.rollout_id}"
            ) as page:
                shown.append(page.read().decode())
            shown += finish(
                start(tmp_path, "rollouts", "show", attempt.rollout_id, "--server", url)
            )
        for command in (
            ("store", "backup", "copy.sqlite"),
            ("export", "all.jsonl", "--format", "rollouts"),
        ):
            shown += finish(start(tmp_path, *command, "--server", url))
        assert (tmp_path / "store.sqlite-wal").stat().st_size
        assert not leaks(tmp_path)
        assert server.stderr is not None
        server.terminate()
        shown.append(server.stderr.read())
    assert not found_in("\n".join(shown).encode())


async def _enqueue(url: str) -> None:
    store = LightningStoreClient(url)
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input="a task", mode="test")])
    await store.close()


async def _failed_at(url: str) -> tuple[Attempt, str]:
    store = LightningStoreClient(url)
    try:
        return await failed(store)
    finally:
        await store.close()


@pytest.mark.slow
def test_no_secret_of_a_failure_is_written_by_a_run_or_on_its_terminal(tmp_path: Path) -> None:
    written(tmp_path)
    for number, (name, isolation) in enumerate(FAILING):
        script = (
            "import agentlightning as agl, agents\n"
            "from agentlightning.errors import AgentLightningError\n"
            f"trainer = agl.Trainer(algorithm=agl.Baseline(), run_dir='run-{number}', "
            f"isolation='{isolation}')\n"
            "try:\n"
            f"    trainer.fit(agents.{name}, val_dataset=['a task', 'another'])\n"
            "except AgentLightningError as error:\n"
            "    print('error:', error)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=tmp_path,
            env={**os.environ, **GIVEN, "PYTHONPATH": f"{Path(__file__).parents[1]}:{tmp_path}"},
            capture_output=True,
            check=False,
            timeout=240,
        )
        assert b"[redacted]" in done.stdout + done.stderr, done.stderr
        assert not found_in(done.stdout + done.stderr)
        store = tmp_path / f"run-{number}" / "store.sqlite"
        assert b"[redacted]" in store.read_bytes()
    assert not leaks(tmp_path)


REASON = f"ValueError: no access with {KEY} to {GIVEN['C']}"


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["file", "postgres"])
async def test_a_reason_is_redacted_whoever_gives_it(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """A client of another language, and an import of what an older version wrote."""
    address = (
        request.getfixturevalue("postgres_database")
        if kind == "postgres"
        else tmp_path / "store.sqlite"
    )
    store = await SqlStore.open(address)
    try:
        begun = await store.start_rollout("a task")
        ids = begun.rollout_id, begun.attempt.attempt_id
        await store.update_attempt(*ids, status="failed", metadata={"reason": REASON, "n": 1})
        attempt, error = await failed(store)
        clean = "ValueError: no access with [redacted] to postgresql://me:[redacted]@db/x"
        assert (error, attempt.metadata) == (clean, {"reason": clean, "n": 1})
        run = await store.start_run("grpo", {"command": ["agl"]})
        ended = await store.update_run(run.run_id, "failed", merge={"reason": REASON})
        assert ended.manifest["reason"] == clean

        rollout = await store.get_rollout_by_id(begun.rollout_id)
        assert rollout is not None
        other = replace(rollout, rollout_id="ro-2")
        old = {"reason": REASON}
        theirs = replace(attempt, rollout_id="ro-2", attempt_id="at-2", metadata=old)
        assert await store.import_rollout(other, [theirs], [])
        imported = await store.get_rollout_by_id("ro-2")
        assert imported is not None and imported.error == clean
        latest = await store.get_latest_attempt("ro-2")
        assert latest is not None and latest.metadata == {"reason": clean}
    finally:
        await store.close()
    assert not leaks(tmp_path)
