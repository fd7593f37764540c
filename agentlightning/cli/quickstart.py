"""`agl quickstart`: trains the travel desk of examples/flight, and shows which tool the policy calls first."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentlightning.cli.config import key_flags, load_config
from agentlightning.cli.fit import fit
from agentlightning.cli.options import COUNT, json_option, make_table, print_json
from agentlightning.cli.place import RUNS
from agentlightning.cli.training import RUN_FILE, exit_code, run_to_resume, show_fit, summary
from agentlightning.data.conversations import first_tool
from agentlightning.data.references import load_reference
from agentlightning.errors import ConfigError

if TYPE_CHECKING:
    from agentlightning.algorithm.evaluation import Evaluation

Shares: TypeAlias = "Mapping[str, Counter[str]]"

_PACKAGE: Final = Path(__file__).parents[1]


@click.command()
@click.option("--steps", type=COUNT, help="Number of training steps.")
@json_option
@key_flags(only=("seed", "time_limit", "run_dir", "resume"))
def quickstart(steps: int | None, as_json: bool, **flags: Any) -> int:
    """Train a small tool-using agent from scratch and show what it learned."""
    console, flight = Console(stderr=as_json), _flight()
    run_file = flight / RUN_FILE
    if flags["resume"]:
        flags["run_dir"], run_file = run_to_resume(flags["run_dir"], "quickstart-*")
    elif flags["run_dir"] is None:
        flags["run_dir"] = str(RUNS / f"quickstart-{time.strftime('%Y%m%d-%H%M%S')}")
    sys.path.insert(0, str(flight))  # before an `agent.py` of the current folder
    config = load_config(run_file, () if steps is None else (f"algorithm.steps={steps}",), flags)
    result = fit(config, console)
    report = summary(result, config)
    if result.evaluations:
        right: dict[str, str] = load_reference(f"{flight / 'tasks.py'}:RIGHT_FIRST_TOOL")
        before, after = (_first_tools(result.evaluations[end], right) for end in (0, -1))
        console.print(_table(before, after, right))
        report["right_first_tool"] = {
            kind: {"before": round(before[kind][tool], 4), "after": round(after[kind][tool], 4)}
            for kind, tool in right.items()
        }
    show_fit(console, result)
    if as_json:
        print_json(report)
    return exit_code(result.stopped_because)


def _flight() -> Path:
    """The folder of the example, in the installed package or in the checkout."""
    for folder in (_PACKAGE / "examples" / "flight", _PACKAGE.parent / "examples" / "flight"):
        if folder.is_dir():
            return folder
    raise ConfigError("the flight example is missing from this installation; install agent-lightning-next again")


def _first_tools(evaluation: Evaluation, right: Mapping[str, str]) -> Shares:
    """For each kind of task, the share of held-out tasks whose first call was a tool; "none" for no call."""
    shares: dict[str, Counter[str]] = {}
    for kind in right:
        tasks = [task for task in evaluation.tasks if task.rollout.input["kind"] == kind]
        counts = Counter(first_tool(task.spans) or "none" for task in tasks)
        shares[kind] = Counter({tool: count / len(tasks) for tool, count in counts.items()})
    return shares


def _table(before: Shares, after: Shares, right: Mapping[str, str]) -> Table:
    """Rows are kinds of task, columns first tools; the right tool of each kind is marked."""
    tools = [*right.values(), "none"]
    rows: list[list[object]] = [
        [kind.replace("_", " "), *(_cell(before[kind][tool], after[kind][tool], tool == right[kind]) for tool in tools)]
        for kind in right
    ]
    title = "First tool called, share of held-out tasks before → after"
    return make_table(("kind of task", *tools), rows, title=title, right=tools)


def _cell(before: float, after: float, right: bool) -> Text:
    return Text(f"{before:.2f} → {after:.2f}", "bold green" if right else "dim")
