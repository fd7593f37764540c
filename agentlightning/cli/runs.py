"""`agl runs`: lists, shows and compares runs, and stops, names and deletes them.

This module finds runs in the stores below a folder, in one store or at a server. It does not know
what metrics mean."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from agentlightning.cli.options import (
    STATUSES,
    make_table,
    note,
    print_json,
    print_result,
    print_table,
    resampled,
)
from agentlightning.cli.store_location import (
    ANY_RUN,
    RUNS,
    STORE_FILE,
    StoreLocation,
    with_location,
)
from agentlightning.cli.stored_runs import StoredRun, choose_run, stored_runs
from agentlightning.errors import (
    ConflictError,
    UnavailableError,
)
from agentlightning.types import And, Condition, Not, Run

if TYPE_CHECKING:
    from rich.table import Table

    from agentlightning.store.base import LightningStore

watch_option: Final = click.option(
    "--watch",
    type=click.FloatRange(min=0.1),
    metavar="SECONDS",
    help="Refresh every so many seconds until Ctrl-C.",
)


_OPTIONAL: Final = ("name", "why it ended")  # columns of the list
_SHORT: Final = 60  # characters of a reason there
_ALWAYS_COMPARED: Final = ("status", "took", "steps", "reward", "val_reward before", "val_reward")


class ListingGroup(click.Group):
    """A group whose default command is `ls`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (
            self.get_command(ctx, args[0]) is None and args[0] not in ctx.help_option_names
        ):
            mistyped = (
                args and get_close_matches(args[0], self.commands) and not Path(args[0]).exists()
            )
            args = args if mistyped else ["ls", *args]
        return super().parse_args(ctx, args)


@click.group(cls=ListingGroup)
def runs() -> None:
    """List, show, compare, stop and delete runs.

    The default command is ls."""


# --- ls -------------------------------------------------------------------------------------------


@runs.command()
@click.argument("path", type=click.Path(path_type=Path), default=RUNS)
@watch_option
@with_location(ANY_RUN)
async def ls(path: Path, watch: float | None, place: StoreLocation, as_json: bool) -> None:
    """List runs.

    PATH is a store file, or a folder with the stores of runs below it (default: runs)."""

    async def show() -> None:
        found = await stored_runs(path, place)
        if not as_json:
            print_table(runs_table(found))
            return
        for stored in found:
            steps = stored.history[-1].step if stored.history else 0
            print_json(
                {
                    "where": str(stored.place),
                    "run": stored.run,
                    "metrics": stored.newest,
                    "steps": steps,
                }
            )

    await repeated(show, watch, as_json)


async def repeated(show: Callable[[], Awaitable[None]], watch: float | None, as_json: bool) -> None:
    """Show something; with `watch`, again and again on a cleared screen, even while a server is
    away."""
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
    """A line per run, with its reward as a curve. Columns in which all cells are empty are left
    out."""
    from agentlightning.display import sparkline
    from agentlightning.tracing.tree import one_line

    names = (
        "run",
        "name",
        "kind",
        "status",
        "started",
        "took",
        "step",
        "reward",
        "",
        "held-out",
        "rollouts/s",
        "why it ended",
        "store",
    )
    rows: list[tuple[object, ...]] = []
    for stored in found:
        run = stored.run
        newest = stored.newest
        rewards = [value for _, value in stored.curve("reward")]
        rows.append(
            (
                run.run_id,
                _name(run),
                run.kind,
                run.status,
                time.strftime("%Y-%m-%d %H:%M", time.localtime(run.start_time)),
                _duration(stored),
                stored.history[-1].step if stored.history else None,
                newest.get("reward"),
                sparkline(resampled(rewards, 20)),
                newest.get("val_reward"),
                newest.get("rollouts_per_second"),
                one_line(_end_reason(run), _SHORT),
                str(stored.place),
            )
        )
    kept = [
        index
        for index, name in enumerate(names)
        if name not in _OPTIONAL or any(row[index] for row in rows)
    ]
    return make_table(
        [names[index] for index in kept], [[row[index] for index in kept] for row in rows]
    )


def _name(run: Run) -> str:
    """The name that a run was given, and its tags: `baseline #seed-0 #math`."""
    tags = [f"#{tag}" for tag in run.manifest.get("tags", ())]
    return " ".join([*filter(None, [run.manifest.get("name")]), *tags])


def _end_reason(run: Run) -> str:
    """Why a run ended, unless it ended well."""
    return str(run.manifest.get("reason") or "") if run.status in ("failed", "cancelled") else ""


def _duration(stored: StoredRun) -> str:
    from agentlightning.display import duration

    run = stored.run
    heard = stored.history[-1].time if stored.history else run.start_time
    ended = run.end_time or (time.time() if run.status == "running" else heard)
    return duration(max(0.0, ended - run.start_time))


# --- show -----------------------------------------------------------------------------------------


@runs.command()
@click.argument("name", metavar="[RUN]", required=False)
@with_location(ANY_RUN)
async def show(name: str | None, place: StoreLocation, as_json: bool) -> None:
    """Show a run with its settings and metrics.

    RUN is an id, the beginning of one, a name, or a directory; default: the newest run below
    runs/."""
    from agentlightning.tracing.tree import printable

    stored = await choose_run(name, place)
    async with stored.place.open(reading=True) as store:
        counts = await count_rollouts(store, stored.run.run_id)
    if as_json:
        print_json(
            {
                "where": str(stored.place),
                "run": stored.run,
                "rollouts": counts,
                "metrics": stored.history,
            }
        )
        return
    print_table(runs_table([stored]))
    if (why := _end_reason(stored.run)) and stored.run.status == "failed":
        click.secho(f"failed: {printable(why)}", fg="red", bold=True)
    elif why:
        click.echo(f"{stored.run.status}: {printable(why)}")
    if stored.run.status == "stopped":
        from agentlightning.display import resume_command

        where = (
            Path(str(stored.place)).parent if Path(str(stored.place)).name == STORE_FILE else None
        )
        click.echo(
            f"stopped unexpectedly; resume it with: {resume_command(where, stored.run.manifest)}"
        )
    click.echo(
        "rollouts: "
        f"{', '.join(f'{count:,} {status}' for status, count in counts.items()) or 'none'}"
    )
    manifest = stored.run.manifest
    if manifest.get("conclusion"):
        click.echo(printable(str(manifest["conclusion"])))
    settings = {name: manifest.get(name) for name in ("seed", "commit")}
    settings["command"] = " ".join(map(str, manifest.get("command", ())))
    settings["policy version"] = stored.run.policy_version or None
    for setting, value in settings.items():
        if value not in (None, ""):
            click.echo(printable(f"{setting}: {value}"))
    print_table(_metrics_table(stored))


async def count_rollouts(store: LightningStore, run_id: str) -> dict[str, int]:
    """Count a run's rollouts by status, without zeros."""
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
        low = min(values)
        high = max(values)
        rows.append(
            (
                name,
                values[0],
                low,
                high,
                values[-1],
                sparkline(resampled(values, 30), span=(low, high)),
            )
        )
    return make_table(("metric", "first", "least", "most", "last", ""), rows)


# --- diff -----------------------------------------------------------------------------------------


@runs.command()
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@with_location(ANY_RUN)
async def diff(first: str, second: str, place: StoreLocation, as_json: bool) -> None:
    """Show two runs side by side.

    The settings that differ come first, then the results; with --json, equal results too.
    `agl eval --compare A B` says whether the difference of the results is more than chance."""
    sides = [await choose_run(name, place) for name in (first, second)]
    ours, theirs = (_settings(stored.run) for stored in sides)
    names = dict.fromkeys([*ours, *theirs])
    settings = {
        name: [ours.get(name), theirs.get(name)]
        for name in names
        if ours.get(name) != theirs.get(name)
    }
    mine, other = map(_results, sides)
    results = {name: [mine.get(name), other.get(name)] for name in dict.fromkeys([*mine, *other])}
    if as_json:
        print_json(
            {
                "runs": [stored.run.run_id for stored in sides],
                "settings": settings,
                "results": results,
            }
        )
        return
    columns = [_name(stored.run) or stored.run.run_id for stored in sides]
    print_table(
        make_table(
            ("setting", *columns),
            [(name, *map(_cell_text, pair)) for name, pair in settings.items()],
        )
    )
    shown = {
        name: pair
        for name, pair in results.items()
        if pair[0] != pair[1] or name in _ALWAYS_COMPARED
    }
    print_table(make_table(("result", *columns), [(name, *pair) for name, pair in shown.items()]))


def _cell_text(value: object) -> object:
    return "" if value is None else str(value)


def _settings(run: Run) -> dict[str, Any]:
    """The settings of a run by dotted key, with its seed, commit, data and packages."""
    from agentlightning.dashboard.run_views import dotted

    known = {name: run.manifest.get(name) for name in ("seed", "commit", "data", "packages")}
    return dict(dotted({**run.manifest.get("config", {}), **known}))


def _results(stored: StoredRun) -> dict[str, Any]:
    """The end of a run, and the last value of each metric; of the held-out reward, the first
    too."""
    held_out = [value for _, value in stored.curve("val_reward")]
    first = {"val_reward before": held_out[0]} if len(held_out) > 1 else {}
    steps = stored.history[-1].step if stored.history else 0
    how = {
        "status": stored.run.status,
        "why it ended": _end_reason(stored.run) or None,
        "took": _duration(stored),
        "steps": steps,
    }
    return {name: value for name, value in how.items() if value is not None} | first | stored.newest


# --- changing -------------------------------------------------------------------------------------


async def _change(stored: StoredRun, merge: Mapping[str, Any]) -> Run:
    """Change a run's manifest, through its own process while that runs."""
    async with stored.place.open() as store:
        return await store.update_run(stored.run.run_id, merge=merge)


@runs.command()
@click.argument("name", metavar="RUN")
@with_location(ANY_RUN)
async def stop(name: str, place: StoreLocation, as_json: bool) -> None:
    """Ask a running run to end after its step.

    The run then saves, as after Ctrl-C in its terminal, and `agl train --resume` continues it."""
    stored = await choose_run(name, place)
    if stored.run.status != "running":
        raise ConflictError(f"the run {stored.run.run_id} does not run: it is {stored.run.status}")
    run = await _change(stored, {"stop": True})
    print_result(
        as_json,
        run,
        f"{run.run_id} will end after its present step; Ctrl-C in its terminal ends it sooner",
    )


@runs.command()
@click.argument("name", metavar="RUN")
@click.argument("new", metavar="NAME")
@with_location(ANY_RUN)
async def rename(name: str, new: str, place: StoreLocation, as_json: bool) -> None:
    """Give a run a name.

    The run keeps its id, and commands take its name for it. An empty NAME removes the name."""
    run = await _change(await choose_run(name, place), {"name": new or None})
    print_result(
        as_json, run, f"{run.run_id} is called {new}" if new else f"{run.run_id} has no name"
    )


@runs.command()
@click.argument("name", metavar="RUN")
@click.argument("tags", metavar="TAG…", nargs=-1, required=True)
@click.option("--remove", is_flag=True, help="Remove the tags instead.")
@with_location(ANY_RUN)
async def tag(
    name: str, tags: tuple[str, ...], remove: bool, place: StoreLocation, as_json: bool
) -> None:
    """Tag a run, or remove tags."""
    stored = await choose_run(name, place)
    before = stored.run.manifest.get("tags", [])
    kept = [each for each in before if not (remove and each in tags)]
    after = kept if remove else list(dict.fromkeys([*kept, *tags]))
    run = await _change(stored, {"tags": after or None})
    print_result(
        as_json,
        run,
        f"{run.run_id} has the tags {', '.join(after)}" if after else f"{run.run_id} has no tags",
    )


@runs.command()
@click.argument("name", metavar="RUN")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option(
    "--force",
    is_flag=True,
    help="Also a run that counts as running: its process died far from its server.",
)
@with_location(ANY_RUN)
async def delete(name: str, yes: bool, force: bool, place: StoreLocation, as_json: bool) -> int:
    """Delete a run for good.

    Its metrics and rollouts go with it and, if it has a folder of its own, that folder with its
    checkpoints. A folder that holds anything else stays."""
    stored = await choose_run(name, place)
    run_id = stored.run.run_id
    if stored.run.status == "running" and not force:
        raise ConflictError(f"the run {run_id} is running; stop it first: agl runs stop {run_id}")
    folder, strangers = await _own_folder(stored, Path(name))
    with_folder = folder is not None and not strangers
    async with stored.place.open(reading=True) as store:
        rollouts = sum((await count_rollouts(store, run_id)).values())
    what = f"the run {run_id} with {rollouts:,} rollouts" + (
        f" and its folder {folder}" if with_folder else ""
    )
    if not yes and not await asyncio.to_thread(
        click.confirm, f"delete {what}, for good?", err=True
    ):
        return 1
    async with stored.place.open() as store:
        if stored.run.status in ("stopped", "running"):  # its process could not say that it ended
            await store.update_run(run_id, "failed")
        deleted = await store.delete_run(run_id)
    if folder is not None and with_folder:
        await asyncio.to_thread(shutil.rmtree, folder)
    elif folder is not None:
        note(f"left {folder}, which holds other things too: {', '.join(strangers)}")
    done = {"run_id": run_id, "folder": str(folder) if with_folder else None, "deleted": deleted}
    print_result(as_json, done, f"deleted {what}")
    return 0


async def _own_folder(stored: StoredRun, named: Path) -> tuple[Path | None, list[str]]:
    """The folder of a run, beside its store or named, and what is in it that is not the run's."""
    from agentlightning.algorithm.directory import MARK, not_the_runs, read_mark

    beside = Path(str(stored.place.address)).parent
    run_id = stored.run.run_id
    for folder in (beside, named):
        if not (folder / MARK).is_file() or read_mark(folder).run_id != run_id:
            continue
        strangers = not_the_runs(folder)
        if (folder / STORE_FILE).is_file():
            async with StoreLocation(str(folder / STORE_FILE)).open(reading=True) as store:
                strangers += [
                    run.run_id for run in await store.query_runs() if run.run_id != run_id
                ]
                others = await store.page_rollouts(
                    Not(Condition("run_id", "eq", run_id)), limit=0, with_total=True
                )
                strangers += (
                    [f"{others.total} rollouts of no run"] if others.total and not strangers else []
                )
        return folder, strangers
    return None, []
