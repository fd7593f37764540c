"""`agl init`, a new project that can be trained at once, and `agl quickstart`, which trains one of ours."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console

from agentlightning.cli.options import json_option, print_json
from agentlightning.cli.training import exit_code
from agentlightning.errors import ConfigError

TEMPLATE: Final = Path(__file__).parents[1] / "templates" / "agent"


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), default=".", metavar="[FOLDER]")
@json_option
def init(folder: Path, as_json: bool) -> None:
    """Make a project in FOLDER (default: here) that trains at once: an agent, tasks, a reward, a run file, tests."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder.resolve()} is not an empty folder; name one that is empty or does not exist")
        shutil.copytree(TEMPLATE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        (folder / "gitignore").rename(folder / ".gitignore")  # which would hide files of this package
    except (OSError, shutil.Error) as error:
        raise ConfigError(f"cannot make {folder}: {error}") from None
    if as_json:
        print_json({"folder": str(folder.resolve())})
        return
    click.echo(f"An agent with tasks, a reward and tests is in {folder.resolve()}. Now:\n")
    if folder.resolve() != Path.cwd():
        click.echo(f"  cd {folder}")
    click.echo("  agl train              # about a minute on a laptop, nothing is downloaded")
    click.echo("  pytest                 # the checks that come with it\n")
    click.echo("README.md says how to make it yours.")


@click.command()
@click.option("--seed", type=int, help="The source of all randomness; default 1, or that of the run resumed.")
@click.option("--steps", type=click.IntRange(min=1), help="Training steps, instead of the recipe's.")
@click.option(
    "--time-limit", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="Stop training then."
)
@click.option("--resume", is_flag=True, help="Continue the newest quickstart, or the one in --out.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
    help="Directory of this run; default a new one below runs/.",
)  # fmt: skip
@json_option
def quickstart(as_json: bool, **given: Any) -> int:
    """Train a small tool-using agent from nothing, here and now, and show what it learned."""
    from agentlightning.display import LiveProgress, hide_library_progress
    from agentlightning.quickstart import load_flight_example, run_quickstart

    hide_library_progress()
    total = load_flight_example().recipe.algorithm(given["steps"]).steps
    console = Console(stderr=as_json)
    with LiveProgress(console, steps=total, time_limit=given["time_limit"]) as progress:
        report = run_quickstart(progress, **given)
    report.show(console)
    if as_json:
        print_json(report.summary())
    return exit_code(report.stopped_because)
