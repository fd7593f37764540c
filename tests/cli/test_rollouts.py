"""`agl rollouts`: what a store holds, listed and shown."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from agentlightning.cli.main import run
from agentlightning.semconv import EXCEPTION
from agentlightning.store.sql import SqlStore
from agentlightning.tracing.context import AttemptTracer, bind
from agentlightning.tracing.emit import emit_exception, emit_reward
from agentlightning.tracing.logs import record_log
from agentlightning.types import RolloutConfig


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def fill(path: str = "agentlightning.sqlite") -> list[str]:
    """A rollout that succeeded, then one that failed at its second attempt; their ids."""

    async def work() -> list[str]:
        store = await SqlStore.open(path)
        good = await store.start_rollout("Fly me", mode="train")
        tracer = AttemptTracer(good.rollout_id, good.attempt.attempt_id)
        with bind(tracer):
            emit_reward(0.5)
        record_log(tracer, "stdout", "\n".join(f"line {number}\x1b[31m" for number in range(30)))
        await store.add_many_spans(tracer.drain())
        await store.update_attempt(good.rollout_id, good.attempt.attempt_id, status="succeeded")
        config = RolloutConfig(max_attempts=2, retry_condition=("failed",))
        bad = await store.start_rollout({"question": "2+2"}, mode="val", config=config)
        await store.update_attempt(
            bad.rollout_id,
            bad.attempt.attempt_id,
            status="failed",
            metadata={"reason": "exit code 3"},
        )
        again = await store.start_attempt(bad.rollout_id)
        await store.update_attempt(bad.rollout_id, again.attempt.attempt_id, status="failed")
        await store.close()
        return [good.rollout_id, bad.rollout_id]

    return asyncio.run(work())


def failed(given: str, fills: Callable[[AttemptTracer, float], None]) -> str:
    """A rollout that failed, with the spans that `fills` records; its id."""

    async def work() -> str:
        store = await SqlStore.open("agentlightning.sqlite")
        leased = await store.start_rollout(given)
        ids = leased.rollout_id, leased.attempt.attempt_id
        fills(tracer := AttemptTracer(*ids), leased.attempt.start_time)
        await store.add_many_spans(tracer.drain())
        await store.update_attempt(*ids, status="failed")
        await store.close()
        return leased.rollout_id

    return asyncio.run(work())


def test_rollouts_are_listed_newest_first_and_narrowed(capsys: pytest.CaptureFixture[str]) -> None:
    ids = fill()
    assert run(["rollouts", "ls"]) == 0
    told = capsys.readouterr()
    rows = [line.split() for line in told.out.splitlines() if "ro-" in line]
    assert [row[0] for row in rows] == ids[::-1]
    assert "0.5" in rows[1] and told.err == "agentlightning.sqlite\n"
    for options, which in (
        (["--status", "failed"], [1]),
        (["--status", "failed", "--status", "succeeded"], [1, 0]),
        (["--mode", "train"], [0]),
        (["--run", "nobody's"], []),
        (["--limit", "1"], [1]),
    ):
        assert run(["rollouts", "ls", "--json", *options]) == 0
        listed = [json.loads(line)["rollout_id"] for line in capsys.readouterr().out.splitlines()]
        assert listed == [ids[index] for index in which], options


def test_a_rollout_is_shown_with_the_last_lines_it_wrote(
    capsys: pytest.CaptureFixture[str],
) -> None:
    good, _ = fill()
    assert run(["rollouts", "show", good]) == 0
    shown = capsys.readouterr().out
    assert f"{good}  succeeded  reward 0.5  0 calls" in shown and "input  Fly me" in shown
    assert (
        "── stdout (20 lines before, see --logs)\nline 20 [31m\n"
    ) in shown and "line 19" not in shown
    assert run(["rollouts", "show", good, "--logs"]) == 0
    assert "line 0 [31m" in capsys.readouterr().out


def test_what_an_agent_calls_things_reaches_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    wild = "\x1b]0;owned\x07\u202e\n[/]"

    def fills(tracer: AttemptTracer, at: float) -> None:
        record_log(tracer, wild, wild)
        names = (
            "gen_ai.tool.name",
            "gen_ai.agent.name",
            "gen_ai.request.model",
            "agentlightning.reward.0.name",
        )
        for name in (*names, "exception.type"):
            kind = {"gen_ai.tool.name": "execute_tool", "gen_ai.agent.name": "invoke_agent"}.get(
                name, "chat"
            )
            value = (
                {"agentlightning.reward.0.value": 1.0}
                if "reward" in name
                else {"gen_ai.operation.name": kind}
            )
            tracer.record(EXCEPTION if name == "exception.type" else wild, {name: wild, **value})

    assert run(["rollouts", "show", failed(wild, fills)]) == 0
    shown = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\u202e"} & set(shown)
    assert all(f"{word} " in shown for word in ("tool", "agent", "call", "reward", "──"))


def test_attempts_are_shown_with_their_ends_and_any_of_them_by_its_number(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, bad = fill()
    assert run(["rollouts", "show", bad]) == 0
    assert "  attempt 1 failed: exit code 3\n* attempt 2 failed\n" in capsys.readouterr().out
    assert run(["rollouts", "show", bad, "--attempt", "1"]) == 0
    assert "* attempt 1 failed: exit code 3\n" in capsys.readouterr().out
    assert run(["rollouts", "show", bad, "--attempt", "3"]) == 1
    assert "has 2 attempts; there is no 3" in capsys.readouterr().err


def test_a_failed_rollout_is_shown_with_its_traceback_and_where_it_stood(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fall(depth: int) -> None:
        if depth == 0:
            raise ValueError("no seat [/] left")
        fall(depth - 1)

    def fills(tracer: AttemptTracer, at: float) -> None:
        tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "book"}
        tracer.record("book", tool, start_time=at, end_time=at + 1)
        with bind(tracer), pytest.raises(ValueError) as raised:
            fall(8)
        with bind(tracer):
            emit_exception(raised.value)

    rollout_id = failed("Fly me", fills)
    assert run(["rollouts", "show", rollout_id]) == 0
    shown = capsys.readouterr().out
    assert (
        "── traceback (" in shown
        and "ValueError: no seat [/] left" in shown
        and "Traceback (most" not in shown
    )
    assert (
        "\n  failed " in shown
        and "s after its start, 0.0 s after its last recorded step: tool book" in shown
    )
    assert run(["rollouts", "show", rollout_id, "--timeline"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(
        r"\+   0\.00 s    1\.00 s  ▓+·*  tool book$", lines[1]
    ) and "! ValueError" in "".join(lines[2:4])
    assert any("┤ failed " in line and "last recorded step: tool book" in line for line in lines)
    assert run(["rollouts", "show", rollout_id, "--logs"]) == 0
    assert "Traceback (most recent call last)" in capsys.readouterr().out


def test_the_store_is_the_newest_unless_one_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rollouts", "ls"]) == 1
    assert "name a --store" in capsys.readouterr().err
    fill()
    Path("runs/one").mkdir(parents=True)
    fill("runs/one/store.sqlite")
    for file in Path().glob("agentlightning.sqlite*"):
        os.utime(file, (1, 1))
    assert run(["rollouts", "ls"]) == 0
    assert run(["rollouts", "ls", "--store", "agentlightning.sqlite"]) == 0
    assert capsys.readouterr().err == "runs/one/store.sqlite\nagentlightning.sqlite\n"


def test_a_rollout_is_annotated_where_it_is_found_and_exported_by_its_label(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("runs/first").mkdir(parents=True)
    good, _ = fill("runs/first/store.sqlite")
    fill()  # the newest store, which does not have it
    assert (
        run(
            [
                "rollouts",
                "annotate",
                good,
                "--label",
                "good",
                "--note",
                "two\x1b[31m\nlines",
                "--answer",
                "x",
            ]
        )
        == 0
    )
    assert "in runs/first/store.sqlite" in capsys.readouterr().err
    assert run(["rollouts", "annotate", good, "--answer", "", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"label": "good", "note": "two\x1b[31m\nlines"}
    assert run(["rollouts", "show", good]) == 0
    told = capsys.readouterr()
    assert "label: good" in told.out and "\x1b[31m" not in told.out and "in runs/first" in told.err
    for wrong, message in (
        ([good], "give --label"),
        (["nobody", "--label", "x"], "in any of 2 stores here; see"),
    ):
        assert run(["rollouts", "annotate", *wrong]) != 0
        assert message in capsys.readouterr().err
