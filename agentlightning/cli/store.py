"""The commands that keep a store healthy: `agl store gc`, `erase`, `check`, `backup`, `restore`, `export`, `import`.

This module reads command lines and prints; what is done is the business of `agentlightning.store`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from agentlightning.cli.as_json import json_option, tell
from agentlightning.cli.durations import Duration
from agentlightning.errors import ConfigError, InUseError, InvalidError
from agentlightning.types import Condition, Deleted, Filter

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore
    from agentlightning.store.calls import DeleteRollouts

_POSTGRES: Final = ("postgresql://", "postgres://")
_PATIENCE_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 1.0


@click.group()
def store() -> None:
    """Keep a store healthy: remove what is old, back it up, move it, check it."""


# --- which store -------------------------------------------------------------------------------------------------


def store_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--store`, `--server` and `--key`, as `open_store` takes them, and `--json`, as `tell` does."""
    for add in (
        json_option,
        click.option("--key", metavar="KEY", envvar="AGL_KEY", show_envvar=True, help="An admin key of the server."),
        click.option("--server", metavar="URL", help="The `agl server` that has the store open."),
        click.option("--store", "address", metavar="PATH|URL", help="SQLite file, or postgresql:// URL, to open here."),
    ):
        command = add(command)
    return command


def reading_options(*, store: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`--json`, `--server`, `--key` and, unless a command has another word for it, `--store`, of commands that show."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        named = click.option("--store", "address", metavar="PATH|URL",
                             help="SQLite file or postgresql://…; default what is found below runs/.")  # fmt: skip
        for option in (
            json_option,
            click.option("--key", metavar="KEY", envvar="AGL_KEY", show_envvar=True, help="The server's key."),
            click.option("--server", metavar="URL", help="Ask this `agl server` instead."),
            *([named] if store else []),
        ):
            command = option(command)
        return command

    return add


@contextlib.asynccontextmanager
async def open_store(
    address: str | None, server: str | None, key: str | None, *, create: bool = False, reading: bool = False
) -> AsyncGenerator[LightningStore]:
    """The store that the options name; one that does not exist is only made if `create`. For `reading`, a file that
    another process uses is as good as any."""
    if (address is None) == (server is None):
        raise click.UsageError("say which store: either --store PATH (or a postgresql:// URL), or --server URL")
    if server is not None:
        from agentlightning.server.local_keys import local_key
        from agentlightning.store.client import LightningStoreClient

        # Somebody waits before a terminal: a mistyped URL should not take a minute.
        opened: LightningStore = LightningStoreClient(server, key or local_key(server), patience=_PATIENCE_SECONDS)
    else:
        from agentlightning.store.reading import StoreReader
        from agentlightning.store.sql import SqlStore

        assert address is not None
        if not create:
            _require_file(address)
        try:
            # Whoever waits before a terminal may take their time, and ends a query themselves.
            opened = await (StoreReader.open(address) if reading else SqlStore.open(address, read_seconds=math.inf))
        except InUseError as error:
            raise InUseError(f"{error}; with --server URL instead of --store that process is asked") from None
    try:
        yield opened
    finally:
        await opened.close()


def _require_file(address: str) -> None:
    """A mistyped path would otherwise become a new store."""
    if not address.startswith(_POSTGRES) and not Path(address).is_file():
        raise ConfigError(f"there is no store at {address} (looked in {Path.cwd()})")


def run(work: Coroutine[Any, Any, int | None]) -> int:
    """Run a command's work; its exit code."""
    return asyncio.run(work) or 0


# --- removing ----------------------------------------------------------------------------------------------------


@store.command()
@store_options
@click.option("--older-than", "age", type=Duration(), required=True, help="How long ago rollouts ended: 30d, 12h, 45m.")
@click.option("--keep-rewards", is_flag=True, help="Keep rollouts, attempts and rewards; remove inputs, other spans.")
@click.option("--project", help="Only rollouts of this project.")
@click.option("--dry-run", is_flag=True, help="Only count.")
def gc(
    address: str | None,
    server: str | None,
    key: str | None,
    age: float,
    as_json: bool,
    keep_rewards: bool,
    project: str | None,
    dry_run: bool,
) -> int:
    """Remove rollouts that ended long ago, with their attempts and spans; those of a group when all of it did."""
    from agentlightning.store import calls
    from agentlightning.store.retention import ended_before

    async def work() -> None:
        async with open_store(address, server, key) as opened:
            where = ended_before(await opened.perform(calls.GetTime()) - age)
            if dry_run:
                page = await opened.page_rollouts(where, limit=0, with_total=True, project=project)
                words = f"{page.total} rollouts ended before that; nothing was removed"
                tell(as_json, {"rollouts_found": page.total, **msgspec.structs.asdict(Deleted())}, words)
                return
            deleted = await _delete(
                opened, calls.DeleteRollouts(where=where, keep_rewards=keep_rewards, project=project)
            )
            tell(as_json, deleted, _removed(deleted))

    return run(work())


@store.command()
@store_options
@click.option("--task", metavar="TEXT", help="Rollouts whose input contains this.")
@click.option("--rollout", "rollout_id", metavar="ID", help="This rollout.")
@click.option("--run", "run_id", metavar="ID", help="All rollouts of this run.")
@click.option("--project", help="Only rollouts of this project.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def erase(
    address: str | None,
    server: str | None,
    key: str | None,
    task: str | None,
    rollout_id: str | None,
    run_id: str | None,
    project: str | None,
    yes: bool,
    as_json: bool,
) -> int:
    """Remove rollouts for good, leaving no trace in the files.

    Unfinished ones are cancelled first. The files are written anew, which takes time, and as much free space as the
    store."""
    asked = (
        (task, Condition("input", "contains", task)),
        (rollout_id, Condition("rollout_id", "eq", rollout_id)),
        (run_id, Condition("run_id", "eq", run_id)),
    )
    given = [where for value, where in asked if value is not None]
    if len(given) != 1 or task == "":
        raise click.UsageError("say what to erase: one of --task TEXT, --rollout ID, --run ID")
    return run(_erase(address, server, key, given[0], project, yes, as_json))


async def _erase(
    address: str | None,
    server: str | None,
    key: str | None,
    where: Filter,
    project: str | None,
    yes: bool,
    as_json: bool,
) -> int:
    from agentlightning.store import calls

    async with open_store(address, server, key) as opened:
        total = (await opened.page_rollouts(where, limit=0, with_total=True, project=project)).total
        if not total:
            tell(as_json, Deleted(), "no rollout matches; nothing was removed")
            return 0
        if not yes and not await asyncio.to_thread(
            click.confirm, f"erase {total} rollouts with all that belongs to them, for good?", err=True
        ):
            tell(as_json, Deleted(), "nothing was removed")
            return 1
        deleted = await _delete(opened, calls.DeleteRollouts(where=where, unfinished=True, scrub=True, project=project))
        tell(as_json, deleted, _removed(deleted))
        return 0


async def _delete(opened: LightningStore, call: DeleteRollouts) -> Deleted:
    """Perform it and show meanwhile how far it is, which the number of those left tells, unless rewards are kept."""
    from agentlightning.display import counting

    async def left() -> int:
        return (await opened.page_rollouts(call.where, limit=0, with_total=True, project=call.project)).total or 0

    total = None if call.keep_rewards else await left()
    work = asyncio.ensure_future(opened.perform(call))
    with counting("rollouts", total) as advance:
        while not (await asyncio.wait([work], timeout=_LOOK_SECONDS))[0]:
            if total is not None:
                advance(total - await left())
    return await work


def _removed(deleted: Deleted) -> str:
    trimmed = f", trimmed {deleted.rollouts_trimmed} to their rewards" if deleted.rollouts_trimmed else ""
    return f"removed {deleted.rollouts} rollouts, {deleted.attempts} attempts, {deleted.spans} spans{trimmed}"


# --- checking and copying ----------------------------------------------------------------------------------------


@store.command()
@store_options
def check(address: str | None, server: str | None, key: str | None, as_json: bool) -> int:
    """Look for damage and contradictions; exit with 1 if there are any."""
    from agentlightning.store import calls

    async def work() -> int:
        async with open_store(address, server, key) as opened:
            found = await opened.perform(calls.CheckStore())
        tell(as_json, {"problems": found}, "\n".join(found) or "nothing is wrong")
        return 1 if found else 0

    return run(work())


@store.command()
@click.argument("destination", metavar="DEST", type=click.Path(path_type=Path))
@click.option("--store", "address", metavar="PATH|URL", required=True, help="SQLite file of the store.")
@click.option("--force", is_flag=True, help="Overwrite DEST.")
@json_option
def backup(destination: Path, address: str, force: bool, as_json: bool) -> None:
    """Copy a store's SQLite file to DEST, also while a server writes to it."""
    from agentlightning.store.backup import POSTGRES_ADVICE, back_up

    if address.startswith(_POSTGRES):
        raise ConfigError(POSTGRES_ADVICE)
    back_up(Path(address), destination, overwrite=force)
    size = destination.stat().st_size
    told = {"file": str(destination), "bytes": size}
    tell(as_json, told, f"{destination}: {size} bytes, read through and in order")


@store.command()
@click.argument("source", metavar="SOURCE", type=click.Path(path_type=Path))
@click.argument("destination", metavar="DEST")
@click.option("--force", is_flag=True, help="Overwrite the store DEST.")
@json_option
def restore(source: Path, destination: str, force: bool, as_json: bool) -> None:
    """Make the copy SOURCE the store DEST."""
    from agentlightning.store import backup

    if destination.startswith(_POSTGRES):
        raise ConfigError(backup.POSTGRES_ADVICE)
    backup.restore(source, Path(destination), overwrite=force)
    tell(as_json, {"file": destination, "source": str(source)}, f"{destination}: restored from {source}")


# --- moving ------------------------------------------------------------------------------------------------------


@store.command("export")
@click.argument("destination", metavar="DEST", type=click.Path(path_type=Path))
@store_options
@click.option("--where", metavar="JSON", help="Only rollouts that match this filter.")
@click.option("--run", "run_id", metavar="ID", help="Only rollouts of this run.")
@click.option("--project", help="Only rollouts of this project.")
@click.option("--force", is_flag=True, help="Overwrite DEST.")
def export(
    destination: Path,
    address: str | None,
    server: str | None,
    key: str | None,
    where: str | None,
    run_id: str | None,
    project: str | None,
    force: bool,
    as_json: bool,
) -> int:
    """Write rollouts with their attempts and spans to DEST: .jsonl or .jsonl.gz."""
    from agentlightning.display import counting
    from agentlightning.store.transfer import export_rollouts

    if where is not None and run_id is not None:
        raise click.UsageError("give --where or --run; a filter can name the run: field `run_id`")
    wanted = Condition("run_id", "eq", run_id) if run_id is not None else _filter(where)

    async def work() -> None:
        async with open_store(address, server, key, reading=True) as opened:
            total = (await opened.page_rollouts(wanted, limit=0, with_total=True, project=project)).total
            with counting("rollouts", total) as advance:
                done = await export_rollouts(
                    opened, destination, where=wanted, project=project, overwrite=force, advance=advance
                )
        unfinished = f"; {done.unfinished} had not ended, and an import leaves them out" if done.unfinished else ""
        words = f"wrote {done.rollouts} rollouts, {done.attempts} attempts, {done.spans} spans{unfinished}"
        tell(as_json, done, words)

    return run(work())


def _filter(text: str | None) -> Filter | None:
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=Filter)
    except (msgspec.MsgspecError, InvalidError) as error:
        example = '{"field": "status", "op": "eq", "value": "failed"}'
        raise click.BadParameter(f"{error}; a filter is JSON such as {example}", param_hint="'--where'") from None


@store.command("import")
@click.argument("source", metavar="SOURCE", type=click.Path(path_type=Path))
@store_options
def import_(source: Path, address: str | None, server: str | None, key: str | None, as_json: bool) -> int:
    """Store the rollouts that an export wrote to SOURCE. Those stored already stay as they are."""
    from agentlightning.display import counting
    from agentlightning.store.transfer import import_rollouts

    async def work() -> None:
        async with open_store(address, server, key, create=True) as opened:
            with counting("rollouts") as advance:
                done = await import_rollouts(opened, source, advance)
        left = [
            f"{count} {why}"
            for count, why in ((done.stored_already, "were stored already"), (done.unfinished, "had not ended"))
            if count
        ]
        tell(as_json, done, f"stored {done.rollouts} rollouts{''.join(f'; {words}' for words in left)}")

    return run(work())
