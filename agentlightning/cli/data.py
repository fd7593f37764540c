"""The commands that make something of what was recorded: `agl data export`, and `replay` and `explain` beside it.

This module reads command lines and stores, and prints; what a line of a dataset is, is the business of
`agentlightning.data`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, Protocol

import click
import msgspec

from agentlightning.cli.explain import explain
from agentlightning.cli.replay import replay
from agentlightning.cli.rollouts import newest_store
from agentlightning.cli.store import open_store, run
from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.types import And, Condition, Filter, Order

if TYPE_CHECKING:
    from agentlightning.data.export import Recorded, Wanted
    from agentlightning.store.base import LightningStore

_AT_ONCE: Final = 200  # rollouts held in memory, without their spans
_ENDED: Final = ("succeeded", "failed", "cancelled")


@click.group()
def data() -> None:
    """Make datasets of what was recorded, train recorded steps again, explain a rollout."""


data.add_command(replay)
data.add_command(explain)


# --- which rollouts ----------------------------------------------------------------------------------------------


def _where(run_id: str | None, modes: Sequence[str], statuses: Sequence[str]) -> Filter:
    conditions = [Condition("status", "in", list(statuses)), Condition("mode", "in", list(modes))]
    return And(conditions if run_id is None else [*conditions, Condition("run_id", "eq", run_id)])


async def _groups(store: LightningStore, where: Filter) -> AsyncGenerator[list[Recorded]]:
    """The rollouts of each group together, then those without one, each alone."""
    from agentlightning.data.export import Recorded

    group: list[Recorded] = []
    cursor = None
    while True:
        order = [Order(field="group_id"), Order(field="group_index")]
        page = await store.page_rollouts(where, order, limit=_AT_ONCE, cursor=cursor)
        for rollout in page.items:
            if group and (rollout.group_id is None or rollout.group_id != group[0].rollout.group_id):
                yield group
                group = []
            with contextlib.suppress(NotFoundError):  # removed meanwhile
                group.append(Recorded(rollout, await store.query_spans(rollout.rollout_id, "latest")))
        cursor = page.next_cursor
        if cursor is None:
            break
    if group:
        yield group


# --- what is written ---------------------------------------------------------------------------------------------


class _Dataset(Protocol):
    """A file that is being written. `written` counts its lines or rows, `left_out` what is not in it, by reason."""

    written: int
    left_out: Counter[str]

    def add(self, group: list[Recorded]) -> None: ...
    def close(self) -> None: ...


class _JsonLines:
    def __init__(self, file: BinaryIO, wanted: Wanted, kind: str) -> None:
        from agentlightning.data.export import dpo_lines, sft_lines

        self.written = 0
        self.left_out: Counter[str] = Counter()
        self._file, self._wanted = file, wanted
        self._lines = sft_lines if kind == "sft" else dpo_lines

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


_UNITS: Final = {"parquet": "rows", "sft": "conversations", "dpo": "pairs"}


@data.command("export")
@click.argument("address", metavar="[STORE]", required=False)
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
    help="Only of this mode. Repeatable; default all, for sft and dpo all but the held-out val.",
)
@click.option(
    "--status",
    "statuses",
    multiple=True,
    type=click.Choice(_ENDED),
    help="Only of this status. Repeatable; default all that have ended, for sft and dpo succeeded.",
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
@click.option("--server", metavar="URL", help="The `agl server` that has the store open, instead of STORE.")
@click.option("--key", metavar="KEY", envvar="AGL_KEY", show_envvar=True, help="The server's key.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object about what was written.")
def export(
    address: str | None,
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
    server: str | None,
    key: str | None,
    as_json: bool,
) -> int:
    """Write recorded rollouts as a dataset.

    STORE is a SQLite file or a postgresql:// URL; default the newest of agentlightning.sqlite and runs/*."""
    if best_of_group and kind != "sft":
        raise click.UsageError("--best-of-group goes with --format sft")
    if pairs == "all" and kind != "dpo":
        raise click.UsageError("--pairs goes with --format dpo")
    from agentlightning.data.agents import agent_pattern
    from agentlightning.data.export import Wanted

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
    where = _where(
        run_id,
        modes or (("train", "val", "test") if everything else ("train", "test")),
        statuses or (_ENDED if everything else ("succeeded",)),
    )

    if out.exists() and not force:
        raise ConfigError(f"{out} exists already; choose another name, or overwrite it with --force")

    async def work() -> None:
        place = address if server else address or newest_store()
        async with open_store(place, server, key, reading=True) as store:
            rollouts, dataset = await _export(store, where, wanted, kind, out)
        if not dataset.written:
            raise ConfigError(_nothing(kind, rollouts, dataset.left_out, place or str(server)))
        _tell(kind, rollouts, dataset, out, as_json)

    return run(work())


async def _export(store: LightningStore, where: Filter, wanted: Wanted, kind: str, out: Path) -> tuple[int, _Dataset]:
    """How many rollouts were read, and what they gave. Without a line there is no file."""
    rollouts = 0
    with _writing(out) as (file, keep):
        dataset: _Dataset = _Parquet(file, wanted) if kind == "parquet" else _JsonLines(file, wanted, kind)
        with contextlib.closing(dataset), _progress() as show:
            async for group in _groups(store, where):
                dataset.add(group)
                rollouts += len(group)
                show(f"{rollouts:,} rollouts, {dataset.written:,} {_UNITS[kind]}")
        if dataset.written:
            keep()
    return rollouts, dataset


def _tell(kind: str, rollouts: int, dataset: _Dataset, out: Path, as_json: bool) -> None:
    if as_json:
        told = {"file": str(out), _UNITS[kind]: dataset.written, "rollouts": rollouts}
        print(msgspec.json.encode(told | {"left_out": dict(dataset.left_out)}).decode())
        return
    print(f"wrote {dataset.written:,} {_UNITS[kind]} of {rollouts:,} rollouts to {out}")
    for reason, count in dataset.left_out.most_common():
        print(f"left out: {count:,} {reason}")


def _nothing(kind: str, rollouts: int, left_out: Counter[str], place: str) -> str:
    from agentlightning.data.conversations import FROZEN

    if not rollouts:
        return f"no rollout in {place} matches; `agl rollouts ls` shows what there is"
    reasons = "; ".join(f"{count:,} {reason}" for reason, count in left_out.most_common())
    hint = ". Name a model with --model to learn from it although it is not trained" if left_out[FROZEN] else ""
    return f"nothing was written: {rollouts:,} rollouts give no {_UNITS[kind]}. Left out: {reasons}{hint}"


@contextlib.contextmanager
def _progress() -> Generator[Callable[[str], None]]:
    """Shows how far a job is in one line of a terminal; elsewhere nothing."""
    if not sys.stderr.isatty():
        yield lambda told: None
        return
    turns = itertools.count()

    def show(told: str) -> None:
        if next(turns) % 10 == 0:
            click.echo(f"\r{told}\x1b[K", nl=False, err=True)

    try:
        yield show
    finally:
        click.echo("\r\x1b[K", nl=False, err=True)
