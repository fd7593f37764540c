"""The commands `agl store delete`, `check` and `backup`, and `agl keys`.

This module reads command lines and prints; `agentlightning.store` does the work.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from agentlightning.cli.options import (
    Duration,
    make_table,
    note,
    print_json,
    print_result,
    print_table,
)
from agentlightning.cli.store_location import (
    POSTGRES,
    STORE,
    StoreLocation,
    on_store,
    with_location,
)
from agentlightning.errors import ConfigError
from agentlightning.types import ApiKey, Condition, Deleted

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore
    from agentlightning.store.client import LightningStoreClient


@click.group()
def store() -> None:
    """Check a store, copy it, or delete from it."""


# --- removing -------------------------------------------------------------------------------------


@store.command()
@click.option(
    "--older-than",
    "age",
    type=Duration(),
    help="Rollouts that ended longer ago than this: 30d, 12h, 45m.",
)
@click.option("--task", metavar="TEXT", help="Rollouts whose input contains this text.")
@click.option("--rollout", "rollout_id", metavar="ID", help="This rollout.")
@click.option("--run", "run_id", metavar="ID", help="All rollouts of this run.")
@click.option("--dry-run", is_flag=True, help="Count them, and delete nothing.")
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
    """Delete rollouts for good.

    Their attempts and spans are deleted, too.

    With --older-than, unfinished rollouts stay, and so do groups with an unfinished member.
    Otherwise unfinished rollouts are cancelled first, and the file is rewritten so that no trace is
    left in it, which takes time."""
    from agentlightning.store.retention import ended_before

    if sum(bool(given) for given in (age, task, rollout_id, run_id)) != 1:
        raise click.UsageError(
            "choose what to delete: one of --older-than AGE, --task TEXT, --rollout ID, --run ID"
        )
    if age is not None:
        where = ended_before(await store.get_time() - age)
    elif task:
        where = Condition("input", "contains", task)
    else:
        where = (
            Condition("rollout_id", "eq", rollout_id)
            if rollout_id
            else Condition("run_id", "eq", run_id)
        )
    total = (await store.page_rollouts(where, limit=0, with_total=True)).total
    found = f"{total:,} rollouts"
    question = f"delete {found} with all that belongs to them, for good?"
    refused = bool(total and not dry_run and not yes) and not await asyncio.to_thread(
        click.confirm, question, err=True
    )
    if dry_run or refused or not total:
        words = f"{found} match; nothing was removed"
        print_result(as_json, {"rollouts_found": total, **msgspec.structs.asdict(Deleted())}, words)
        return int(refused)
    deleted = await store.delete_rollouts(where, unfinished=age is None, scrub=age is None)
    counts = msgspec.structs.asdict(deleted).items()
    words = "removed " + ", ".join(f"{count:,} {name}" for name, count in counts)
    print_result(as_json, deleted, words)
    return 0


# --- checking and copying -------------------------------------------------------------------------


@store.command()
@on_store()
async def check(store: LightningStore, as_json: bool) -> int:
    """Check a store for damage and contradictions.

    The exit code is 1 if there are any."""
    found = await store.check_store()
    print_result(as_json, {"problems": found}, "\n".join(found) or "nothing is wrong")
    return 1 if found else 0


@store.command()
@click.argument("destination", metavar="DEST", type=click.Path(path_type=Path))
@with_location(STORE)
async def backup(destination: Path, place: StoreLocation, as_json: bool) -> None:
    """Copy a SQLite store, which may be in use.

    DEST becomes a store of its own. With --server, the server's store is copied to this machine."""
    from agentlightning.store.client import LightningStoreClient
    from agentlightning.store.sqlite import back_up

    if (place.address or "").startswith(POSTGRES):
        raise ConfigError(
            "a store in PostgreSQL is backed up by PostgreSQL's own programs, pg_dump and "
            "pg_restore"
        )
    if place.server is None and place.address is not None:
        await asyncio.to_thread(back_up, Path(place.address), destination)
    else:
        async with place.open() as store:
            assert isinstance(store, LightningStoreClient)
            await _download(store, destination)
    size = (await asyncio.to_thread(destination.stat)).st_size
    print_result(as_json, {"file": str(destination), "bytes": size}, f"{destination}: {size} bytes")


async def _download(store: LightningStoreClient, copy: Path) -> None:
    from agentlightning.store.transfer import writing

    if await asyncio.to_thread(copy.exists):
        raise ConfigError(f"{copy} exists already; choose another name")
    with writing(copy, overwrite=False) as file:
        os.fchmod(file.fileno(), 0o600)  # prompts and the secret that keys are signed with
        await store.copy_into(file)
        os.fsync(file.fileno())


# --- keys -----------------------------------------------------------------------------------------

_SCOPES: Final = ("read", "worker", "grader", "trainer", "admin")


@click.group()
def keys() -> None:
    """Issue, list and revoke keys of a store."""


@keys.command()
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    required=True,
    type=click.Choice(_SCOPES),
    help="What the key allows. Repeatable.",
)
@click.option(
    "--lifetime",
    type=Duration(),
    help="How long the key is valid: 30d, 12h; default: until revoked.",
)
@on_store()
async def issue(
    store: LightningStore, name: str, as_json: bool, scopes: tuple[Any, ...], lifetime: float | None
) -> None:
    """Issue a key called NAME.

    Its secret is printed once, on stdout."""
    issued = await store.issue_key(name, scopes, lifetime)
    print_result(as_json, issued, issued.api_key)
    sys.stdout.flush()
    note(f"this is key {issued.key_id}; it is not shown again, and the store keeps no copy")


@keys.command("list")
@on_store(reading=True)
async def list_(store: LightningStore, as_json: bool) -> None:
    """List all keys, without their secrets."""
    found = await store.query_keys()
    if as_json:
        for key in found:
            print_json(key)
        return
    now = time.time()
    rows = [
        (key.key_id, key.name, " ".join(key.scopes), _date(key.create_time), _state(key, now))
        for key in found
    ]
    print_table(make_table(("key", "name", "scopes", "issued", "state"), rows))


def _state(key: ApiKey, now: float) -> str:
    if key.revoke_time is not None:
        return f"revoked {_date(key.revoke_time)}"
    if key.expire_time is None:
        return "valid"
    return f"{'expired' if key.expire_time <= now else 'valid until'} {_date(key.expire_time)}"


@keys.command()
@click.argument("key_id", metavar="KEY_ID")
@on_store()
async def revoke(store: LightningStore, key_id: str, as_json: bool) -> None:
    """Revoke a key at once and for good."""
    ended = await store.revoke_key(key_id)
    print_result(as_json, ended, f"{ended.key_id} ({ended.name}) {_state(ended, time.time())}")


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
