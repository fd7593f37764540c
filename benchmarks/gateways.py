"""What gateways beside a server add: the CPU of a captured call in the server and in the gateways,
for several numbers of these.

    python benchmarks/gateways.py [--rounds 3] [--seconds 5] [--json FILE]

Two cores cannot run four gateways at full speed, so the capacity of N gateways is calculated from
CPU time: N cores for the gateways and one for the server answer min(N / gateway, 1 / server) calls
a second, by the CPU seconds of a call in each. A server alone answers 1 / (its CPU seconds of a
call). Every call is counted in the store afterwards."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import aiohttp
from _load import call_for
from gateway import HERE, World, attempts, attributed, process
from store import Server, client_of, median

COUNTS: Final = (0, 1, 2, 4)
OPEN_CALLS: Final = 64
COMMAND: Final = ("-m", "agentlightning.cli.main", "server", "--port", "0")


async def ask_all(seconds: float, urls: Sequence[str], requests: Sequence[bytes]) -> int:
    """How many calls are answered; an attempt's all at one of the URLs."""
    parts = [
        call_for(seconds, url, requests[number :: len(urls)]) for number, url in enumerate(urls)
    ]
    return sum(map(len, await asyncio.gather(*parts)))


async def measure(count: int, seconds: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        upstream = stack.enter_context(
            process([HERE / "_upstream.py"], max(os.sched_getaffinity(0)), directory / "up")
        )
        command = [*COMMAND, "--store", directory / "store.db"]
        server = stack.enter_context(process(command, None, directory / "server"))
        gateways = list[Server]()
        for number in range(count):
            log = directory / f"gateway{number}"
            command = [*COMMAND, "--gateway-of", server.url]
            started = stack.enter_context(process(command, None, log))
            gateways.append(Server(log.read_text().split(" at ")[-1].split()[0], started.pid))
        async with client_of(server) as store, aiohttp.ClientSession() as session:
            url = f"{server.url}/api/v1/models/at-once"
            async with session.put(url, json={"base_url": f"{upstream.url}/at-once/v1"}) as answer:
                assert answer.status == 200, await answer.text()
            world = World(server, server, upstream, store, directory)
            async with attempts(store, OPEN_CALLS * max(count, 1)) as leased:
                requests = [
                    attributed(world, rollout, "at-once", stream=False) for rollout in leased
                ]
                urls = [gateway.url for gateway in gateways] or [server.url]
                await ask_all(1.0, urls, requests)
                before = await world.spans()
                at_server = server.cpu_seconds()
                at_gateways = sum(gateway.cpu_seconds() for gateway in gateways)
                calls = await ask_all(seconds, urls, requests)
                at_server = server.cpu_seconds() - at_server
                at_gateways = sum(gateway.cpu_seconds() for gateway in gateways) - at_gateways
            assert await world.spans() - before == calls, "each call has left its span"
    return {
        "server CPU ms per call": 1000 * at_server / calls,
        "gateway CPU ms per call": 1000 * at_gateways / calls,
    }


def capacity(count: int, figures: dict[str, float]) -> float:
    """Calls per second, with a core for each process."""
    server = 1000 / figures["server CPU ms per call"]
    return min(1000 * count / figures["gateway CPU ms per call"], server) if count else server


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--json", type=Path, default=HERE / "results" / "gateways.json")
    arguments = parser.parse_args()
    measured: dict[int, list[dict[str, float]]] = {count: [] for count in COUNTS}
    for _ in range(arguments.rounds):
        for count in COUNTS:
            measured[count].append(asyncio.run(measure(count, arguments.seconds)))
    results: dict[str, dict[str, float]] = {}
    for count, several in measured.items():
        figures = median(several)
        results[str(count)] = figures | {"calls per second": capacity(count, figures)}
    alone = results["0"]["calls per second"]
    one = results["1"]["calls per second"]
    print(
        f"{'gateways':>8} {'server, ms':>11} {'gateways, ms':>13} {'calls/s':>8} "
        f"{'of one gateway':>15} {'of none':>8}"
    )
    for count, figures in results.items():
        server, gateway, calls = figures.values()
        print(
            f"{count:>8} {server:11.3f} {gateway:13.3f} {calls:8.0f} {calls / one:15.2f} "
            f"{calls / alone:8.2f}"
        )
    arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
