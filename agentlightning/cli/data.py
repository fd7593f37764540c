"""The commands that make something of what was recorded: `agl data export` and `check`, with `explain`.

This module reads command lines and stores, and prints; what a line of a dataset is, is the business of
`agentlightning.data`.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, Protocol

import click
import msgspec

from agentlightning.cli.as_json import json_option, print_json
from agentlightning.cli.drift import visible
from agentlightning.cli.explain import explain
from agentlightning.cli.place import STORE_ARGUMENT, Place, newest_store, run, with_place
from agentlightning.errors import ConfigError
from agentlightning.types import Filter

if TYPE_CHECKING:
    from agentlightning.data.export import Wanted
    from agentlightning.data.recorded import Recorded
    from agentlightning.store.base import LightningStore

WRONG: Final = 1


@click.group()
def data() -> None:
    """Make datasets of what was recorded, explain a rollout."""


data.add_command(explain)


# --- what is written ---------------------------------------------------------------------------------------------


class _Dataset(Protocol):
    """A file that is being written. `written` counts its lines or rows, `left_out` what is not in it, by reason."""

    written: int
    left_out: Counter[str]

    def add(self, group: list[Recorded]) -> None: ...
    def close(self) -> None: ...


class _JsonLines:
    def __init__(self, file: BinaryIO, wanted: Wanted, kind: str) -> None:
        from agentlightning.data.export import dpo_lines, sft_lines, sharegpt_lines

        self.written = 0
        self.left_out: Counter[str] = Counter()
        self._file, self._wanted = file, wanted
        self._lines = {"sft": sft_lines, "sharegpt": sharegpt_lines, "dpo": dpo_lines}[kind]

    def add(self, group: list[Recorded]) -> None:
        found = self._lines(group, self._wanted)
        for line in found.lines:
            self._file.write(msgspec.json.encode(line) + b"\n")
        self.written += len(found.lines)
        self.left_out += found.left_out

    def close(self) -> None:
        pass


class _Parquet:
    def __init__(self, file: BinaryIO, wanted: Wanted) -> None:
        from agentlightning.data.transition_table import TransitionFile

        self.written = 0
        self.left_out: Counter[str] = Counter()
        self._table, self._wanted = TransitionFile(file), wanted

    def add(self, group: list[Recorded]) -> None:
        from agentlightning.data.export import LOW_REWARD, NO_CALL
        from agentlightning.data.transition_table import transition_rows

        for recorded in group:
            rows = transition_rows(recorded, self._wanted)
            least, reward = self._wanted.min_reward, rows[0]["reward"] if rows else None
            if not rows:
                self.left_out[NO_CALL] += 1
            elif least is not None and (reward is None or reward < least):
                self.left_out[LOW_REWARD] += 1
            else:
                self._table.write(rows)
                self.written += len(rows)

    def close(self) -> None:
        self._table.close()


@contextlib.contextmanager
def _writing(path: Path) -> Generator[tuple[BinaryIO, Callable[[], None]]]:
    """A file that takes its name at the end if it is to be kept, and is not there if anything goes wrong."""
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


_UNITS: Final = {"parquet": "rows", "sft": "conversations", "sharegpt": "conversations", "dpo": "pairs"}


@data.command("export")
@click.option(
    "--format",
    "kind",
    type=click.Choice(list(_UNITS)),
    required=True,
    help="parquet: transitions; sft, sharegpt: conversations to imitate; dpo: pairs to prefer.",
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
@click.option("--best-of-group", is_flag=True, help="sft, sharegpt: only the best rollout of each group.")
@click.option(
    "--pairs",
    type=click.Choice(["best", "all"]),
    default="best",
    show_default=True,
    help="dpo: of each prompt the pair that differs most in reward, or all.",
)
@click.option("--force", is_flag=True, help="Overwrite FILE.")
@with_place(STORE_ARGUMENT, newest_store)
def export(
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
) -> int:
    """Write recorded rollouts as a dataset.

    STORE is a SQLite file or a postgresql:// URL; default the newest of agentlightning.sqlite and runs/*."""
    if best_of_group and kind not in ("sft", "sharegpt"):
        raise click.UsageError("--best-of-group goes with --format sft and sharegpt")
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

    if out.exists() and not force:
        raise ConfigError(f"{out} exists already; choose another name, or overwrite it with --force")

    async def work() -> None:
        async with place.open(reading=True) as store:
            rollouts, dataset = await _export(store, where, wanted, kind, out)
        if not dataset.written:
            raise ConfigError(_nothing(kind, rollouts, dataset.left_out, str(place)))
        _tell(kind, rollouts, dataset, out, as_json)

    return run(work())


async def _export(store: LightningStore, where: Filter, wanted: Wanted, kind: str, out: Path) -> tuple[int, _Dataset]:
    """How many rollouts were read, and what they gave. Without a line there is no file."""
    from agentlightning.data.recorded import recorded_groups
    from agentlightning.display import counting

    rollouts, total = 0, (await store.page_rollouts(where, limit=0, with_total=True)).total
    with _writing(out) as (file, keep):
        dataset: _Dataset = _Parquet(file, wanted) if kind == "parquet" else _JsonLines(file, wanted, kind)
        with contextlib.closing(dataset), counting("rollouts", total) as advance:
            async for group in recorded_groups(store, where):
                dataset.add(group)
                rollouts += len(group)
                advance(rollouts)
        if dataset.written:
            keep()
    return rollouts, dataset


def _tell(kind: str, rollouts: int, dataset: _Dataset, out: Path, as_json: bool) -> None:
    from agentlightning.data.fine_tuning import FEWEST_LINES

    if as_json:
        told = {"file": str(out), _UNITS[kind]: dataset.written, "rollouts": rollouts}
        print_json(told | {"left_out": dict(dataset.left_out)})
        return
    print(f"wrote {dataset.written:,} {_UNITS[kind]} of {rollouts:,} rollouts to {out}")
    for reason, count in dataset.left_out.most_common():
        print(f"left out: {count:,} {reason}")
    if kind in ("sft", "dpo") and dataset.written < FEWEST_LINES:
        print(f"OpenAI and Azure take no file of fewer than {FEWEST_LINES} lines")


def _nothing(kind: str, rollouts: int, left_out: Counter[str], place: str) -> str:
    from agentlightning.data.conversations import FROZEN

    if not rollouts:
        return f"no rollout in {place} matches; `agl rollouts ls` shows what there is"
    reasons = "; ".join(f"{count:,} {reason}" for reason, count in left_out.most_common())
    hint = ". Name a model with --model to learn from it although it is not trained" if left_out[FROZEN] else ""
    return f"nothing was written: {rollouts:,} rollouts give no {_UNITS[kind]}. Left out: {reasons}{hint}"


@data.command("check")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE.jsonl")
@click.option("--most", type=click.IntRange(min=1), default=20, show_default=True, help="Problems to show.")
@json_option
def check(file: Path, most: int, as_json: bool) -> int:
    """Check a fine-tuning file, whoever wrote it, for what OpenAI and Azure would refuse.

    Names the line and the reason; exits with 1 where there is one."""
    from agentlightning.data.fine_tuning import file_problems

    try:
        with file.open("rb") as lines:
            found = list(file_problems(lines))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from None
    if as_json:
        problems = [{"line": one.line, "problem": one.problem.what, "where": one.problem.where} for one in found]
        print_json({"file": str(file), "problems": problems})
    elif not found:
        print(f"{file}: nothing wrong")
    else:
        for one in found[:most]:
            print(f"{file}{'' if one.line is None else f':{one.line}'}: {visible(str(one.problem))}")
        if len(found) > most:
            print(f"{len(found) - most:,} more")
    return WRONG if found else 0
