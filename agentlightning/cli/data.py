"""The command that makes something of what was recorded: `agl data export`.

This module reads command lines and stores, and prints; what a line of a dataset is, is the business of
`agentlightning.data`.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import click
import msgspec

from agentlightning.cli.options import print_json
from agentlightning.cli.place import STORE_ARGUMENT, Place, newest_store, with_place
from agentlightning.errors import ConfigError
from agentlightning.types import Filter

if TYPE_CHECKING:
    from agentlightning.data.export import Wanted
    from agentlightning.store.base import LightningStore


@click.group()
def data() -> None:
    """Make datasets of what was recorded."""


# --- what is written ---------------------------------------------------------------------------------------------


class _JsonLines:
    """Lines of JSON as they come, as `TransitionFile` has it for rows."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, lines: Sequence[dict[str, Any]]) -> None:
        self._file.writelines(msgspec.json.encode(line) + b"\n" for line in lines)

    def close(self) -> None:
        """The file is closed by whoever opened it."""


@contextlib.contextmanager
def _writing(path: Path, force: bool) -> Generator[tuple[BinaryIO, Callable[[], None]]]:
    """A file that takes its name at the end if it is to be kept, and is not there if anything goes wrong."""
    if path.exists() and not force:
        raise ConfigError(f"{path} exists already; choose another name, or overwrite it with --force")
    draft = path.with_name(f"{path.name}-part")
    kept: list[bool] = []
    try:
        try:
            with draft.open("wb") as file:
                yield file, lambda: kept.append(True)
                file.flush()
                os.fsync(file.fileno())
            if kept:
                draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None


@dataclass
class _Exported:
    """How many rollouts were read and lines or rows written, and what is not among these, by reason."""

    rollouts: int = 0
    written: int = 0
    left_out: Counter[str] = field(default_factory=Counter[str])


_UNITS: Final = {"parquet": "rows", "sft": "conversations", "dpo": "pairs"}


@data.command("export")
@click.option(
    "--format",
    "kind",
    type=click.Choice(list(_UNITS)),
    required=True,
    help="parquet: transitions; sft: conversations to imitate; dpo: pairs to prefer.",
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", required=True)
@click.option("--run", "run_id", metavar="ID", help="Only rollouts of this run.")
@click.option(
    "--mode",
    "modes",
    multiple=True,
    type=click.Choice(["train", "val", "test"]),
    help="Only of this mode. Repeatable; default all, but for parquet not the held-out val.",
)
@click.option(
    "--status",
    "statuses",
    multiple=True,
    type=click.Choice(["succeeded", "failed", "cancelled"]),
    help="Only of this status. Repeatable; default succeeded, for parquet all that have ended.",
)
@click.option("--model", "models", multiple=True, metavar="NAME", help="Learn only from this model, frozen or not.")
@click.option("--agents", metavar="PATTERN", help="Learn only from these agents: 'writer|rewriter'.")
@click.option("--min-reward", type=float, metavar="X", help="Only rollouts of at least this reward.")
@click.option("--best-of-group", is_flag=True, help="sft: only the best rollout of each group.")
@click.option(
    "--pairs",
    type=click.Choice(["best", "all"]),
    default="best",
    show_default=True,
    help="dpo: of each prompt the pair that differs most in reward, or all.",
)
@click.option("--force", is_flag=True, help="Overwrite FILE.")
@with_place(STORE_ARGUMENT, newest_store)
async def export(
    place: Place,
    kind: str,
    out: Path,
    run_id: str | None,
    modes: tuple[str, ...],
    statuses: tuple[str, ...],
    models: tuple[str, ...],
    agents: str | None,
    min_reward: float | None,
    best_of_group: bool,
    pairs: str,
    force: bool,
    as_json: bool,
) -> None:
    """Write recorded rollouts as a dataset.

    STORE is a SQLite file or a postgresql:// URL; default the newest of agentlightning.sqlite and runs/*."""
    if best_of_group and kind != "sft":
        raise click.UsageError("--best-of-group goes with --format sft")
    if pairs == "all" and kind != "dpo":
        raise click.UsageError("--pairs goes with --format dpo")
    from agentlightning.data.agents import agent_pattern
    from agentlightning.data.export import Wanted
    from agentlightning.data.recorded import ENDED, LEARNED_FROM, finished_rollouts

    if agents is not None:
        agent_pattern(agents)  # refused before any store is opened
    wanted = Wanted(
        models=frozenset(models) or None,
        agents=agents,
        min_reward=min_reward,
        best_of_group=best_of_group,
        all_pairs=pairs == "all",
    )
    everything = kind == "parquet"
    where = finished_rollouts(
        run_id,
        modes or (("train", "val", "test") if everything else LEARNED_FROM),
        statuses or (ENDED if everything else ("succeeded",)),
    )

    async with place.open(reading=True) as store:
        done = await _export(store, where, wanted, kind, out, force)
    if not done.written:
        raise ConfigError(_nothing(kind, done, str(place)))
    _tell(kind, done, out, as_json)


async def _export(store: LightningStore, where: Filter, wanted: Wanted, kind: str, out: Path, force: bool) -> _Exported:
    """Without a line there is no file."""
    from agentlightning.data import export
    from agentlightning.data.recorded import recorded_groups
    from agentlightning.data.transition_table import TransitionFile, transition_lines
    from agentlightning.display import counting

    formats = {"sft": export.sft_lines, "dpo": export.dpo_lines}
    lines_of = formats.get(kind, transition_lines)
    done, total = _Exported(), (await store.page_rollouts(where, limit=0, with_total=True)).total
    with _writing(out, force) as (file, keep):
        made = TransitionFile(file) if kind == "parquet" else _JsonLines(file)
        with contextlib.closing(made), counting("rollouts", total) as advance:
            async for group in recorded_groups(store, where):
                found = lines_of(group, wanted)
                made.write(found.lines)
                done.written += len(found.lines)
                done.left_out += found.left_out
                done.rollouts += len(group)
                advance(done.rollouts)
        if done.written:
            keep()
    return done


def _tell(kind: str, done: _Exported, out: Path, as_json: bool) -> None:
    from agentlightning.data.export import FEWEST_LINES

    if as_json:
        told = {"file": str(out), _UNITS[kind]: done.written, "rollouts": done.rollouts}
        print_json(told | {"left_out": dict(done.left_out)})
        return
    print(f"wrote {done.written:,} {_UNITS[kind]} of {done.rollouts:,} rollouts to {out}")
    for reason, count in done.left_out.most_common():
        print(f"left out: {count:,} {reason}")
    if kind in ("sft", "dpo") and done.written < FEWEST_LINES:
        print(f"OpenAI and Azure take no file of fewer than {FEWEST_LINES} lines")


def _nothing(kind: str, done: _Exported, place: str) -> str:
    from agentlightning.data.conversations import FROZEN

    if not done.rollouts:
        return f"no rollout in {place} matches; `agl rollouts ls` shows what there is"
    reasons = "; ".join(f"{count:,} {reason}" for reason, count in done.left_out.most_common())
    hint = ". Name a model with --model to learn from it although it is not trained" if done.left_out[FROZEN] else ""
    return f"nothing was written: {done.rollouts:,} rollouts give no {_UNITS[kind]}. Left out: {reasons}{hint}"
