"""`agl replay`: trains recorded steps of a run again; `cli.replaying` does it."""

from __future__ import annotations

import re
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import click

from agentlightning.cli.store_location import StoreOption, store_option, with_location
from agentlightning.errors import ConfigError


def steps_in(text: str) -> tuple[int, int]:
    """`4` → (4, 4), `2-4` → (2, 4). UsageError for anything else."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise click.BadParameter(f"{text!r} is no step and no range of steps; write 4, or 2-4")
    return first, last


def token_in(text: str) -> tuple[int, int]:
    """`2:5` → (2, 5), `2`, the first token of call 2, → (2, 0). UsageError for anything else."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if match is None:
        raise click.BadParameter(
            f"{text!r} is no token of a call; write CALL or CALL:TOKEN, such as 0:3"
        )
    return int(match[1]), int(match[2] or 0)


@click.command()
@click.argument(
    "directory", metavar="RUN_DIR", type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@click.option(
    "--steps",
    type=steps_in,
    metavar="N|A-B",
    help="Default: what led to the newest checkpoint.",
)
@click.option(
    "--explain",
    "token_of",
    type=(str, token_in),
    metavar="ID CALL:TOKEN",
    help=(
        "Show a token's way from reward to gradient instead, by number, with the weights of the "
        "step that trained it."
    ),
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Save the weights there.",
)
@click.option(
    "--run-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="RUN.yaml",
    help="The algorithm, where the run does not say it all.",
)
@click.option(
    "--model",
    metavar="ID|DIR|FILE.py:NAME",
    help="The model it started from, if not what the run says.",
)
@with_location(StoreOption(store_option("The run's store, if it is not in RUN_DIR.")))
def replay(out: Path | None, **options: Any) -> Coroutine[Any, Any, int]:
    """Train recorded steps of a run again.

    Starts from the newest checkpoint before them and compares the weights with what the run saved.

    Needs neither engine nor agents. Exits with 1 where the weights differ."""
    from agentlightning.cli.replaying import replay_steps

    if out is not None and out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; choose another directory")
    return replay_steps(out=out, **options)
