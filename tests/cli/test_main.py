"""Every outcome of a command line is an exit code and a readable message, never a traceback."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from agentlightning.cli.main import COMMANDS, GROUPS, SUMMARY, agl, run
from tests.cli.world import finish, make_runs, start


def commands() -> Iterator[click.Command]:
    """Every command and subcommand."""
    for name in COMMANDS:
        command = agl.get_command(click.Context(agl), name)
        assert command is not None
        yield command
        yield from command.commands.values() if isinstance(command, click.Group) else ()


def test_help_lists_every_command_in_its_group_with_a_whole_summary(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)
    places = [shown.index(f"\n{group}:\n") for group in GROUPS]
    assert places == sorted(places) and "..." not in shown.partition("Train:")[2]
    for command in commands():
        summary = command.get_short_help_str(1000)
        assert 0 < len(summary) <= SUMMARY, f"{command.name}: {summary}"


def test_former_names_of_flags_are_accepted_and_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in commands():
        for option in command.params:
            assert (
                not isinstance(option, click.Option)
                or len([name for name in option.opts if name[1] == "-"]) < 2
            )
    assert run(["train", "--help"]) == 0
    assert not {"--out", "--api-key"} & set(capsys.readouterr().out.split())
    given = ["--agent", "a:f", "--train-dataset", "bb:g", "--api-key", "12345678", "--out", "x"]
    assert run(["train", *given, "--print-config"]) == 0


def test_quiet_verbose_and_colourless_stand_before_or_behind_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NO_COLOR", raising=False)
    make_runs("one")
    for words in (
        ["rollouts", "ls", "-q"],
        ["-q", "rollouts"],
        ["rollouts", "--quiet", "--no-color"],
    ):
        assert run(words) == 0
        assert capsys.readouterr() == ("no rollout matches\n", "")
    assert run(["rollouts"]) == 0
    assert "store.sqlite" in capsys.readouterr().err
    assert "NO_COLOR" not in os.environ
    for words in (["-v", "runs", "nowhere"], ["runs", "nowhere", "-v"]):
        assert run(words) == 1
        assert "Traceback" in (said := capsys.readouterr().err) and said.splitlines()[
            -1
        ].startswith("error: ")


def test_a_terminal_without_our_characters_gets_question_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_runs("one")
    out, _ = finish(start(tmp_path, "runs", PYTHONIOENCODING="latin1:strict", PYTHONUTF8="0"))
    assert "one" in out and "?" in out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_and_each_of_its_options(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([name, "--help"]) == 0
    assert f"Usage: agl {name}" in capsys.readouterr().out
    command = agl.get_command(click.Context(agl), name)
    for each in command.commands.values() if isinstance(command, click.Group) else [command]:
        options = (
            [option for option in each.params if isinstance(option, click.Option)] if each else []
        )
        assert all(option.help for option in options)
        assert any("--json" in option.opts for option in options)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["quikstart"], "did you mean 'quickstart'"),
        (["train", "--sede", "3"], "--seed"),
        (["train", "--dtype", "int8"], "'int8' is not one of 'float32', 'bfloat16'"),
        (["runner", "--server", "http://x"], "Missing argument"),
        (["rollouts", "lss"], "Did you mean 'ls'"),
        (["store", "bakup"], "Did you mean 'backup'"),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_the_nearest_right_one(
    arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    assert hint in capsys.readouterr().err


def test_resuming_says_where_there_is_no_run_and_which_one_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["train", "--resume"]) == 1
    assert "there is no run to resume below" in capsys.readouterr().err
    run_ = Path("runs/grpo-1")
    run_.mkdir(parents=True)
    (run_ / "run.json").write_text('{"run_id": "r", "kind": "grpo"}')
    assert run(["train", "--resume", "--run-dir", "nowhere"]) == 1
    assert (
        "nowhere holds no run to resume; the newest run here is in runs/grpo-1"
        in capsys.readouterr().err
    )
    assert run(["train", "--resume"]) == 1
    assert "runs/grpo-1 has no run.yaml" in capsys.readouterr().err


def test_a_chat_with_nobody_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert run(["chat", "http://127.0.0.1:1/v1"]) == 1
    assert (
        capsys.readouterr().err
        == "error: nothing answers at http://127.0.0.1:1; is the server running?\n"
    )


@pytest.mark.parametrize(
    ("missing", "arguments", "extra"),
    [
        (
            "httptools",
            "['record', '--backend', 'http://127.0.0.1:1/v1', '--kind', 'vllm', '--', 'true']",
            "server",
        ),
        ("numpy", "['train', 'run.yaml']", "train"),
        ("torch", "['sweep', 'run.yaml', '--over', 'seed=1,2']", "train"),
    ],
)
def test_a_package_of_an_extra_that_is_missing_is_told_with_the_extra(
    missing: str, arguments: str, extra: str, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(
        "agent: a.py:a\nmodel: m\ntrain_dataset: t.jsonl\nalgorithm: {name: grpo}\n"
    )
    for name in ("a.py", "t.jsonl"):
        (tmp_path / name).touch()
    script = (
        f"import sys; sys.modules[{missing!r}] = None; from agentlightning.cli.main import main; "
        f"main({arguments})"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.rstrip().endswith(f"pip install 'agent-lightning-next[{extra}]'")


def test_help_needs_no_torch_web_framework_or_database() -> None:
    script = (
        "import sys; from agentlightning.cli.main import run; run(['--help']); "
        "print(sorted({'torch', 'transformers', 'numpy', 'starlette', 'sqlite3', 'pandas'} & "
        "set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_another_interrupt_ends_a_process_that_is_ending() -> None:
    slow = (
        "import atexit, time; atexit.register(lambda: (print('ending', flush=True), "
        "time.sleep(240)))"
    )
    script = f"{slow}; from agentlightning.runner.signals import exit_with; exit_with(130)"
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ending\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=200) == ("", "") and process.returncode == 130
