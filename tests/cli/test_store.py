"""`agl store`, `keys` and `export` as a user types them: on a file, in PostgreSQL, and at a server
that is running."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from agentlightning.cli.main import run
from agentlightning.cli.options import Duration
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.sql import SqlStore
from agentlightning.types import Credential, Rollout
from tests.cli.world import shown_by, staying_up

KEY = "an admin's key"
DAY = 86400.0


def fill(address: object, *inputs: object, ago: float = 0.0) -> None:
    """Rollouts that ended some seconds ago."""

    async def work() -> None:
        store = await SqlStore.open(address, clock=lambda: time.time() - ago)
        for input in inputs:
            rollout = await store.start_rollout(input)
            await store.update_attempt(
                rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded"
            )
        await store.close()

    asyncio.run(work())


def stored(address: object) -> list[Rollout]:
    async def work() -> list[Rollout]:
        store = await SqlStore.open(address)
        found = await store.query_rollouts()
        await store.close()
        return found

    return asyncio.run(work())


def inputs(address: object) -> list[object]:
    return [rollout.input for rollout in stored(address)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
def agl(capsys: pytest.CaptureFixture[str]):
    return shown_by(run, capsys)


# --- durations ------------------------------------------------------------------------------------


def test_a_duration_is_a_number_and_a_unit() -> None:
    right = {"30d": 30 * DAY, "12h": 43200.0, "45m": 2700.0, "90s": 90.0, "1.5h": 5400.0}
    assert {text: Duration().convert(text, None, None) for text in right} == right
    for text in ("", "30", "d", "30 d", "-1d", "1w", "1d12h", "0s", "1e3s", "²d", "nan", "٣m"):
        with pytest.raises(
            click.BadParameter, match=r"no duration; write .* such as 30d or 12h|is zero"
        ):
            Duration().convert(text, None, None)


# --- which store ----------------------------------------------------------------------------------


def test_a_store_or_a_server_must_be_named_and_exist(agl, tmp_path: Path) -> None:
    for options, expected, said in (
        ([], 2, "choose the store"),
        (["--store", "x.db", "--server", "http://127.0.0.1:1"], 2, "choose the store"),
        (["--store", tmp_path / "typo.db"], 1, "there is no store at"),
        (["--store", tmp_path], 1, f"there is no store at {tmp_path}/store.sqlite"),
    ):
        code, _, err = agl("store", "check", *options)
        assert code == expected and said in err
    assert list(tmp_path.iterdir()) == []


# --- deleting -------------------------------------------------------------------------------------


def test_a_folder_names_the_store_in_it_and_a_missing_one_is_not_made(
    agl, path: Path, tmp_path: Path
) -> None:
    for name in ("store.sqlite", "agentlightning.sqlite"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        fill(folder / name, "x")
        for words in (["store", "check"], ["rollouts", "ls"], ["runs", "ls"], ["keys", "list"]):
            assert agl(*words, "--store", folder)[0] == 0
        assert (
            agl("export", tmp_path / f"{name}.jsonl", "--format", "rollouts", "--store", folder)[0]
            == 0
        )
        assert agl("store", "backup", folder / "copy.db", "--store", folder)[0] == 0
    exported = tmp_path / "store.sqlite.jsonl"
    assert agl("import", exported, "--store", tmp_path / "agentlightning")[0] == 0
    assert len(stored(tmp_path / "agentlightning" / "agentlightning.sqlite")) == 2
    typo = tmp_path / "typo" / "all.sqlite"
    for words in (["import", exported], ["server", "--port", "0"]):
        code, _, err = agl(*words, "--store", typo)
        assert code == 1 and f"there is no folder {typo.parent} for the store all.sqlite" in err
    assert not typo.parent.exists()


def test_what_ended_long_ago_is_deleted_by_its_age(agl, path: Path) -> None:
    fill(path, "old", "older", ago=31 * DAY)
    fill(path, "young")
    arguments = ("store", "delete", "--store", path, "--older-than", "30d")
    assert agl(*arguments, "--dry-run") == (0, "2 rollouts match; nothing was removed\n", "")
    assert len(inputs(path)) == 3
    assert agl(*arguments, "--yes")[:2] == (0, "removed 2 rollouts, 2 attempts, 0 spans\n")
    assert inputs(path) == ["young"]


def test_deleting_asks_first_and_leaves_no_trace(agl, path: Path) -> None:
    fill(path, "a ZEBRA", "my ZEBRA", "my horse")
    command = [
        sys.executable,
        "-m",
        "agentlightning.cli.main",
        "store",
        "delete",
        "--store",
        path,
        "--task",
        "ZEBRA",
    ]
    refused = subprocess.run(command, input="n\n", capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (1, "2 rollouts match; nothing was removed\n")
    assert "delete 2 rollouts" in refused.stderr
    agreed = subprocess.run(command, input="y\n", capture_output=True, text=True)
    assert (agreed.returncode, agreed.stdout) == (0, "removed 2 rollouts, 2 attempts, 0 spans\n")
    assert [file.name for file in path.parent.iterdir() if b"ZEBRA" in file.read_bytes()] == []
    assert inputs(path) == ["my horse"]


def test_one_rollout_or_a_run_is_deleted_or_none_matches(agl, path: Path) -> None:
    fill(path, "one", "two")
    name = stored(path)[0].rollout_id
    one = agl("store", "delete", "--store", path, "--rollout", name, "--yes")
    assert one[:2] == (0, "removed 1 rollouts, 1 attempts, 0 spans\n")
    none = (0, "0 rollouts match; nothing was removed\n", "")
    assert agl("store", "delete", "--store", path, "--run", "run-1") == none
    for wrong in ([], ["--task", ""], ["--task", "x", "--run", "x"]):
        code, _, err = agl("store", "delete", "--store", path, "--yes", *wrong)
        assert code == 2 and "one of --older-than AGE, --task TEXT, --rollout ID, --run ID" in err
    assert inputs(path) == ["two"]


# --- check and backup -----------------------------------------------------------------------------


def test_check_ends_with_1_if_anything_is_wrong(agl, path: Path) -> None:
    fill(path, "x")
    assert agl("store", "check", "--store", path) == (0, "nothing is wrong\n", "")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as vandal:
        vandal.execute("UPDATE rollouts SET end_time = NULL")
    code, out, _ = agl("store", "check", "--store", path)
    assert code == 1 and "finished rollouts without an end time" in out


def test_a_backup_and_an_imported_export_are_stores(agl, path: Path) -> None:
    copy, moved, other = (
        path.parent / name for name in ("copy.db", "rollouts.jsonl.gz", "other.db")
    )
    fill(path, "old")
    assert agl("export", moved, "--format", "rollouts", "--store", path)[:2] == (
        0,
        "wrote 1 rollouts, 1 attempts, 0 spans\n",
    )
    assert agl("export", moved, "--format", "rollouts", "--store", path)[0] == 1
    assert agl("import", moved, "--store", other)[:2] == (0, "stored 1 rollouts\n")
    assert agl("import", moved, "--store", other)[1] == "stored 0 rollouts; 1 were stored already\n"
    assert stored(other) == stored(path)
    assert agl("store", "backup", copy, "--store", path)[0] == 0
    fill(path, "new")
    code, _, err = agl("store", "backup", copy, "--store", path)
    assert code == 1 and "exists already" in err
    assert inputs(copy) == ["old"]
    code, _, err = agl("store", "backup", "x.dump", "--store", "postgresql://me:geheim@db/agl")
    assert code == 1 and "pg_dump" in err and "geheim" not in err


# --- elsewhere ------------------------------------------------------------------------------------


def test_a_running_server_is_asked_to_do_it(agl, path: Path) -> None:
    moved, copy = path.parent / "rollouts.jsonl", path.parent / "copy.db"
    fill(path, "my ZEBRA", "my horse")

    async def running(url: str) -> str:
        client = LightningStoreClient(url, KEY)
        rollout = await client.start_rollout("a running ZEBRA")
        await client.close()
        return rollout.rollout_id

    with staying_up(path.parent, "server", "--port", "0", "--store", path, AGL_KEY=KEY) as (_, url):
        at = ("--server", url, "--key", KEY)
        asyncio.run(running(url))
        assert agl("store", "check", *at) == (0, "nothing is wrong\n", "")
        assert agl("export", moved, "--format", "rollouts", *at)[1].startswith("wrote 2 rollouts")
        assert agl("store", "backup", copy, "--store", path)[0] == 0
        far = path.parent / "far.db"
        assert agl("store", "backup", far, *at)[0] == 0
        assert "exists already" in agl("store", "backup", far, *at)[2]
        assert len(inputs(far)) == 3 and not list(path.parent.glob(".backup-*"))
        far.unlink()
        _, worker, _ = agl("keys", "issue", "ci", "--scope", "worker", *at)
        for words, refused in ((("backup", far), "back up the store"), (("check",), "check store")):
            code, _, err = agl("store", *words, "--server", url, "--key", worker.strip())
            assert code == 1 and f"may not {refused}; use an admin key" in err and not far.exists()
        assert (
            agl("store", "delete", *at, "--task", "ZEBRA", "--yes")[1]
            == "removed 2 rollouts, 2 attempts, 0 spans\n"
        )
        traces = [file.name for file in path.parent.iterdir() if b"ZEBRA" in file.read_bytes()]
        assert sorted(traces) == ["copy.db", "rollouts.jsonl"]
        assert agl("import", moved, *at)[1] == "stored 1 rollouts; 1 were stored already\n"
        assert agl("store", "delete", *at, "--older-than", "30d")[1].startswith("0 rollouts match")
        (path.parent / "mine.py").write_text("def agent(task, llm): return 1.0\n")
        for words in (["store", "check"], ["runner", path.parent / "mine.py:agent"]):
            code, _, err = agl(*words, "--server", url, "--key", "another key")
            assert code == 1 and "key" in err and " runs " not in err
    assert len(inputs(copy)) == 3


# --- keys -----------------------------------------------------------------------------------------


def opens(path: Path, secret: str, later: float = 0.0) -> Credential | None:
    """What the holder of a key may do some seconds later."""

    async def work() -> Credential | None:
        store = await SqlStore.open(path, clock=lambda: time.time() + later)
        credential = await store.find_key(api_key=secret)
        await store.close()
        return credential

    return asyncio.run(work())


def test_a_secret_is_shown_once_and_a_revoked_key_opens_nothing(agl, path: Path) -> None:
    fill(path)
    there = ("--store", path)
    issue = ("keys", "issue", "ci", "--scope", "read", "--scope", "grader", "--lifetime")
    code, out, err = agl(*issue, "30d", *there)
    secret = out.strip()
    assert code == 0 and out == f"{secret}\n" and secret.startswith("aglk-")
    assert (
        secret not in err and "not shown again" in err and secret.encode() not in path.read_bytes()
    )
    credential = opens(path, secret)
    assert credential is not None and credential.scopes == ("read", "grader")
    assert opens(path, secret, later=31 * DAY) is None
    code, listed, _ = agl("keys", "list", *there)
    assert "ci" in listed and "valid until" in listed and secret not in listed
    key_id = json.loads(agl("keys", "list", "--json", *there)[1])["key_id"]
    for _ in range(2):
        code, out, _ = agl("keys", "revoke", key_id, *there)
        assert code == 0 and "revoked" in out
    assert opens(path, secret) is None
    code, _, err = agl("keys", "revoke", "key-none", *there)
    assert code == 1 and "no key 'key-none'" in err
