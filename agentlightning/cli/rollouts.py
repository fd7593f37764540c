"""`agl rollouts`: lists the rollouts of a store, follows them as they end, and shows one as a
tree."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from agentlightning.arrays import plain
from agentlightning.cli.options import (
    COUNT,
    MODE,
    STATUSES,
    combined,
    make_table,
    note,
    number,
    print_json,
    print_result,
    print_table,
)
from agentlightning.cli.runs import ListingGroup, repeated, watch_option
from agentlightning.cli.store_location import ANY_RUN, NEWEST, StoreLocation, with_location
from agentlightning.cli.stored_runs import find_rollout
from agentlightning.errors import NotFoundError
from agentlightning.store.redaction import text_without_secrets
from agentlightning.types import And, Attempt, Condition, Filter, Order, Rollout, Span

if TYPE_CHECKING:
    from rich.console import Console


_TAIL_SECONDS: Final = 1.0  # between two looks
_TAIL_PAGE: Final = 1000
_LOG_LINES: Final = 10  # the last ones of each stream, and of a traceback


@click.group(cls=ListingGroup)
def rollouts() -> None:
    """List, follow, show and annotate rollouts.

    The default command is ls."""


# --- ls -------------------------------------------------------------------------------------------


_filter_options: Final = combined(
    click.option(
        "--status",
        multiple=True,
        type=click.Choice(STATUSES),
        help="Only of this status. Repeatable.",
    ),
    click.option("--mode", type=MODE, help="Only of this mode."),
    click.option("--run", "run_id", metavar="ID", help="Only of this run."),
)


def _filters(status: Sequence[str], mode: str | None, run_id: str | None) -> list[Filter]:
    asked = {
        "status": list(status),
        "mode": [mode] if mode else [],
        "run_id": [run_id] if run_id else [],
    }
    return [Condition(field, "in", values) for field, values in asked.items() if values]


@rollouts.command()
@with_location(NEWEST)
@_filter_options
@click.option("--limit", type=COUNT, default=20, help="How many to list, newest first.")
@watch_option
async def ls(
    place: StoreLocation,
    as_json: bool,
    limit: int,
    watch: float | None,
    **chosen: Any,
) -> None:
    """List rollouts, newest first, with their rewards."""
    where = _filters(**chosen)
    newest = Order(field="start_time", descending=True)

    async def show() -> None:
        async with place.open(reading=True) as store:
            page = await store.page_rollouts(
                And(where) if where else None, [newest], limit=limit, with_total=True
            )
        if as_json:
            for rollout in page.items:
                print_json(rollout)
        else:
            _print_list(page.items, str(place), (page.total or 0) - len(page.items))

    await repeated(show, watch, as_json)


def _print_list(listed: Sequence[Rollout], place: str, more: int) -> None:
    from agentlightning.display import duration

    rows: list[tuple[object, ...]] = []
    for rollout in listed:
        started = time.strftime("%m-%d %H:%M:%S", time.localtime(rollout.start_time))
        took = "" if rollout.end_time is None else duration(rollout.end_time - rollout.start_time)
        ids = (rollout.rollout_id, rollout.status, rollout.mode, started)
        rows.append((*ids, took, rollout.reward, _input_line(rollout)))
    if rows:
        print_table(
            make_table(("rollout", "status", "mode", "started", "took", "reward", "input"), rows)
        )
    else:
        click.echo("no rollout matches")
    note(f"{text_without_secrets(place)}{f'; {more} more, see --limit' if more > 0 else ''}")


def _input_line(rollout: Rollout) -> str:
    from agentlightning.tracing.dialects import content_text
    from agentlightning.tracing.tree import one_line

    return one_line(content_text(rollout.input), 40)


# --- tail -----------------------------------------------------------------------------------------


@rollouts.command()
@with_location(NEWEST)
@_filter_options
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=10,
    help="How many of those that have ended come first.",
)
async def tail(place: StoreLocation, as_json: bool, limit: int, **chosen: Any) -> None:
    """Print a line for each rollout as it ends.

    The last ones that have ended come first. Ctrl-C ends it."""
    ended = [Condition("end_time", "exists"), *_filters(**chosen)]
    latest = [Order(field="end_time", descending=True)]
    by_end = [Order(field="end_time")]
    async with place.open(reading=True) as store:
        first = (await store.page_rollouts(And(ended), latest, limit=max(1, limit))).items
        shown = {rollout.rollout_id for rollout in first}
        since = max((rollout.end_time or 0.0 for rollout in first), default=0.0)
        found = tuple(reversed(first[:limit]))
        while True:
            for rollout in found:
                shown.add(rollout.rollout_id)
                since = max(since, rollout.end_time or 0.0)
                print_result(as_json, rollout, "" if as_json else _ended_line(rollout))
            await asyncio.sleep(_TAIL_SECONDS)
            # Whatever ended at the same moment as the last one may have been written since.
            page = await store.page_rollouts(
                And([*ended, Condition("end_time", "ge", since)]), by_end, limit=_TAIL_PAGE
            )
            found = tuple(rollout for rollout in page.items if rollout.rollout_id not in shown)


def _ended_line(rollout: Rollout) -> str:
    """`14:03:11 succeeded train 0:02 reward 0.5 ro-1 What is 1+1?`"""
    from agentlightning.display import duration
    from agentlightning.tracing.tree import printable

    assert rollout.end_time is not None
    ended = time.strftime("%H:%M:%S", time.localtime(rollout.end_time))
    took = duration(rollout.end_time - rollout.start_time)
    reward = "no reward" if rollout.reward is None else f"reward {number(rollout.reward)}"
    words = (
        f"{rollout.status:<9}",
        f"{rollout.mode or '':<5}",
        f"{took:>5}",
        f"{reward:<12}",
        rollout.rollout_id,
    )
    return printable(" ".join((ended, *words, _input_line(rollout))))


# --- show -----------------------------------------------------------------------------------------


@rollouts.command()
@click.argument("rollout_id", metavar="ID")
@click.option(
    "--attempt", "number", type=COUNT, metavar="N", help="Show the Nth attempt; default: the last."
)
@click.option(
    "--timeline", "timed", is_flag=True, help="Show when everything happened, instead of a tree."
)
@click.option("--logs", is_flag=True, help="Show logs and tracebacks whole, not only their ends.")
@with_location(ANY_RUN)
async def show(
    place: StoreLocation,
    rollout_id: str,
    as_json: bool,
    number: int | None,
    timed: bool,
    logs: bool,
) -> None:
    """Show a rollout, call by call.

    It shows how its attempts ended, and what one of them did."""
    from rich.console import Console

    from agentlightning.datasets.export import annotation_of
    from agentlightning.tracing.steps import read_steps
    from agentlightning.tracing.tree import drawn, printable, rollout_tree, timeline

    place, rollout = await find_rollout(place, rollout_id)
    async with place.open(reading=True) as store:
        attempts = await store.query_attempts(rollout_id)
        if number is not None and number > len(attempts):
            raise NotFoundError(
                f"rollout {rollout_id} has {len(attempts)} attempts; there is no {number}"
            )
        shown = attempts[(number or len(attempts)) - 1] if attempts else None
        spans = await store.query_spans(rollout_id, shown.attempt_id) if shown else []
    if as_json:
        print_json({"rollout": rollout, "attempts": attempts, "spans": spans}, enc_hook=plain)
        return
    console = Console(highlight=False)
    steps = read_steps(spans)
    found = timeline(shown, steps, time.time()) if shown else None
    tree = rollout_tree(rollout, spans)
    console.print(tree.label if timed else tree)
    for line in drawn(found, steps) if timed and found else ():
        console.print(printable(line), markup=False, soft_wrap=True)
    for part, text in msgspec.to_builtins(annotation_of(rollout)).items():
        console.print(printable(f"{part}: {text}"), markup=False)
    _print_attempts(console, attempts, shown)
    if found and found.stood and not timed:
        console.print(f"  {printable(found.stood)}", markup=False, soft_wrap=True)
    _print_texts(console, spans, everything=logs)


@rollouts.command()
@click.argument("rollout_id", metavar="ID")
@click.option("--label", help="A word such as good, for `agl export --label`. Empty removes it.")
@click.option("--note", help="A note. Empty removes it.")
@click.option(
    "--answer", help="The right last answer, which `agl export` teaches instead. Empty removes it."
)
@with_location(ANY_RUN)
async def annotate(
    place: StoreLocation, rollout_id: str, as_json: bool, **parts: str | None
) -> None:
    """Give a rollout a label, note or right answer.

    `agl rollouts show` prints them, and `agl export` uses them."""
    from agentlightning.datasets.export import annotation_of, changed_annotation

    if all(text is None for text in parts.values()):
        raise click.UsageError("give --label, --note or --answer")
    place, _ = await find_rollout(place, rollout_id)
    async with place.open() as store:
        rollout = await store.update_rollout(rollout_id, merge=changed_annotation(**parts))
    print_result(as_json, annotation_of(rollout), f"annotated {rollout_id}")


def _print_attempts(console: Console, attempts: Sequence[Attempt], shown: Attempt | None) -> None:
    """Print how each attempt ended and why, unless the tree's first line says so."""
    from agentlightning.tracing.tree import printable

    for attempt in attempts:
        reason = attempt.metadata.get("reason")
        if len(attempts) > 1 or reason:
            mark = "*" if attempt is shown and len(attempts) > 1 else " "
            console.print(
                printable(
                    f"{mark} attempt {attempt.sequence_id} "
                    f"{attempt.status}{f': {reason}' if reason else ''}"
                ),
                markup=False,
            )


def _print_texts(console: Console, spans: Sequence[Span], *, everything: bool) -> None:
    """Tracebacks and logs."""
    from agentlightning.semconv import EXCEPTION, EXCEPTION_STACKTRACE, LOG, LOG_STREAM, LOG_TEXT
    from agentlightning.tracing.tree import one_line, printable

    for span in spans:
        if span.name == EXCEPTION and EXCEPTION_STACKTRACE in span.attributes:
            title = "traceback"
            text = span.attributes[EXCEPTION_STACKTRACE]
        elif span.name == LOG:
            title = one_line(str(span.attributes.get(LOG_STREAM)))
            text = span.attributes.get(LOG_TEXT, "")
        else:
            continue
        lines = str(text).splitlines()
        shown = lines if everything else lines[-_LOG_LINES:]
        earlier = len(lines) - len(shown)
        console.print(
            f"── {title}{f' ({earlier} lines before, see --logs)' * bool(earlier)}", markup=False
        )
        for line in shown:
            console.print(printable(line), markup=False)
