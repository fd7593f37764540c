"""`agl runs`: what runs there are, and what each measured."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from agentlightning.algorithm.directory import run_directory
from agentlightning.cli.main import run
from agentlightning.server.app import create_app
from agentlightning.server.local_keys import offered_key
from agentlightning.server.serve import HttpServer
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
def test_runs_are_listed_with_what_they_reached(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    make_runs("one", "two")
    lines = told(capsys, *words).splitlines()
    [one] = [line for line in lines if line.strip().startswith("one")]
    assert (
        "stopped" in one
        and " 0.7 " in one
        and "▂▃" in one
        and one.rstrip().endswith("one-dir/store.sqlite")
    )
    assert any(line.strip().startswith("two") for line in lines)


def test_a_run_whose_process_died_is_shown_with_how_to_resume_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_runs("one")
    assert (
        "resume it with: " in (said := told(capsys, "runs", "show", "one"))
        and "resume=True" in said
    )
    Path("runs/one-dir/run.yaml").touch()
    assert re.search(
        r"resume it with: \S*agl train --resume --run-dir runs/one-dir\n",
        told(capsys, "runs", "show"),
    )


def test_a_damaged_store_among_several_is_left_out_and_alone_is_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_runs("one")
    Path("runs/other").mkdir()
    Path("runs/other/store.sqlite").write_bytes(
        b"not a store at all, and long enough to have a header" * 10
    )
    assert run(["runs"]) == 0
    captured = capsys.readouterr()
    assert "one-dir" in captured.out and "runs/other/store.sqlite is not" in captured.err
    assert "is not an Agent Lightning store" in told(
        capsys, "runs", "runs/other/store.sqlite", code=1
    )


def test_a_run_is_shown_with_its_settings_rollouts_and_metrics(
    capsys: pytest.CaptureFixture[str],
) -> None:
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


def test_a_run_is_named_by_id_its_beginning_or_its_directory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_runs("grpo-1b", "grpo-2")

    async def beside() -> None:
        store = await SqlStore.open("runs/grpo-1b-dir/store.sqlite")
        await add_run(store, "an-evaluation-of-it")
        await store.close()

    asyncio.run(beside())
    Path("runs/grpo-1b-dir/run.json").write_text('{"run_id": "grpo-1b", "kind": "grpo"}')
    for name in ("grpo-1", "grpo-1b", "runs/grpo-1b-dir"):
        assert (
            json.loads(told(capsys, "runs", "show", name, "--json"))["run"]["run_id"] == "grpo-1b"
        )
    for name, says in (
        ("grp", "more than one run called 'grp'"),
        ("other", "no run called 'other'"),
    ):
        said = told(capsys, "runs", "show", name, code=1)
        assert says in said and "grpo-1b, grpo-2" in said


def test_what_others_wrote_does_nothing_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    async def work() -> str:
        store = await SqlStore.open("agentlightning.sqlite")
        rollout_id = await add_rollout(store, HOSTILE, 1.0)
        await store.start_run(
            f"kind{HOSTILE}", {"command": [HOSTILE], "commit": HOSTILE}, run_id="mine"
        )
        await store.add_metrics(Metrics(run_id="mine", step=1, time=1.0, values={HOSTILE: 1.0}))
        await store.close()
        return rollout_id

    rollout_id = asyncio.run(work())
    for words in (
        ("runs",),
        ("runs", "show"),
        ("rollouts", "ls"),
        ("rollouts", "show", rollout_id),
    ):
        shown, data = told(capsys, *words), told(capsys, *words, "--json")
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & {*shown, *data}, words
        assert "[bold]" in shown and r"\u009b31m[bold]\u202e<script>" in data, words
    assert run(["runs", "show", "\x1b[31mred", "--store", "agentlightning.sqlite"]) == 1
    assert run(["store", "check", "--store", "\x1b]0;owned\x07"]) == 1
    assert not {"\x1b", "\x07"} & set(capsys.readouterr().err)


async def end(run_id: str, reason: str, **manifest: object) -> None:
    """The run ends as failed."""
    store = await SqlStore.open(f"runs/{run_id}-dir/store.sqlite")
    await store.update_run(run_id, "failed", merge={"reason": reason, **manifest})
    await store.close()


def test_a_failed_run_says_why_in_the_list_and_when_it_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_runs("one", "two")
    asyncio.run(
        end(
            "one",
            f"none of 8 rollouts was rewarded. {'The first to fail said more. ' * 9}",
            conclusion="Try x.",
        )
    )
    listed = told(capsys, "runs")
    assert (
        "why it ended" in listed
        and "none of 8 rollouts was rewarded. The first" in listed
        and "name" not in listed
    )
    shown = told(capsys, "runs", "show", "one", "--no-color")
    assert (
        "failed: none of 8 rollouts was rewarded. The first to fail said more. The first" in shown
    )
    assert "\nTry x.\n" in shown


def test_a_run_gets_a_name_and_tags_and_is_found_by_its_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_runs("one", "two")
    assert "one is called baseline" in told(capsys, "runs", "rename", "one", "baseline")
    assert "one has the tags slow, small" in told(
        capsys, "runs", "tag", "baseline", "slow", "small"
    )
    assert "one has the tags slow\n" in told(capsys, "runs", "tag", "baseline", "small", "--remove")
    assert "baseline #slow" in told(capsys, "runs")
    assert json.loads(told(capsys, "runs", "show", "baseline", "--json"))["run"]["run_id"] == "one"
    assert "one has no name" in told(capsys, "runs", "rename", "baseline", "")
    assert "no run called 'baseline'" in told(capsys, "runs", "tag", "baseline", "x", code=1)


def test_two_runs_are_shown_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    make_runs("one", "two")
    for run_id, rate in (("one", 0.001), ("two", 0.01)):
        asyncio.run(
            end(
                run_id,
                "x",
                config={"optimizer": {"learning_rate": rate, "betas": [0.9, 0.99]}, "dtype": None},
            )
        )
    found = json.loads(told(capsys, "runs", "diff", "one", "two", "--json"))
    assert found["settings"] == {"optimizer.learning_rate": [0.001, 0.01]}
    assert found["results"]["val_reward"] == pytest.approx([0.7, 1.2])
    assert found["results"]["val_reward before"] == [0.2, 0.2] and found["results"]["steps"] == [
        10,
        10,
    ]
    shown = told(capsys, "runs", "diff", "one", "two")
    assert (
        "optimizer.learning_rate" in shown
        and "val_reward before" in shown
        and "sampled_tokens" not in shown
    )


@pytest.mark.anyio
async def test_a_running_run_is_changed_by_its_own_process(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with run_directory("runs/one-dir", "grpo", named=True, resume=False) as directory:
        run_id, store = directory.mark.run_id, await SqlStore.open("runs/one-dir/store.sqlite")
        await store.start_run("grpo", {}, run_id=run_id)
        key = "a key of this process"
        async with HttpServer(create_app(store, admin_key=key)) as http:
            with offered_key(http.url, key), directory.served_at(http.url):
                said = await asyncio.to_thread(told, capsys, "runs", "stop", "runs/one-dir")
                assert "will end after its present step" in said
                await asyncio.to_thread(told, capsys, "runs", "tag", "runs/one-dir", "live")
                said = await asyncio.to_thread(
                    told, capsys, "runs", "delete", run_id, "--yes", code=1
                )
                assert f"stop it first: agl runs stop {run_id}" in said
        [stopping] = await store.query_runs()
        assert stopping.manifest == {"stop": True, "tags": ["live"]}
        await store.close()
    said = await asyncio.to_thread(told, capsys, "runs", "stop", "runs/one-dir", code=1)
    assert "does not run: it is stopped" in said


def test_deleting_a_run_asks_and_takes_its_folder_and_nothing_else(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_runs("one", "two", "three")
    for run_id in ("one", "two", "three"):
        folder = Path(f"runs/{run_id}-dir")
        (folder / "run.json").write_text(f'{{"run_id": "{run_id}", "kind": "grpo"}}')
        (folder / "checkpoints").mkdir()
    Path("runs/two-dir/notes.txt").touch()

    async def beside() -> None:
        store = await SqlStore.open("runs/three-dir/store.sqlite")
        await add_run(store, "an-evaluation-of-it")
        await store.close()

    asyncio.run(beside())
    monkeypatch.setattr(
        "click.confirm", lambda text, err: "the run one with 0 rollouts and its folder" not in text
    )
    assert run(["runs", "delete", "one"]) == 1 and Path("runs/one-dir/checkpoints").is_dir()
    assert "and its folder runs/one-dir" in told(capsys, "runs", "delete", "one", "--yes")
    assert not Path("runs/one-dir").exists()
    for run_id, stranger in (("two", "notes.txt"), ("three", "an-evaluation-of-it")):
        assert run(["runs", "delete", run_id]) == 0
        assert (
            f"left runs/{run_id}-dir, which holds other things too: {stranger}"
            in capsys.readouterr().err
        )
        assert Path(f"runs/{run_id}-dir/checkpoints").is_dir()
        assert (
            f"no run called '{run_id}'" in told(capsys, "runs", "show", run_id, code=1)
            or run_id == "two"
        )
    assert "an-evaluation-of-it" in told(capsys, "runs")
