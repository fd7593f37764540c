"""The command that looks at what jobs have left behind: `agl runs`."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from agentlightning.errors import ConfigError, InUseError
from agentlightning.types import Metrics, Run

if TYPE_CHECKING:
    from rich.table import Table

    from agentlightning.store.base import LightningStore

STORE_FILE = "store.sqlite"


@dataclass(frozen=True)
class ListedRun:
    """A run, its newest metrics by name, and where it is stored. `run` is None where another process holds the
    store, which is what a running job does."""

    where: str
    run: Run | None
    metrics: dict[str, float]
    steps: int


@click.command()
@click.argument("path", type=click.Path(path_type=Path), default="runs")
@click.option("--server", metavar="URL", help="Ask this `agl server` instead of looking into PATH.")
@click.option("--key", metavar="KEY", envvar="AGL_KEY", show_envvar=True, help="The server's key.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per run.")
def runs(path: Path, server: str | None, key: str | None, as_json: bool) -> None:
    """List the runs in a store file, or in a folder of run directories (default: runs)."""
    listed = asyncio.run(_runs_of_server(server, key) if server is not None else _runs_below(path))
    if as_json:
        for entry in listed:
            print(msgspec.json.encode(entry).decode())
        return
    from rich.console import Console

    table = _table(listed)
    # Ids and paths are there to be copied: a narrow terminal wraps lines rather than cutting cells.
    Console(width=max(Console().width, Console(width=10_000).measure(table).maximum)).print(table)


async def _runs_of_server(url: str, key: str | None) -> list[ListedRun]:
    from agentlightning.store.client import LightningStoreClient

    store = LightningStoreClient(url, api_key=key, patience=5)  # somebody sits before it
    try:
        return await _runs_of(store, url)
    finally:
        await store.close()


async def _runs_below(path: Path) -> list[ListedRun]:
    from agentlightning.store.sql import SqlStore

    listed: list[ListedRun] = []
    for file in _store_files(path):
        try:
            store = await SqlStore.open(file)
        except InUseError:
            listed.append(ListedRun(str(file), None, {}, 0))
            continue
        try:
            listed += await _runs_of(store, str(file))
        finally:
            await store.close()
    return listed


def _store_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(f"no store file and no folder of runs at {path} (looked in {Path.cwd()})")
    found = [path / STORE_FILE, *sorted(path.glob(f"*/{STORE_FILE}"))]
    return [file for file in found if file.is_file()]


async def _runs_of(store: LightningStore, where: str) -> list[ListedRun]:
    listed: list[ListedRun] = []
    for run in await store.query_runs():
        history: list[Metrics] = await store.query_metrics(run.run_id)
        newest = {name: value for metrics in history for name, value in metrics.values.items()}
        listed.append(ListedRun(where, run, newest, history[-1].step if history else 0))
    return listed


def _table(listed: list[ListedRun]) -> Table:
    from rich import box
    from rich.table import Table

    from agentlightning.cli.display import duration

    names = ("run", "kind", "status", "started", "took", "steps", "reward", "held-out", "store")
    table = Table(*names, box=box.SIMPLE_HEAD, pad_edge=False)
    for entry in listed:
        run = entry.run
        if run is None:
            table.add_row("?", "", "in use", "", "", "", "", "", entry.where)
            continue
        started = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.start_time))
        took = duration(run.end_time - run.start_time) if run.end_time is not None else ""
        rewards = [f"{entry.metrics[name]:.3f}" if name in entry.metrics else "" for name in ("reward", "val_reward")]
        table.add_row(run.run_id, run.kind, run.status, started, took, str(entry.steps), *rewards, entry.where)
    return table
