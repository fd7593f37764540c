"""`agl rollouts`: what rollouts a store holds, and what one of them did, as a tree."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from agentlightning.cli.inspecting import STORE_FILE
from agentlightning.cli.prices import PRICE_HELP, read_prices
from agentlightning.cli.store import open_store, run
from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.store.codec import plain
from agentlightning.store.redaction import text_without_secrets
from agentlightning.types import And, Attempt, Condition, Order, Rollout, Span

if TYPE_CHECKING:
    from rich.console import Console

    from agentlightning.store.base import LightningStore

_STATUSES: Final = ("queuing", "preparing", "running", "requeuing", "succeeded", "failed", "cancelled")
_LOG_LINES: Final = 10  # the last ones of each stream


@click.group()
def rollouts() -> None:
    """List rollouts, and show what one did."""


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--json", "as_json", is_flag=True, help="JSON, one rollout a line."),
        click.option("--key", metavar="KEY", envvar="AGL_KEY", show_envvar=True, help="The server's key."),
        click.option("--server", metavar="URL", help="Ask this `agl server` instead."),
        click.option("--store", "address", metavar="PATH|URL",
                     help="SQLite file or postgresql://…; default the newest of agentlightning.sqlite and runs/*."),
    ):  # fmt: skip
        command = option(command)
    return command


def newest_store() -> str:
    """The store that a command reads where none is named. ConfigError where there is none."""
    found = [path for path in (Path("agentlightning.sqlite"), *Path("runs").glob(f"*/{STORE_FILE}")) if path.is_file()]
    if not found:
        raise ConfigError(f"there is no agentlightning.sqlite and no run in {Path('runs').absolute()}; name a --store")
    return str(max(found, key=_written))


def _written(store: Path) -> float:
    """When a store was last written to; the newest of it is in its log."""
    log = store.with_name(f"{store.name}-wal")
    return max(path.stat().st_mtime for path in (store, log) if path.exists())


# --- list --------------------------------------------------------------------------------------------------------


class ListedRollout(msgspec.Struct, frozen=True):
    """A rollout and what its last attempt took."""

    rollout: Rollout
    reward: float | None
    calls: int
    tokens_read: int
    tokens_written: int


@rollouts.command("list")
@_options
@click.option("--status", multiple=True, type=click.Choice(_STATUSES), help="Only of this status. Repeatable.")
@click.option("--mode", type=click.Choice(["train", "val", "test"]), help="Only of this mode.")
@click.option("--run", "run_id", metavar="ID", help="Only of this run.")
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="How many, the newest first.")
def list_(
    address: str | None,
    server: str | None,
    key: str | None,
    as_json: bool,
    status: tuple[str, ...],
    mode: str | None,
    run_id: str | None,
    limit: int,
) -> int:
    """List rollouts, newest first, with their rewards, calls and tokens."""
    asked = {"status": list(status), "mode": [mode] if mode else [], "run_id": [run_id] if run_id else []}
    conditions = [Condition(field, "in", values) for field, values in asked.items() if values]
    where = And(conditions) if conditions else None

    async def work() -> None:
        place = None if server else address or newest_store()
        async with open_store(place, server, key, reading=True) as store:
            newest = Order(field="start_time", descending=True)
            page = await store.page_rollouts(where, [newest], limit=limit, with_total=True)
            listed = await asyncio.gather(*(_listed(store, rollout) for rollout in page.items))
        if as_json:
            for one in listed:
                click.echo(msgspec.json.encode(one))
            return
        _print_list(listed, place or str(server), (page.total or 0) - len(listed))

    return run(work())


async def _listed(store: LightningStore, rollout: Rollout) -> ListedRollout:
    from agentlightning.tracing.rewards import find_final_reward
    from agentlightning.tracing.steps import read_steps
    from agentlightning.tracing.tree import totals

    spans = await store.query_spans(rollout.rollout_id, "latest")
    took = totals(read_steps(spans))
    return ListedRollout(rollout, find_final_reward(spans), took.calls, took.tokens_read, took.tokens_written)


def _print_list(listed: Sequence[ListedRollout], place: str, more: int) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from agentlightning.cli.display import duration
    from agentlightning.tracing.messages import text_of
    from agentlightning.tracing.tree import one_line

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("rollout", "status", "mode", "started", "took", "reward", "calls", "tokens", "input"):
        table.add_column(name, no_wrap=name != "input", overflow="fold" if name == "rollout" else "ellipsis")
    for one in listed:
        rollout = one.rollout
        table.add_row(
            rollout.rollout_id,
            rollout.status,
            rollout.mode,
            time.strftime("%m-%d %H:%M:%S", time.localtime(rollout.start_time)),
            "" if rollout.end_time is None else duration(rollout.end_time - rollout.start_time),
            "" if one.reward is None else f"{one.reward:g}",
            str(one.calls),
            f"{one.tokens_read:,} → {one.tokens_written:,}",
            one_line(text_of({"content": rollout.input}), 40),
        )
    # Ids are there to be copied: a narrow terminal wraps lines rather than cutting cells.
    console = Console(width=max(Console().width, Console(width=10_000).measure(table).maximum), highlight=False)
    console.print(table if listed else "no rollout matches", markup=False)
    click.echo(f"{text_without_secrets(place)}{f'; {more} more, see --limit' if more > 0 else ''}", err=True)


# --- show --------------------------------------------------------------------------------------------------------


@rollouts.command()
@click.argument("rollout_id", metavar="ID")
@_options
@click.option("--attempt", "number", type=click.IntRange(min=1), metavar="N", help="The Nth attempt; default the last.")
@click.option("--logs", is_flag=True, help="All that is kept of what it wrote, instead of the last lines.")
@click.option("--limit", type=click.IntRange(min=1), default=200, show_default=True, help="Most steps in the tree.")
@click.option("--price", multiple=True, metavar="MODEL=IN,OUT|FILE", help=PRICE_HELP)
def show(
    rollout_id: str,
    address: str | None,
    server: str | None,
    key: str | None,
    as_json: bool,
    number: int | None,
    logs: bool,
    limit: int,
    price: tuple[str, ...],
) -> int:
    """Show a rollout: how its attempts ended, and what one of them did, call by call."""
    prices = read_prices(price)

    async def work() -> None:
        async with open_store(None if server else address or newest_store(), server, key, reading=True) as store:
            rollout = await store.get_rollout_by_id(rollout_id)
            if rollout is None:
                raise NotFoundError(f"there is no rollout {rollout_id!r} in this store; see `agl rollouts list`")
            attempts = await store.query_attempts(rollout_id)
            if number is not None and number > len(attempts):
                raise NotFoundError(f"rollout {rollout_id} has {len(attempts)} attempts; there is no {number}")
            shown = attempts[(number or len(attempts)) - 1] if attempts else None
            spans = await store.query_spans(rollout_id, shown.attempt_id) if shown else []
        if as_json:
            told = {"rollout": rollout, "attempts": attempts, "spans": spans}
            click.echo(msgspec.json.encode(told, enc_hook=plain))
            return
        from rich.console import Console

        from agentlightning.tracing.tree import rollout_tree

        console = Console(highlight=False)
        console.print(rollout_tree(rollout, spans, prices=prices, limit=limit))
        _print_attempts(console, attempts, shown)
        _print_logs(console, spans, everything=logs)

    return run(work())


def _print_attempts(console: Console, attempts: Sequence[Attempt], shown: Attempt | None) -> None:
    """How each ended and why, where there is more to say than the tree's first line does."""
    for attempt in attempts:
        reason = attempt.metadata.get("reason")
        if len(attempts) > 1 or reason:
            mark = "*" if attempt is shown and len(attempts) > 1 else " "
            console.print(
                f"{mark} attempt {attempt.sequence_id} {attempt.status}{f': {reason}' if reason else ''}", markup=False
            )


def _print_logs(console: Console, spans: Sequence[Span], *, everything: bool) -> None:
    from agentlightning.semconv import LOG, LOG_STREAM, LOG_TEXT

    for span in spans:
        if span.name != LOG:
            continue
        lines = str(span.attributes.get(LOG_TEXT, "")).splitlines()
        shown = lines if everything else lines[-_LOG_LINES:]
        earlier = len(lines) - len(shown)
        console.print(f"── {span.attributes.get(LOG_STREAM)}{f' ({earlier} lines before, see --logs)' * bool(earlier)}")
        for line in shown:
            # Control characters would act on the terminal.
            console.print("".join(c if c.isprintable() else " " for c in line), markup=False)
