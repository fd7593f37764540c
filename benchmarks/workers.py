"""What workers add: the CPU of a captured call in the owner of the store and in the workers, for
several numbers of them.

    python benchmarks/workers.py [--rounds 3] [--seconds 5] [--json FILE]

Two cores cannot run four workers at full speed, so the capacity of N workers is calculated from CPU
time: N cores for the workers and one for the owner answer min(N / worker, 1 / owner) calls a
second, by the CPU seconds of a call in each. One process without workers answers 1 / (its CPU
seconds of a call). Every call is counted in the store afterwards."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Final

import aiohttp
from _load import call_for
from gateway import HERE, World, attempts, attributed, process
from store import Server, client_of, median

COUNTS: Final = (0, 1, 2, 4)
OPEN_CALLS: Final = 64


def workers_of(owner: Server) -> list[Server]:
    children = Path(f"/proc/{owner.pid}/task/{owner.pid}/children").read_text().split()
    return [Server("", int(pid)) for pid in children]


async def measure(workers: int, seconds: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        upstream = stack.enter_context(
            process([HERE / "_upstream.py"], max(os.sched_getaffinity(0)), directory / "up")
        )
        command = [
            "-m",
            "agentlightning.cli.main",
            "server",
            "--port",
            "0",
            "--store",
            directory / "store.db",
        ]
        command += ["--workers", str(workers)]
        owner = stack.enter_context(process(command, None, directory / "owner"))
        async with client_of(owner) as store, aiohttp.ClientSession() as session:
            url = f"{owner.url}/api/v1/models/at-once"
            async with session.put(url, json={"base_url": f"{upstream.url}/at-once/v1"}) as answer:
                assert answer.status == 200, await answer.text()
            world = World(owner, owner, upstream, store, directory)
            async with attempts(store, OPEN_CALLS) as leased:
                requests = [
                    attributed(world, rollout, "at-once", stream=False) for rollout in leased
                ]
                await call_for(1.0, owner.url, requests)
                before, children = await world.spans(), workers_of(owner)
                at_owner, at_workers = (
                    owner.cpu_seconds(),
                    sum(one.cpu_seconds() for one in children),
                )
                calls = len(await call_for(seconds, owner.url, requests))
                spent = (
                    owner.cpu_seconds() - at_owner,
                    sum(one.cpu_seconds() for one in children) - at_workers,
                )
            assert await world.spans() - before == calls, "each call has left its span"
    return {
        "owner CPU ms per call": 1000 * spent[0] / calls,
        "worker CPU ms per call": 1000 * spent[1] / calls,
    }


def capacity(workers: int, figures: dict[str, float]) -> float:
    """Calls per second, with a core for each process."""
    owner, worker = figures["owner CPU ms per call"], figures["worker CPU ms per call"]
    return 1000 / owner if not workers else min(1000 * workers / worker, 1000 / owner)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--json", type=Path, default=HERE / "results" / "workers.json")
    arguments = parser.parse_args()
    measured: dict[int, list[dict[str, float]]] = {count: [] for count in COUNTS}
    for _ in range(arguments.rounds):
        for count in COUNTS:
            measured[count].append(asyncio.run(measure(count, arguments.seconds)))
    results: dict[str, dict[str, float]] = {}
    for count, several in measured.items():
        figures = median(several)
        results[str(count)] = figures | {"calls per second": capacity(count, figures)}
    alone, one = results["0"]["calls per second"], results["1"]["calls per second"]
    print(
        f"{'workers':>8} {'owner, ms':>10} {'workers, ms':>12} {'calls/s':>8} "
        f"{'of one worker':>14} {'of none':>8}"
    )
    for count, figures in results.items():
        owner, worker, calls = figures.values()
        print(
            f"{count:>8} {owner:10.3f} {worker:12.3f} {calls:8.0f} {calls / one:14.2f} "
            f"{calls / alone:8.2f}"
        )
    arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
