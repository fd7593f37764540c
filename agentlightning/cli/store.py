"""The commands that keep a store healthy: `agl store delete`, `check`, `backup`, `export`, `import`.

This module reads command lines and prints; what is done is the business of `agentlightning.store`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from agentlightning.cli.options import Duration, json_option, tell
from agentlightning.cli.place import POSTGRES, on_store, require_file
from agentlightning.errors import ConfigError, InvalidError
from agentlightning.types import Condition, Deleted, Filter

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore


@click.group()
def store() -> None:
    """Keep a store healthy: delete rollouts, back it up, move it, check it."""


# --- removing ----------------------------------------------------------------------------------------------------


@store.command()
@click.option("--older-than", "age", type=Duration(), help="Those that ended so long ago: 30d, 12h, 45m.")
@click.option("--task", metavar="TEXT", help="Those whose input contains this.")
@click.option("--rollout", "rollout_id", metavar="ID", help="This rollout.")
@click.option("--run", "run_id", metavar="ID", help="All rollouts of this run.")
@click.option("--dry-run", is_flag=True, help="Only count.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@on_store()
async def delete(
    store: LightningStore,
    age: float | None,
    task: str | None,
    rollout_id: str | None,
    run_id: str | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Remove rollouts for good, with their attempts and spans.

    With --older-than, what has not ended stays, and so does a group until all of it has ended. Otherwise unfinished
    rollouts are cancelled first, and the files are written anew, so that they hold no trace; that takes time."""
    from agentlightning.store.retention import ended_before

    if sum(bool(given) for given in (age, task, rollout_id, run_id)) != 1:
        raise click.UsageError("say what to delete: one of --older-than AGE, --task TEXT, --rollout ID, --run ID")
    if age is not None:
        where = ended_before(await store.get_time() - age)
    elif task:
        where = Condition("input", "contains", task)
    else:
        where = Condition("rollout_id", "eq", rollout_id) if rollout_id else Condition("run_id", "eq", run_id)
    total = (await store.page_rollouts(where, limit=0, with_total=True)).total
    question = f"delete {total} rollouts with all that belongs to them, for good?"
    refused = bool(total and not dry_run and not yes) and not await asyncio.to_thread(click.confirm, question, err=True)
    if dry_run or refused or not total:
        words = f"{total} rollouts match; nothing was removed"
        tell(as_json, {"rollouts_found": total, **msgspec.structs.asdict(Deleted())}, words)
        return int(refused)
    deleted = await store.delete_rollouts(where, unfinished=age is None, scrub=age is None)
    words = f"removed {deleted.rollouts} rollouts, {deleted.attempts} attempts, {deleted.spans} spans"
    tell(as_json, deleted, words)
    return 0


# --- checking and copying ----------------------------------------------------------------------------------------


@store.command()
@on_store()
async def check(store: LightningStore, as_json: bool) -> int:
    """Look for damage and contradictions; exit with 1 if there are any."""
    found = await store.check_store()
    tell(as_json, {"problems": found}, "\n".join(found) or "nothing is wrong")
    return 1 if found else 0


@store.command()
@click.argument("destination", metavar="DEST", type=click.Path(path_type=Path))
@click.option("--store", "path", metavar="PATH", required=True, help="SQLite file of the store.")
@json_option
def backup(destination: Path, path: str, as_json: bool) -> None:
    """Copy a store's SQLite file to DEST, also while a server writes to it. DEST is a store of its own."""
    from agentlightning.store.sqlite import back_up

    if path.startswith(POSTGRES):
        raise ConfigError("a store in PostgreSQL is backed up by PostgreSQL's own programs, pg_dump and pg_restore")
    require_file(path)
    back_up(Path(path), destination)
    size = destination.stat().st_size
    tell(as_json, {"file": str(destination), "bytes": size}, f"{destination}: {size} bytes")


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
    """Write rollouts that have ended, with their attempts and spans, to DEST: .jsonl or .jsonl.gz."""
    from agentlightning.store.transfer import export_rollouts

    if where is not None and run_id is not None:
        raise click.UsageError("give --where or --run; a filter can name the run: field `run_id`")
    wanted = Condition("run_id", "eq", run_id) if run_id is not None else _filter(where)
    done = await export_rollouts(store, destination, where=wanted, overwrite=force)
    tell(as_json, done, f"wrote {done.rollouts} rollouts, {done.attempts} attempts, {done.spans} spans")


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
    left = f"; {done.stored_already} were stored already" if done.stored_already else ""
    tell(as_json, done, f"stored {done.rollouts} rollouts{left}")
