"""`agl runs`: lists runs, and shows their metrics.

This module finds runs in the stores below a folder, in one store or at a server. It does not know what metrics mean.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from agentlightning.cli.options import STATUSES, make_table, note, print_json, print_table, squeezed
from agentlightning.cli.place import ANY_RUN, RUNS, STORE_FILE, UNNAMED, Place, stores_below, with_place
from agentlightning.errors import ConfigError, NotFoundError, UnavailableError, nearest
from agentlightning.types import And, Condition, Metrics, Run

if TYPE_CHECKING:
    from rich.table import Table

    from agentlightning.store.base import LightningStore

watch_option: Final = click.option(
    "--watch", type=click.FloatRange(min=0.1), metavar="SECONDS", help="Refresh every so many seconds until Ctrl-C."
)


@dataclass(frozen=True)
class StoredRun:
    """A run, its metrics by step, and its store."""

    place: Place
    run: Run
    history: tuple[Metrics, ...]

    @property
    def newest(self) -> dict[str, float]:
        """The last value of each metric."""
        return {name: value for metrics in self.history for name, value in metrics.values.items()}

    def curve(self, name: str) -> list[tuple[float, float]]:
        """A metric by training step."""
        return [(metrics.step, value) for metrics in self.history if (value := metrics.values.get(name)) is not None]


class ListingGroup(click.Group):
    """A group whose default command is `ls`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (self.get_command(ctx, args[0]) is None and args[0] not in ctx.help_option_names):
            mistyped = args and get_close_matches(args[0], self.commands) and not Path(args[0]).exists()
            args = args if mistyped else ["ls", *args]
        return super().parse_args(ctx, args)


@click.group(cls=ListingGroup)
def runs() -> None:
    """List, show, compare, stop and delete runs.

    The default command is ls."""


# --- finding -----------------------------------------------------------------------------------------------------


async def stored_runs(path: Path, place: Place) -> list[StoredRun]:
    """The runs of the named store or server, or else of the stores below `path`, oldest first."""
    found: list[StoredRun] = []
    places = [place] if place.named else list(map(Place, stores_below(path)))
    for source in places:
        try:
            async with source.open(reading=True) as store:
                for run in await store.query_runs():
                    found.append(StoredRun(source, run, tuple(await store.query_metrics(run.run_id))))
        except ConfigError as error:
            if len(places) == 1:
                raise
            note(f"left out: {error}")
    return sorted(found, key=lambda stored: stored.run.start_time)


async def choose_run(name: str | None, place: Place) -> StoredRun:
    """The run with this id, beginning of an id, or directory; without a name, the newest.

    NotFoundError if no run has the name, or several have; ConfigError for the directory of a run that is stored
    elsewhere, unless `place` says where."""
    from agentlightning.algorithm.directory import MARK, read_mark

    run_id = name or ""
    if name and (directory := Path(name)).is_dir():
        own = directory / STORE_FILE
        if not own.is_file() and not place.named:
            raise ConfigError(f"the run in {name} is stored elsewhere; give --store or --server")
        run_id = read_mark(directory).run_id if (directory / MARK).is_file() or not own.is_file() else ""
        place = Place(str(own)) if own.is_file() else place  # which may hold others beside it
    found = await stored_runs(RUNS, place)
    if not found and not run_id:
        raise NotFoundError(f"there is no run in {name or place}; name another place with --store or --server")
    if not found:
        raise NotFoundError(f"there is no run {name!r}: {place} has no run at all; --store or --server name another")
    alike = [stored for stored in found if stored.run.run_id == run_id]
    alike = alike or ([stored for stored in found if stored.run.run_id.startswith(run_id)] if run_id else found[-1:])
    if len(alike) != 1:
        ids, reason = [stored.run.run_id for stored in alike or found], "more than one run" if alike else "no run"
        raise NotFoundError(
            f"there is {reason} called {run_id!r}; {nearest(run_id, ids)}. A run's directory is a name too"
        )
    return alike[0]


# --- ls ----------------------------------------------------------------------------------------------------------


@runs.command()
@click.argument("path", type=click.Path(path_type=Path), default=RUNS)
@watch_option
@with_place(UNNAMED)
async def ls(path: Path, watch: float | None, place: Place, as_json: bool) -> None:
    """List runs.

    PATH is a store file, or a folder with the stores of runs below it (default: runs)."""

    async def show() -> None:
        found = await stored_runs(path, place)
        if not as_json:
            print_table(runs_table(found))
            return
        for stored in found:
            steps = stored.history[-1].step if stored.history else 0
            print_json({"where": str(stored.place), "run": stored.run, "metrics": stored.newest, "steps": steps})

    await repeated(show, watch, as_json)


async def repeated(show: Callable[[], Awaitable[None]], watch: float | None, as_json: bool) -> None:
    """Show something; with `watch`, again and again on a cleared screen, even while a server is away."""
    if watch and as_json:
        raise click.UsageError("--watch shows a table: omit --json")
    await show()
    while watch:
        await asyncio.sleep(watch)
        click.clear()
        try:
            await show()
        except UnavailableError as error:
            click.echo(str(error), err=True)


def runs_table(found: Sequence[StoredRun]) -> Table:
    """A line per run, with its reward as a curve."""
    from agentlightning.display import duration, sparkline

    names = ("run", "kind", "status", "started", "took", "step", "reward", "", "held-out", "rollouts/s", "store")
    rows: list[tuple[object, ...]] = []
    for stored in found:
        run, newest = stored.run, stored.newest
        heard = stored.history[-1].time if stored.history else run.start_time
        ended = run.end_time or (time.time() if run.status == "running" else heard)
        rewards = [value for _, value in stored.curve("reward")]
        rows.append(
            (
                run.run_id,
                run.kind,
                run.status,
                time.strftime("%Y-%m-%d %H:%M", time.localtime(run.start_time)),
                duration(max(0.0, ended - run.start_time)),
                stored.history[-1].step if stored.history else None,
                newest.get("reward"),
                sparkline(squeezed(rewards, 20)),
                newest.get("val_reward"),
                newest.get("rollouts_per_second"),
                str(stored.place),
            )
        )
    return make_table(names, rows)


# --- show --------------------------------------------------------------------------------------------------------


@runs.command()
@click.argument("name", metavar="[RUN]", required=False)
@with_place(ANY_RUN)
async def show(name: str | None, place: Place, as_json: bool) -> None:
    """Show a run with its settings and metrics.

    RUN is an id, the beginning of one, or a directory; default: the newest run below runs/."""

    stored = await choose_run(name, place)
    async with stored.place.open(reading=True) as store:
        counts = await count_rollouts(store, stored.run.run_id)
    if as_json:
        print_json({"where": str(stored.place), "run": stored.run, "rollouts": counts, "metrics": stored.history})
        return
    print_table(runs_table([stored]))
    if stored.run.status == "stopped":
        from agentlightning.display import resume_command

        where = Path(str(stored.place)).parent if Path(str(stored.place)).name == STORE_FILE else None
        click.echo(f"stopped unexpectedly; resume it with: {resume_command(where, stored.run.manifest)}")
    click.echo(f"rollouts: {', '.join(f'{count:,} {status}' for status, count in counts.items()) or 'none'}")
    from agentlightning.tracing.tree import printable

    manifest = stored.run.manifest
    settings = {name: manifest.get(name) for name in ("seed", "commit")}
    settings["command"] = " ".join(map(str, manifest.get("command", ())))
    settings["policy version"] = stored.run.policy_version or None
    for setting, value in settings.items():
        if value not in (None, ""):
            click.echo(printable(f"{setting}: {value}"))
    print_table(_metrics_table(stored))


async def count_rollouts(store: LightningStore, run_id: str) -> dict[str, int]:
    """How many of a run's rollouts have each status, without zeros."""
    counts: dict[str, int] = {}
    for status in STATUSES:
        where = And([Condition("run_id", "eq", run_id), Condition("status", "eq", status)])
        total = (await store.page_rollouts(where, limit=0, with_total=True)).total
        counts |= {status: total} if total else {}
    return counts


def _metrics_table(stored: StoredRun) -> Table:
    from agentlightning.display import sparkline

    rows: list[tuple[object, ...]] = []
    for name in sorted(stored.newest):
        values = [value for _, value in stored.curve(name)]
        low, high = min(values), max(values)
        rows.append((name, values[0], low, high, values[-1], sparkline(squeezed(values, 30), span=(low, high))))
    return make_table(("metric", "first", "least", "most", "last", ""), rows)
