"""A person watching a job sees how far it is, how well it does and how long it still takes."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest
from rich.console import Console

from agentlightning.algorithm.base import Progress
from agentlightning.display import LiveProgress, runnable


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_without_a_terminal_there_is_a_line_now_and_then(clock: Clock) -> None:
    out = io.StringIO()
    progress: Progress
    with LiveProgress(Console(file=out, width=200), steps=40, clock=clock) as progress:
        for step in range(1, 21):
            progress.phase("rollouts", 128)
            clock.now += 1
            progress.phase("learn")
            progress.step(step, {"reward": step / 20, "tokens_per_second": 12345.6})
        progress.note("saved [bold]as it is[/bold]")
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["[0:00] rollouts …", "[0:01] learn …"]
    assert lines[2] == "[0:01] step 1/40 · reward 0.050 · 12,346 tokens/s"
    steps = [line.split(" · ")[0] for line in lines[3:6]]
    assert steps == ["[0:06] step 6/40", "[0:11] step 11/40", "[0:16] step 16/40"]
    assert lines[3].endswith("about 0:34 left")
    assert lines[6] == "[0:20] saved [bold]as it is[/bold]"
    assert lines[7].startswith("[0:20] step 20/40")  # the last step is told even when it comes soon
    assert len(lines) == 8


def test_on_a_terminal_one_panel_shows_everything(clock: Clock) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, _environ={"TERM": "xterm"})
    with LiveProgress(console, steps=4, time_limit=240, clock=clock) as progress:
        progress.step(1, {"reward": 0.25, "loss": -0.5})
        progress.phase("rollouts", 128)
        progress.advance(64)
        progress.note("a line")
        clock.now += 5
    shown = out.getvalue()
    for part in (
        "rollouts",
        "64/128",
        "step 1/4",
        "▂",
        "reward 0.250",
        "loss -0.5000",
        "about 3:55 left",
        "a line",
    ):
        assert part in shown


def test_a_phase_that_takes_long_is_told_of_where_there_is_no_terminal(clock: Clock) -> None:
    out = io.StringIO()
    with LiveProgress(Console(file=out, width=200), clock=clock) as progress:
        progress.phase("evaluate", 100)
        for done in range(1, 51):
            clock.now += 1
            progress.advance(done)
    lines = out.getvalue().splitlines()
    assert lines == ["[0:00] evaluate …", "[0:30] evaluate 30/100 · 1/s · about 1:10 left"]


def test_a_command_is_shown_as_it_runs_in_this_shell(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs = tmp_path / "my env" / "bin"
    programs.mkdir(parents=True)
    (programs / "agl").write_text("#!/bin/sh\n")
    (programs / "agl").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.chdir(tmp_path)
    assert runnable("agl serve x") == "'my env/bin/agl' serve x"
    assert runnable("agl train", Path("project")) == "'../my env/bin/agl' train"
    assert runnable("unknown train") == "unknown train"
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    assert runnable("agl serve x") == "agl serve x"
