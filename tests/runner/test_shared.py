"""What agents change in their process, and the run goes on: the table of docs/agents.md, row by
row."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.context
import os
import re
import sqlite3
import sys
from pathlib import Path
from typing import Final

import pytest

from agentlightning.cli.main import main
from tests.test_trainer import TASKS, policy

ROOT: Final = Path(__file__).parents[2]
AGENT: Final = ROOT / "tests" / "runner" / "agents" / "untidy.py"
ROWS: Final = {
    "changes the working directory": "enter_workspace",
    "deletes the working directory": "enter_deleted_workspace",
    "replaces `sys.stdout` or `sys.stderr`": "drop_streams",
    "redirects them, side by side with others": "redirect_streams",
    "clears `os.environ`": "clear_environment",
    "sets the locale": "set_locale",
    "turns warnings into errors": "warnings_as_errors",
    "disables logging": "silence_logging",
    "seeds `random`, numpy or torch": "seed_random",
    "sets the context of `decimal`": "set_decimal",
    "sets the event loop's policy": "set_loop_policy",
    "lowers the recursion limit": "limit_recursion",
    "blocks the threads of `asyncio.to_thread`": "use_up_threads",
    "turns off the garbage collector": "disable_gc",
    "leaves a thread running": "leave_thread",
    "calls `os._exit`": "end_process",
    "raises KeyboardInterrupt": "raise_interrupt",
    "interrupts itself by `_thread.interrupt_main`": "interrupt_itself",
    "is interrupted when it has ended": "interrupt_others",
    "calls `sys.exit` in a task of its own": "exit_in_task",
    "stops the event loop": "stop_loop",
    "cancels `asyncio.all_tasks()`": "cancel_all_tasks",
    "closes all descriptors": "close_descriptors",
    "closes the standard streams": "close_streams",
    "sets the umask": "set_umask",
    "handles Ctrl-C for a while, as web servers do": "handle_interrupts",
    "ignores Ctrl-C": "ignore_interrupts",
    "replaces the loop's default executor": "replace_executor",
    "limits descriptors": "limit_descriptors",
}
_ALONE: Final = {
    "cancel_all_tasks",
    "close_descriptors",
    "close_streams",
    "set_umask",
    "ignore_interrupts",
    "replace_executor",
    "limit_descriptors",
}


def rows() -> dict[str, str]:
    """The rows of the table, and what each says of the run."""
    text = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    table = text.partition("| an agent in the loop |")[2].partition("\n\n")[0]
    return dict(re.findall(r"^\| (.+?) \| (.+?) \|", table, re.MULTILINE))


def test_the_table_has_these_rows_and_says_which_need_a_process() -> None:
    table = rows()
    assert list(table) == list(ROWS)
    assert {ROWS[row] for row, said in table.items() if "**" in said} == _ALONE


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and a dataset."""
    folder = tmp_path_factory.mktemp("world")
    policy().save(folder / "model")
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    return folder


@pytest.fixture(scope="module")
def warm() -> multiprocessing.context.ForkServerContext:
    """Makes processes that have loaded what a training needs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def train(deed: str, isolation: str, world: Path, folder: Path) -> None:
    """`agl train` in this process, with relative paths."""
    os.chdir(folder)
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = open(name, "w", buffering=1)  # noqa: SIM115 - it stays open, as a terminal does
        os.dup2(file.fileno(), number)
        setattr(sys, name, os.fdopen(number, "w", buffering=1))
    os.environ["DEED"] = deed
    tasks = world / "tasks.jsonl"
    options = {"model": world / "model", "train-dataset": tasks, "val-dataset": tasks}
    options |= {"isolation": isolation, "n-runners": 1 if isolation == "process" else 8}
    options |= {"agent": f"{os.path.relpath(AGENT)}:agent", "run-dir": "run", "steps": 1}
    sizes = ("tasks_per_step=4", "group_size=2", "max_tokens=4")
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    main(["train", *words, *(word for size in sizes for word in ("--set", f"algorithm.{size}"))])


@pytest.mark.slow
@pytest.mark.parametrize("deed", ROWS.values())
def test_a_run_goes_on_whatever_its_agents_change_where_the_table_says_so(
    deed: str, world: Path, warm: multiprocessing.context.ForkServerContext, tmp_path: Path
) -> None:
    isolation = "process" if deed in _ALONE else "none"
    process = warm.Process(target=train, args=(deed, isolation, world, tmp_path))
    process.start()
    process.join(180)
    process.kill()
    shown = (tmp_path / "stdout").read_text()
    log = (tmp_path / "stderr").read_text()
    assert process.exitcode == 0, log
    assert "step 1/1" in shown and "Checkpoint: run/checkpoints/step-000001" in shown
    assert (tmp_path / "run" / "checkpoints" / "step-000001" / "model.safetensors").is_file()
    with sqlite3.connect(tmp_path / "run" / "store.sqlite") as store:
        assert store.execute("SELECT count(*) FROM runs WHERE status = 'succeeded'").fetchone() == (
            1,
        )
    if deed == "leave_thread":
        assert "still run and are abandoned: 'left behind'" in log
    if deed in ("enter_workspace", "redirect_streams"):
        assert "for all rollouts of this process" in shown + log
