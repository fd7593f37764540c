"""`agl init`: a new folder with an agent that can be trained at once."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from agentlightning.cli.options import json_option, print_json
from agentlightning.errors import ConfigError

TEMPLATE = Path(__file__).parents[1] / "templates" / "agent"
RENAMED = {"gitignore": ".gitignore"}  # under its own name it would hide files of this package


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), default=".", metavar="[FOLDER]")
@json_option
def init(folder: Path, as_json: bool) -> None:
    """Make a project in FOLDER (default: here) that trains at once: an agent, tasks, a reward, a run file, tests."""
    make_project(folder)
    if as_json:
        print_json({"folder": str(folder.resolve())})
        return
    here = folder.resolve() == Path.cwd()
    click.echo(f"An agent with tasks, a reward and tests is in {folder.resolve()}. Now:\n")
    if not here:
        click.echo(f"  cd {folder}")
    click.echo("  agl train              # about a minute on a laptop, nothing is downloaded")
    click.echo("  pytest                 # the checks that come with it\n")
    click.echo("README.md says how to make it yours.")


def make_project(folder: Path) -> None:
    """Copy the template. ConfigError where `folder` is a file, is not empty or cannot be written."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder.resolve()} is not an empty folder; name one that is empty or does not exist")
        shutil.copytree(TEMPLATE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        for name, renamed in RENAMED.items():
            (folder / name).rename(folder / renamed)
    except (OSError, shutil.Error) as error:
        raise ConfigError(f"cannot make {folder}: {error}") from None
