"""`agl top`: runs, workers and backends as they are at the moment, on a terminal again and again.

This module reads a store, and asks its server for the backends, which only that knows. It does not know what they do.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import click

from agentlightning.cli.as_json import print_json
from agentlightning.cli.asking import ask_server
from agentlightning.cli.rollouts import newest_store
from agentlightning.cli.runs import STATUSES, StoredRun
from agentlightning.cli.store import open_store, reading_options, run
from agentlightning.errors import ForbiddenError, NotFoundError, UnavailableError
from agentlightning.store.redaction import text_without_secrets
from agentlightning.types import Worker

if TYPE_CHECKING:
    from rich.console import RenderableType

    from agentlightning.store.base import LightningStore

_RUNS: Final = 6
_WORKERS: Final = 12
_SHARE: Final = 4  # a reading may take a fifth of the time, whatever the interval


@dataclass(frozen=True)
class Snapshot:
    """How things stand at `time`: rollouts by status, the runs that go on and the newest others, workers, and each
    server behind the gateway as the server describes it. `backends` is None where nobody can be asked for them."""

    place: str
    time: float
    rollouts: Mapping[str, int]
    runs: Sequence[StoredRun]
    workers: Sequence[Worker]
    backends: Sequence[Mapping[str, Any]] | None

    def summary(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        runs = [{"run": one.run, "metrics": one.newest, "steps": _step(one) or 0} for one in self.runs]
        told = {"place": self.place, "time": self.time, "rollouts": self.rollouts, "runs": runs}
        return told | {"workers": self.workers, "backends": self.backends}


@click.command()
@reading_options()
@click.option(
    "--interval", type=click.FloatRange(min=0.1), default=2.0, show_default=True, help="Seconds between looks."
)
def top(address: str | None, server: str | None, key: str | None, as_json: bool, interval: float) -> int:
    """Show what runs, on a terminal again and again until q; elsewhere, and with --json, once."""

    async def work() -> None:
        place = None if server else address or newest_store()
        async with open_store(place, server, key, reading=True) as store:
            first = await take_snapshot(store, place, server, key)
            if as_json:
                print_json(first.summary())
            elif sys.stdout.isatty():
                await _watch(store, place, server, key, first, interval)
            else:
                from rich.console import Console

                Console(highlight=False, width=160).print(view(first))

    return run(work())


async def take_snapshot(store: LightningStore, place: str | None, server: str | None, key: str | None) -> Snapshot:
    """How things stand now in the store at `place`, or at `server`."""
    counts = await store.statistics()
    newest_last = sorted(await store.query_runs(), key=lambda one: (one.status == "running", one.start_time))
    chosen = newest_last[: -_RUNS - 1 : -1]
    where = text_without_secrets(place or str(server))
    return Snapshot(
        place=where,
        time=time.time(),
        rollouts={status: counts[f"rollouts_{status}"] for status in STATUSES},
        runs=[StoredRun(where, one, tuple(await store.query_metrics(one.run_id))) for one in chosen],
        workers=await store.query_workers(),
        backends=None if server is None else await _backends(server, key),
    )


async def _backends(server: str, key: str | None) -> list[dict[str, Any]] | None:
    """One line for each server of each model; None without a key that may know, or a gateway."""
    try:
        models: list[dict[str, Any]] = (await ask_server(server, "/api/v1/models", key)).body
    except (ForbiddenError, NotFoundError):
        return None
    return [
        {"model": model["name"], "owner": model["owner"], "held": model.get("held", False), **replica}
        for model in models
        for replica in model["replicas"] or [{"base_url": "in the server's process", "healthy": True}]
    ]


# --- what is shown -----------------------------------------------------------------------------------------------


def view(now: Snapshot, trouble: str = "") -> RenderableType:
    """A snapshot as tables; `trouble` says why there is no newer one."""
    from rich.console import Group
    from rich.text import Text

    from agentlightning.cli.tables import make_table

    head = Text.assemble((now.place, "bold"), time.strftime("  %H:%M:%S  ", time.localtime(now.time)))
    head.append(", ".join(f"{count:,} {status}" for status, count in now.rollouts.items() if count) or "no rollouts")
    if trouble:
        head.append(f"\n{trouble}", "red")
    names = ("run", "status", "took", "step", "reward", "", "held-out", "rollouts/s", "tokens/s")
    parts: list[RenderableType] = [head, make_table(names, map(_run_row, now.runs), title="Runs")]
    workers = sorted(now.workers, key=lambda one: ("busy", "idle", "gone").index(one.status))
    parts.append(_workers_table(workers[:_WORKERS], now.time, len(workers)))
    if now.backends is not None:
        columns = ("model", "server", "state", "running", "waiting", "why")
        parts.append(make_table(columns, map(_backend_row, now.backends), title="Backends"))
    return Group(*parts)


def _run_row(one: StoredRun) -> tuple[object, ...]:
    from agentlightning.cli.tables import squeezed
    from agentlightning.display import duration, sparkline

    ended, newest = one.run.end_time or time.time(), one.newest
    curve = sparkline(squeezed([value for _, value in one.curve("reward")], 10))
    speeds = (newest.get("rollouts_per_second"), newest.get("tokens_per_second"))
    took = duration(max(0.0, ended - one.run.start_time))
    return (
        one.run.run_id,
        one.run.status,
        took,
        _step(one),
        newest.get("reward"),
        curve,
        newest.get("val_reward"),
        *speeds,
    )


def _step(one: StoredRun) -> int | None:
    return one.history[-1].step if one.history else None


def _workers_table(workers: Sequence[Worker], now: float, total: int) -> RenderableType:
    from agentlightning.cli.tables import make_table

    rows: list[tuple[object, ...]] = []
    for one in workers:
        heard = None if one.last_heartbeat_time is None else f"{max(0.0, now - one.last_heartbeat_time):.0f} s ago"
        rows.append((one.worker_id, one.status, heard, one.heartbeat_stats.get("finished"), one.current_rollout_id))
    title = f"Workers{f' ({len(workers)} of {total})' if total > len(workers) else ''}"
    return make_table(("worker", "status", "heard", "finished", "rollout"), rows, title=title)


def _backend_row(one: Mapping[str, Any]) -> tuple[object, ...]:
    state = "held" if one["held"] else "healthy" if one["healthy"] else "ejected"
    return one["model"], one["base_url"], state, one.get("running"), one.get("waiting"), one.get("why")


# --- again and again ---------------------------------------------------------------------------------------------


async def _watch(
    store: LightningStore, place: str | None, server: str | None, key: str | None, now: Snapshot, interval: float
) -> None:
    from rich.console import Console
    from rich.live import Live

    with _stopped_by_q() as stop, Live(console=Console(highlight=False), screen=True, auto_refresh=False) as live:
        live.update(view(now), refresh=True)
        pause = interval
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await stop.wait()
                    return
            asked, trouble = time.monotonic(), ""
            try:
                now = await take_snapshot(store, place, server, key)
            except UnavailableError as error:
                trouble = str(error)
            pause = max(interval, _SHARE * (time.monotonic() - asked))
            live.update(view(now, trouble), refresh=True)


@contextlib.contextmanager
def _stopped_by_q() -> Generator[asyncio.Event]:
    """An event that is set when q is typed."""
    import termios
    import tty

    stop = asyncio.Event()
    if not sys.stdin.isatty():
        yield stop
        return
    keyboard, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)  # keys come as they are typed
    loop.add_reader(keyboard, lambda: stop.set() if sys.stdin.read(1) in ("q", "Q", "") else None)
    try:
        yield stop
    finally:
        loop.remove_reader(keyboard)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
