"""`agl rollouts`: what rollouts a store holds, what one of them did, as a tree, and which end just now."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click
import msgspec

from agentlightning.cli.options import price_option, print_json, read_prices, together
from agentlightning.cli.place import READ_STORE, Place, newest_store, on_store, with_place
from agentlightning.cli.runs import STATUSES, ListingGroup
from agentlightning.errors import NotFoundError
from agentlightning.semconv import reward_value
from agentlightning.store.codec import plain
from agentlightning.store.redaction import text_without_secrets
from agentlightning.tracing.tree import Totals
from agentlightning.types import And, Attempt, Condition, Filter, Order, Rollout, Span

if TYPE_CHECKING:
    from rich.console import Console

    from agentlightning.store.base import LightningStore

ENDED: Final = ("succeeded", "failed", "cancelled")
_SPANS_AT_ONCE: Final = 1000
_LONG_POLL: Final = 30.0  # seconds
_LOG_LINES: Final = 10  # the last ones of each stream


@click.group(cls=ListingGroup)
def rollouts() -> None:
    """List rollouts, show what one did, and follow them as they end (without a command: ls)."""


_chosen = together(
    click.option("--status", multiple=True, type=click.Choice(STATUSES), help="Only of this status. Repeatable."),
    click.option("--mode", type=click.Choice(["train", "val", "test"]), help="Only of this mode."),
    click.option("--run", "run_id", metavar="ID", help="Only of this run."),
)


def _where(status: Sequence[str], mode: str | None, run_id: str | None) -> Filter | None:
    asked = {"status": list(status), "mode": [mode] if mode else [], "run_id": [run_id] if run_id else []}
    conditions = [Condition(field, "in", values) for field, values in asked.items() if values]
    return And(conditions) if conditions else None


# --- ls ----------------------------------------------------------------------------------------------------------


class ListedRollout(msgspec.Struct, frozen=True):
    """A rollout, the reward of its last attempt, and what that took if it was asked for."""

    rollout: Rollout
    reward: float | None
    totals: Totals | None = None


@rollouts.command()
@with_place(READ_STORE, newest_store)
@_chosen
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="How many, the newest first.")
@click.option("--calls", is_flag=True, help="With calls and tokens, for which every span is read.")
async def ls(
    place: Place,
    as_json: bool,
    status: tuple[str, ...],
    mode: str | None,
    run_id: str | None,
    limit: int,
    calls: bool,
) -> None:
    """List rollouts, newest first, with their rewards."""

    async with place.open(reading=True) as store:
        newest = Order(field="start_time", descending=True)
        page = await store.page_rollouts(_where(status, mode, run_id), [newest], limit=limit, with_total=True)
        listed = await with_rewards(store, page.items, with_calls=calls)
    if as_json:
        for one in listed:
            print_json(one)
        return
    _print_list(listed, str(place), (page.total or 0) - len(listed))


async def with_rewards(
    store: LightningStore, found: Sequence[Rollout], *, with_calls: bool = False
) -> list[ListedRollout]:
    if with_calls:
        return await asyncio.gather(*(_with_calls(store, rollout) for rollout in found))
    by_id: dict[str, list[Span]] = {rollout.rollout_id: [] for rollout in found}
    rewarded = And([Condition("rollout_id", "in", list(by_id)), Condition(f"attributes.{reward_value(0)}", "exists")])
    cursor = None
    while by_id:
        page = await store.page_spans(rewarded, limit=_SPANS_AT_ONCE, cursor=cursor)
        for span in page.items:
            by_id[span.rollout_id].append(span)
        cursor = page.next_cursor
        if cursor is None:
            break
    rewards = await asyncio.gather(*(_reward(store, *item) for item in by_id.items()))
    return [ListedRollout(rollout, reward) for rollout, reward in zip(found, rewards, strict=True)]


async def _reward(store: LightningStore, rollout_id: str, spans: Sequence[Span]) -> float | None:
    from agentlightning.tracing.rewards import find_final_reward

    latest = await store.get_latest_attempt(rollout_id) if spans else None
    return find_final_reward(span for span in spans if latest and span.attempt_id == latest.attempt_id)


async def _with_calls(store: LightningStore, rollout: Rollout) -> ListedRollout:
    from agentlightning.tracing.rewards import find_final_reward
    from agentlightning.tracing.steps import read_steps
    from agentlightning.tracing.tree import totals

    spans = await store.query_spans(rollout.rollout_id, "latest")
    return ListedRollout(rollout, find_final_reward(spans), totals(read_steps(spans)))


def _print_list(listed: Sequence[ListedRollout], place: str, more: int) -> None:
    from agentlightning.cli.tables import make_table, print_table

    rows: list[tuple[object, ...]] = []
    for one in listed:
        rollout, took = one.rollout, one.totals
        started = time.strftime("%m-%d %H:%M:%S", time.localtime(rollout.start_time))
        tokens = "" if took is None else f"{took.tokens_read:,} → {took.tokens_written:,}"
        counts = (took and took.calls, tokens)
        first = (rollout.rollout_id, rollout.status, rollout.mode, started, _took(rollout), one.reward)
        rows.append((*first, *counts, _input(rollout)))
    names = ("rollout", "status", "mode", "started", "took", "reward", "calls", "tokens", "input")
    if listed and listed[0].totals is None:
        names, rows = (*names[:6], names[8]), [(*row[:6], row[8]) for row in rows]
    if listed:
        print_table(make_table(names, rows))
    else:
        click.echo("no rollout matches")
    click.echo(f"{text_without_secrets(place)}{f'; {more} more, see --limit' if more > 0 else ''}", err=True)


def _took(rollout: Rollout) -> str:
    from agentlightning.display import duration

    return "" if rollout.end_time is None else duration(rollout.end_time - rollout.start_time)


def _input(rollout: Rollout) -> str:
    from agentlightning.tracing.messages import text_of
    from agentlightning.tracing.tree import one_line

    return one_line(text_of({"content": rollout.input}), 40)


# --- tail --------------------------------------------------------------------------------------------------------


@rollouts.command()
@_chosen
@click.option(
    "-n", "earlier", type=click.IntRange(min=0), default=10, show_default=True, help="How many that ended before."
)
@on_store(READ_STORE, newest_store, reading=True)
async def tail(
    store: LightningStore, as_json: bool, status: tuple[str, ...], mode: str | None, run_id: str | None, earlier: int
) -> None:
    """Show rollouts as they end, one a line, until Ctrl-C."""
    cursor = await _end_of_feed(store, run_id)
    newest = Order(field="end_time", descending=True)
    page = await store.page_rollouts(_where(status or ENDED, mode, run_id), [newest], limit=max(1, earlier))
    told = page.items[:earlier][::-1]
    seen = {rollout.rollout_id for rollout in told}
    while True:
        for one in await with_rewards(store, told):
            _print_ended(one, as_json)
        finished = await store.finished_after(cursor, timeout=_LONG_POLL, run_id=run_id)
        cursor = finished.cursor
        wanted = [one for one in finished.rollouts if one.status in (status or ENDED)]
        told = [one for one in wanted if mode in (None, one.mode) and one.rollout_id not in seen]


async def _end_of_feed(store: LightningStore, run_id: str | None) -> int:
    """The cursor after which nothing has finished yet, found by halving."""

    async def finished(after: int) -> bool:
        return bool((await store.finished_after(after, 1, run_id=run_id)).rollouts)

    low, high = 0, 1
    while await finished(high):
        low, high = high, 2 * high
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if await finished(middle) else (low, middle)
    return low


def _print_ended(one: ListedRollout, as_json: bool) -> None:
    if as_json:
        print_json(one)
        return
    from rich.console import Console
    from rich.text import Text

    from agentlightning.cli.tables import STYLES

    rollout = one.rollout
    line = Text(time.strftime("%H:%M:%S  ", time.localtime(rollout.end_time)), "dim")
    line.append(f"{rollout.status:<9}", STYLES.get(rollout.status, "yellow"))
    reward = "-" if one.reward is None else f"{one.reward:g}"
    line.append(f"  {rollout.mode:<5}  reward {reward:<7}  {_took(rollout):>7}  {rollout.rollout_id}  ")
    Console(highlight=False).print(line.append(_input(rollout), "dim"), soft_wrap=True)


# --- show --------------------------------------------------------------------------------------------------------


@rollouts.command()
@click.argument("rollout_id", metavar="ID")
@click.option("--attempt", "number", type=click.IntRange(min=1), metavar="N", help="The Nth attempt; default the last.")
@click.option("--logs", is_flag=True, help="All that is kept of what it wrote, instead of the last lines.")
@click.option("--limit", type=click.IntRange(min=1), default=200, show_default=True, help="Most steps in the tree.")
@price_option
@on_store(READ_STORE, newest_store, reading=True)
async def show(
    store: LightningStore,
    rollout_id: str,
    as_json: bool,
    number: int | None,
    logs: bool,
    limit: int,
    price: tuple[str, ...],
) -> None:
    """Show a rollout: how its attempts ended, and what one of them did, call by call."""
    from rich.console import Console

    from agentlightning.tracing.tree import rollout_tree

    prices = read_prices(price)
    rollout = await store.get_rollout_by_id(rollout_id)
    if rollout is None:
        raise NotFoundError(f"there is no rollout {rollout_id!r} in this store; see `agl rollouts ls`")
    attempts = await store.query_attempts(rollout_id)
    if number is not None and number > len(attempts):
        raise NotFoundError(f"rollout {rollout_id} has {len(attempts)} attempts; there is no {number}")
    shown = attempts[(number or len(attempts)) - 1] if attempts else None
    spans = await store.query_spans(rollout_id, shown.attempt_id) if shown else []
    if as_json:
        print_json({"rollout": rollout, "attempts": attempts, "spans": spans}, enc_hook=plain)
        return
    console = Console(highlight=False)
    console.print(rollout_tree(rollout, spans, prices=prices, limit=limit))
    _print_attempts(console, attempts, shown)
    _print_logs(console, spans, everything=logs)


def _print_attempts(console: Console, attempts: Sequence[Attempt], shown: Attempt | None) -> None:
    """How each ended and why, where there is more to say than the tree's first line does."""
    from agentlightning.tracing.tree import printable

    for attempt in attempts:
        reason = attempt.metadata.get("reason")
        if len(attempts) > 1 or reason:
            mark = "*" if attempt is shown and len(attempts) > 1 else " "
            console.print(
                printable(f"{mark} attempt {attempt.sequence_id} {attempt.status}{f': {reason}' if reason else ''}"),
                markup=False,
            )


def _print_logs(console: Console, spans: Sequence[Span], *, everything: bool) -> None:
    from agentlightning.semconv import LOG, LOG_STREAM, LOG_TEXT
    from agentlightning.tracing.tree import printable

    for span in spans:
        if span.name != LOG:
            continue
        lines = str(span.attributes.get(LOG_TEXT, "")).splitlines()
        shown = lines if everything else lines[-_LOG_LINES:]
        earlier = len(lines) - len(shown)
        console.print(f"── {span.attributes.get(LOG_STREAM)}{f' ({earlier} lines before, see --logs)' * bool(earlier)}")
        for line in shown:
            console.print(printable(line), markup=False)
