"""`agl train`, from a run file and flags; `agl init`, a project with a run file; `agl quickstart`,
an example."""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import click
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentlightning.cli.fit import fit, resolved, run_dry
from agentlightning.cli.options import (
    COUNT,
    json_option,
    key_flags,
    make_table,
    print_json,
    set_option,
    steps_option,
)
from agentlightning.cli.run_file import check_files, load_config
from agentlightning.cli.schema import run_file_schema
from agentlightning.cli.store_location import RUNS
from agentlightning.config import RunConfig
from agentlightning.data.references import load_reference
from agentlightning.errors import ConfigError

if TYPE_CHECKING:
    from agentlightning.algorithm.evaluation import Evaluation
    from agentlightning.trainer import FitResult

Shares: TypeAlias = "Mapping[str, Counter[str]]"

_PACKAGE: Final = Path(__file__).parents[1]
RUN_FILE: Final = Path("run.yaml")
TEMPLATE: Final = _PACKAGE / "templates" / "agent"
INTERRUPTED: Final = 130


def _print_schema(ctx: click.Context, param: click.Parameter, asked: bool) -> None:
    if asked:
        print_json(run_file_schema())
        ctx.exit()


@click.command()
@click.argument(
    "run_file",
    type=click.Path(dir_okay=False, path_type=Path),
    required=False,
    metavar="[RUN.yaml]",
)
@set_option
@steps_option
@click.option(
    "--schema",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_schema,
    help="Print the JSON schema of run files, for editors, and exit.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Run two groups, estimate the cost of the whole run, and keep nothing.",
)
@click.option(
    "--print-config",
    is_flag=True,
    help="Print all settings as a run file, without secrets, and run nothing.",
)
@json_option
@key_flags()
def train(
    run_file: Path | None,
    assignments: tuple[str, ...],
    as_json: bool,
    steps: int | None,
    dry_run: bool,
    print_config: bool,
    **flags: Any,
) -> int:
    """Train an agent from a run file and flags.

    A flag wins over --set, and --set over RUN.yaml.

    Without RUN.yaml, the run.yaml of this folder is used unless the flags name agent and tasks;
    with --resume, that of the run to resume, so that no other flag is needed. Each run's directory
    has one, which repeats the run."""
    assignments += () if steps is None else (f"algorithm.steps={steps}",)
    from agentlightning.display import terminal

    console = terminal(stderr=as_json)
    complete = flags["environment"] or (flags["agent"] and flags["train_dataset"])
    if run_file is None and not complete:
        if flags["resume"] and flags["agent"] is None:
            flags["run_dir"], run_file = run_to_resume(flags["run_dir"])
        elif RUN_FILE.is_file():
            run_file = RUN_FILE
    config = load_config(run_file, assignments, flags)
    check_files(config)
    if print_config:
        print_settings(resolved(config), as_json=as_json)
        return 0
    if dry_run:
        run_dry(config, console, as_json=as_json)
        return 0
    result = fit(config, console)
    show_fit(console, result)
    if as_json:
        print_json(summary(result, config))
    return exit_code(result.stopped_because)


def print_settings(settings: Mapping[str, Any], *, as_json: bool) -> None:
    """Print a run file on stdout, as YAML or JSON."""
    if as_json:
        print_json(settings)
    else:
        click.echo(yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True), nl=False)


def run_to_resume(named: str | None, among: str = "*") -> tuple[str, Path]:
    """The directory of the named run, or of the newest `among` those below runs/, and its run file.
    ConfigError if there is none."""
    from agentlightning.algorithm.directory import MARK

    found = sorted(RUNS.glob(f"{among}/{MARK}"), key=lambda mark: mark.stat().st_mtime)
    if named is None and not found:
        raise ConfigError(
            f"there is no run to resume below {RUNS.absolute()}; name its directory with --run-dir"
        )
    directory = found[-1].parent if named is None else Path(named).expanduser()
    if not (directory / MARK).is_file():
        newest = f"; the newest run here is in {found[-1].parent}" if found else ""
        raise ConfigError(f"{directory} holds no run to resume{newest}")
    if not (directory / RUN_FILE).is_file():
        raise ConfigError(
            f"{directory} has no {RUN_FILE}: resume the run with the program or command that "
            "started it"
        )
    return str(directory), directory / RUN_FILE


def show_fit(console: Console, result: FitResult) -> None:
    """Print the result of a run, and where it is."""
    from agentlightning.display import near, runnable

    lines = [f"Stopped: {result.stopped_because}, after {result.seconds:.0f} s."]
    rewards = [f"{evaluation.reward:.3f}" for evaluation in result.evaluations]
    if rewards:
        lines.append(
            f"Held-out reward: {rewards[0]}"
            + (f" before, {rewards[-1]} after." if rewards[1:] else ".")
        )
    if result.conclusion is not None:
        lines.append(result.conclusion)
    steps = [
        metrics.values for metrics in result.metrics if "groups_without_variance" in metrics.values
    ]
    if result.conclusion is None and steps and not any(step.get("sequences") for step in steps):
        lines.append(
            f"Nothing was learned: in none of {len(steps)} steps did a group have two different "
            "rewards. Give tasks that are neither always nor never solved, a finer reward, or a "
            "larger group_size."
        )
    lines.append(f"Run:        {near(result.directory)}")
    if exit_code(result.stopped_because):
        lines.append(
            f"Go on:      {runnable(f'agl train --resume --run-dir {near(result.directory)}')}"
        )
    if result.checkpoint is not None:
        best = result.best_checkpoint or result.checkpoint
        lines.append(f"Checkpoint: {near(result.checkpoint)}")
        if best != result.checkpoint:
            lines.append(f"Best:       {near(best)}, by held-out reward")
        if not (result.checkpoint / "tinker.json").exists():  # its weights are on the server
            lines.append(f"Serve it:   {runnable(f'agl serve {near(best)}')}")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def summary(result: FitResult, config: RunConfig) -> dict[str, Any]:
    """The object printed by `--json`."""
    rewards = [evaluation.reward for evaluation in result.evaluations]
    return {
        "run_id": result.run_id,
        "directory": str(result.directory),
        "checkpoint": None if result.checkpoint is None else str(result.checkpoint),
        "best_checkpoint": None if result.best_checkpoint is None else str(result.best_checkpoint),
        "stopped_because": result.stopped_because,
        "conclusion": result.conclusion,
        "reward": {"before": rewards[0], "after": rewards[-1]} if rewards else None,
        "steps": max((metrics.step for metrics in result.metrics), default=0),
        "seconds": round(result.seconds, 3),
        "seed": config.seed,
    }


def exit_code(stopped_because: str) -> int:
    """The exit code: what was saved is complete either way, but scripts must see that the job was
    cut short."""
    from agentlightning.algorithm.base import STOPPED_BY_USER

    return INTERRUPTED if stopped_because == STOPPED_BY_USER else 0


# --- first steps ----------------------------------------------------------------------------------


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), default=".", metavar="[FOLDER]")
@json_option
def init(folder: Path, as_json: bool) -> None:
    """Create a project that trains at once.

    FOLDER (default: here) gets an agent, tasks, a reward, a run file and tests."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(
                f"{folder.resolve()} is not an empty folder; choose an empty or new one"
            )
        shutil.copytree(
            TEMPLATE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", ".*")
        )
        # which would hide files of this package
        (folder / "gitignore").rename(folder / ".gitignore")
    except (OSError, shutil.Error) as error:
        raise ConfigError(f"cannot make {folder}: {error}") from None
    if as_json:
        print_json({"folder": str(folder.resolve())})
        return
    from agentlightning.display import runnable

    click.echo(f"An agent with tasks, a reward and tests is in {folder.resolve()}. Now:\n")
    if folder.resolve() != Path.cwd():
        click.echo(f"  cd {folder}")
    click.echo(
        f"  {runnable('agl train', folder):<22} # about a minute on a laptop, nothing is downloaded"
    )
    click.echo(
        f"  {runnable('pytest', folder):<22} # the checks that come with it (pip install pytest)\n"
    )
    click.echo("README.md explains how to adapt it.")


@click.command()
@click.option("--steps", type=COUNT, help="Number of training steps.")
@json_option
@key_flags(only=("seed", "time_limit", "run_dir", "resume"))
def quickstart(steps: int | None, as_json: bool, **flags: Any) -> int:
    """Train a small example agent from scratch.

    It shows which tool the agent calls first, before and after."""
    from agentlightning.display import terminal

    console = terminal(stderr=as_json)
    example = _example_folder()
    run_file = example / RUN_FILE
    if flags["resume"]:
        flags["run_dir"], run_file = run_to_resume(flags["run_dir"], "quickstart-*")
    elif flags["run_dir"] is None:
        flags["run_dir"] = str(RUNS / f"quickstart-{time.strftime('%Y%m%d-%H%M%S')}")
    sys.path.insert(0, str(example))  # before an `agent.py` of the current folder
    config = load_config(run_file, () if steps is None else (f"algorithm.steps={steps}",), flags)
    result = fit(config, console)
    report = summary(result, config)
    if result.evaluations:
        right: dict[str, str] = load_reference(f"{example / 'tasks.py'}:RIGHT_FIRST_TOOL")
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


def _example_folder() -> Path:
    """The folder of the example, in the installed package or in the checkout."""
    for folder in (_PACKAGE / "examples" / "flight", _PACKAGE.parent / "examples" / "flight"):
        if folder.is_dir():
            return folder
    raise ConfigError(
        "the example example is missing from this installation; install agent-lightning-next again"
    )


def _first_tools(evaluation: Evaluation, right: Mapping[str, str]) -> Shares:
    """For each kind of task, the share of held-out tasks whose first call was a tool; "none" for no
    call."""
    from agentlightning.data.conversations import first_tool

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
        [
            kind.replace("_", " "),
            *(_cell(before[kind][tool], after[kind][tool], tool == right[kind]) for tool in tools),
        ]
        for kind in right
    ]
    title = "First tool called, share of held-out tasks before → after"
    return make_table(("kind of task", *tools), rows, title=title, right=tools)


def _cell(before: float, after: float, right: bool) -> Text:
    return Text(f"{before:.2f} → {after:.2f}", "bold green" if right else "dim")
