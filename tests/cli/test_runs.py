"""`agl runs`: what runs there are, and what each measured."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from agentlightning.cli.main import run
from agentlightning.store.sql import SqlStore
from agentlightning.types import Metrics
from tests.cli.world import HOSTILE, add_rollout, add_run, make_runs


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert run(arguments) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


@pytest.mark.parametrize("words", [("runs",), ("runs", "runs"), ("runs", "ls", ".")])
def test_runs_are_listed_with_what_they_reached(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    make_runs("one", "two")
    lines = told(capsys, *words).splitlines()
    [one] = [line for line in lines if line.strip().startswith("one")]
    assert "stopped" in one and " 0.7 " in one and "▂▃" in one and one.rstrip().endswith("one-dir/store.sqlite")
    assert any(line.strip().startswith("two") for line in lines)


def test_a_run_whose_process_died_is_shown_with_how_to_resume_it(capsys: pytest.CaptureFixture[str]) -> None:
    make_runs("one")
    assert "resume it with: " in (said := told(capsys, "runs", "show", "one")) and "resume=True" in said
    Path("runs/one-dir/run.yaml").touch()
    assert re.search(r"resume it with: \S*agl train --resume --run-dir runs/one-dir\n", told(capsys, "runs", "show"))


def test_a_damaged_store_among_several_is_left_out_and_alone_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    make_runs("one")
    Path("runs/other").mkdir()
    Path("runs/other/store.sqlite").write_bytes(b"not a store at all, and long enough to have a header" * 10)
    assert run(["runs"]) == 0
    captured = capsys.readouterr()
    assert "one-dir" in captured.out and "runs/other/store.sqlite is not" in captured.err
    assert "is not an Agent Lightning store" in told(capsys, "runs", "runs/other/store.sqlite", code=1)


def test_a_run_is_shown_with_its_settings_rollouts_and_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    async def work() -> None:
        store = await SqlStore.open("runs/mine/store.sqlite")
        await add_run(store, "mine")
        await add_rollout(store, "x", 1.0, "mine")
        await store.close()

    asyncio.run(work())
    shown = told(capsys, "runs", "show")
    assert "rollouts: 1 succeeded\nseed: 3\ncommit: c0ffee\ncommand: agl train\n" in shown
    [loss] = [line.split() for line in shown.splitlines() if line.strip().startswith("loss")]
    assert loss[:5] == ["loss", "-0.01", "-0.1", "-0.01", "-0.1"] and loss[5][0] == "█"
    whole = json.loads(told(capsys, "runs", "show", "--json"))
    assert whole["rollouts"] == {"succeeded": 1} and len(whole["metrics"]) == 11


def test_a_run_is_named_by_id_its_beginning_or_its_directory(capsys: pytest.CaptureFixture[str]) -> None:
    make_runs("grpo-1b", "grpo-2")

    async def beside() -> None:
        store = await SqlStore.open("runs/grpo-1b-dir/store.sqlite")
        await add_run(store, "an-evaluation-of-it")
        await store.close()

    asyncio.run(beside())
    Path("runs/grpo-1b-dir/run.json").write_text('{"run_id": "grpo-1b", "kind": "grpo"}')
    for name in ("grpo-1", "grpo-1b", "runs/grpo-1b-dir"):
        assert json.loads(told(capsys, "runs", "show", name, "--json"))["run"]["run_id"] == "grpo-1b"
    for name, says in (("grp", "more than one run called 'grp'"), ("other", "no run called 'other'")):
        said = told(capsys, "runs", "show", name, code=1)
        assert says in said and "grpo-1b, grpo-2" in said


def test_what_others_wrote_does_nothing_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    async def work() -> str:
        store = await SqlStore.open("agentlightning.sqlite")
        rollout_id = await add_rollout(store, HOSTILE, 1.0)
        await store.start_run(f"kind{HOSTILE}", {"command": [HOSTILE], "commit": HOSTILE}, run_id="mine")
        await store.add_metrics(Metrics(run_id="mine", step=1, time=1.0, values={HOSTILE: 1.0}))
        await store.close()
        return rollout_id

    rollout_id = asyncio.run(work())
    for words in (("runs",), ("runs", "show"), ("rollouts", "ls"), ("rollouts", "show", rollout_id)):
        shown, data = told(capsys, *words), told(capsys, *words, "--json")
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & {*shown, *data}, words
        assert "[bold]" in shown and r"\u009b31m[bold]\u202e<script>" in data, words
    assert run(["runs", "show", "\x1b[31mred", "--store", "agentlightning.sqlite"]) == 1
    assert run(["store", "check", "--store", "\x1b]0;owned\x07"]) == 1
    assert not {"\x1b", "\x07"} & set(capsys.readouterr().err)
