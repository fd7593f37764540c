"""The commands about keys: `agl keys issue`, `list`, `revoke`.

This module reads command lines and prints; keys are the business of the store. A secret is printed once, alone on
stdout, so that it can be piped to where it belongs.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Final

import click

from agentlightning.cli.options import Duration, print_json, tell
from agentlightning.cli.place import on_store

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore
    from agentlightning.types import ApiKey, IssuedKey

_SCOPES: Final = ("read", "worker", "grader", "trainer", "admin")


@click.group()
def keys() -> None:
    """Issue, list and end keys of a store's server."""


@keys.command()
@click.argument("name")
@click.option("--scope", "scopes", multiple=True, required=True, type=click.Choice(_SCOPES),
              help="What the key opens; may be given several times.")  # fmt: skip
@click.option("--lifetime", type=Duration(), help="How long it is valid: 30d, 12h. Without it, until it is revoked.")
@on_store()
async def issue(
    store: LightningStore,
    name: str,
    as_json: bool,
    scopes: tuple[Any, ...],
    lifetime: float | None,
) -> None:
    """Make a key called NAME and print its secret."""
    _hand_out(await store.issue_key(name, scopes, lifetime), as_json)


def _hand_out(issued: IssuedKey, as_json: bool) -> None:
    tell(as_json, issued, issued.api_key)
    sys.stdout.flush()
    click.echo(f"this is key {issued.key_id}; it is not shown again, and the store keeps no copy", err=True)


@keys.command("list")
@on_store(reading=True)
async def list_(store: LightningStore, as_json: bool) -> None:
    """List all keys, without their secrets."""
    from agentlightning.cli.tables import make_table, print_table

    found = await store.query_keys()
    if as_json:
        for one in found:
            print_json(one)
        return
    now = time.time()
    rows = [(one.key_id, one.name, " ".join(one.scopes), _date(one.create_time), _state(one, now)) for one in found]
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
    """End a key at once and for good."""
    ended = await store.revoke_key(key_id)
    tell(as_json, ended, f"{ended.key_id} ({ended.name}) {_state(ended, time.time())}")


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
