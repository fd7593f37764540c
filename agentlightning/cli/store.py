"""The commands that keep a store healthy: `agl store gc`, `erase`, `check`, `backup`, `restore`, `export`, `import`.

This module reads command lines and prints; what is done is the business of `agentlightning.store`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from agentlightning.cli.options import Duration, json_option, tell
from agentlightning.cli.place import POSTGRES, on_store
from agentlightning.errors import ConfigError, InvalidError
from agentlightning.types import Condition, Deleted, Filter

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore


@click.group()
def store() -> None:
    """Keep a store healthy: remove what is old, back it up, move it, check it."""


# --- removing ----------------------------------------------------------------------------------------------------


@store.command()
@click.option("--older-than", "age", type=Duration(), required=True, help="How long ago rollouts ended: 30d, 12h, 45m.")
@click.option("--dry-run", is_flag=True, help="Only count.")
@on_store()
async def gc(store: LightningStore, age: float, as_json: bool, dry_run: bool) -> None:
    """Remove rollouts that ended long ago, with their attempts and spans; those of a group when all of it did."""
    from agentlightning.store import calls
    from agentlightning.store.retention import ended_before

    where = ended_before(await store.perform(calls.GetTime()) - age)
    if dry_run:
        page = await store.page_rollouts(where, limit=0, with_total=True)
        words = f"{page.total} rollouts ended before that; nothing was removed"
        tell(as_json, {"rollouts_found": page.total, **msgspec.structs.asdict(Deleted())}, words)
        return
    deleted = await store.perform(calls.DeleteRollouts(where=where))
    tell(as_json, deleted, _removed(deleted))


@store.command()
@click.option("--task", metavar="TEXT", help="Rollouts whose input contains this.")
@click.option("--rollout", "rollout_id", metavar="ID", help="This rollout.")
@click.option("--run", "run_id", metavar="ID", help="All rollouts of this run.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@on_store()
async def erase(
    store: LightningStore,
    task: str | None,
    rollout_id: str | None,
    run_id: str | None,
    yes: bool,
    as_json: bool,
) -> int:
    """Remove rollouts for good, leaving no trace in the files.

    Unfinished ones are cancelled first. The files are written anew, which takes time, and as much free space as the
    store."""
    from agentlightning.store import calls

    asked = (
        (task, Condition("input", "contains", task)),
        (rollout_id, Condition("rollout_id", "eq", rollout_id)),
        (run_id, Condition("run_id", "eq", run_id)),
    )
    given = [where for value, where in asked if value is not None]
    if len(given) != 1 or task == "":
        raise click.UsageError("say what to erase: one of --task TEXT, --rollout ID, --run ID")
    (where,) = given
    total = (await store.page_rollouts(where, limit=0, with_total=True)).total
    if not total:
        tell(as_json, Deleted(), "no rollout matches; nothing was removed")
        return 0
    if not yes and not await asyncio.to_thread(
        click.confirm, f"erase {total} rollouts with all that belongs to them, for good?", err=True
    ):
        tell(as_json, Deleted(), "nothing was removed")
        return 1
    deleted = await store.perform(calls.DeleteRollouts(where=where, unfinished=True, scrub=True))
    tell(as_json, deleted, _removed(deleted))
    return 0


def _removed(deleted: Deleted) -> str:
    return f"removed {deleted.rollouts} rollouts, {deleted.attempts} attempts, {deleted.spans} spans"


# --- checking and copying ----------------------------------------------------------------------------------------


@store.command()
@on_store()
async def check(store: LightningStore, as_json: bool) -> int:
    """Look for damage and contradictions; exit with 1 if there are any."""
    from agentlightning.store import calls

    found = await store.perform(calls.CheckStore())
    tell(as_json, {"problems": found}, "\n".join(found) or "nothing is wrong")
    return 1 if found else 0


@store.command()
@click.argument("destination", metavar="DEST", type=click.Path(path_type=Path))
@click.option("--store", "address", metavar="PATH|URL", required=True, help="SQLite file of the store.")
@click.option("--force", is_flag=True, help="Overwrite DEST.")
@json_option
def backup(destination: Path, address: str, force: bool, as_json: bool) -> None:
    """Copy a store's SQLite file to DEST, also while a server writes to it."""
    from agentlightning.store.backup import POSTGRES_ADVICE, back_up

    if address.startswith(POSTGRES):
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

    if destination.startswith(POSTGRES):
        raise ConfigError(backup.POSTGRES_ADVICE)
    backup.restore(source, Path(destination), overwrite=force)
    tell(as_json, {"file": destination, "source": str(source)}, f"{destination}: restored from {source}")


# --- moving ------------------------------------------------------------------------------------------------------


@store.command("export")
@click.argument("destination", metavar="DEST", type=click.Path(path_type=Path))
@click.option("--where", metavar="JSON", help="Only rollouts that match this filter.")
@click.option("--run", "run_id", metavar="ID", help="Only rollouts of this run.")
@click.option("--force", is_flag=True, help="Overwrite DEST.")
@on_store(reading=True)
async def export(
    store: LightningStore,
    destination: Path,
    where: str | None,
    run_id: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write rollouts with their attempts and spans to DEST: .jsonl or .jsonl.gz."""
    from agentlightning.store.transfer import export_rollouts

    if where is not None and run_id is not None:
        raise click.UsageError("give --where or --run; a filter can name the run: field `run_id`")
    wanted = Condition("run_id", "eq", run_id) if run_id is not None else _filter(where)
    done = await export_rollouts(store, destination, where=wanted, overwrite=force)
    unfinished = f"; {done.unfinished} had not ended, and an import leaves them out" if done.unfinished else ""
    words = f"wrote {done.rollouts} rollouts, {done.attempts} attempts, {done.spans} spans{unfinished}"
    tell(as_json, done, words)


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
@on_store(create=True)
async def import_(store: LightningStore, source: Path, as_json: bool) -> None:
    """Store the rollouts that an export wrote to SOURCE. Those stored already stay as they are."""
    from agentlightning.store.transfer import import_rollouts

    done = await import_rollouts(store, source)
    left = [
        f"{count} {why}"
        for count, why in ((done.stored_already, "were stored already"), (done.unfinished, "had not ended"))
        if count
    ]
    tell(as_json, done, f"stored {done.rollouts} rollouts{''.join(f'; {words}' for words in left)}")
