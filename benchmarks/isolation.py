"""The price of a process of its own: how soon its first rollout ends, its memory, and each further
rollout.

    python benchmarks/isolation.py [--rounds 3] [--rollouts 300] [--json FILE]

The agents do nothing but import what an agent usually imports. Rollouts run one at a time; "none"
runs the same in a thread of the runner's process, which is the floor."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Final

from agentlightning.runner.isolation import Isolation
from agentlightning.runner.runner import Runner
from agentlightning.store.sql import SqlStore
from agentlightning.types import EnqueueRolloutRequest

HERE: Final = Path(__file__).parent
IMPORTS: Final = ("agentlightning", "openai", "torch")
PLACES: Final[tuple[Isolation, ...]] = ("none", "process")


def children() -> list[int]:
    """The processes that this one has started."""
    found = Path("/proc/self/task").glob("*/children")
    return [int(child) for file in found for child in file.read_text().split()]


def resident_mb(process: int) -> float:
    """Memory of a process, with its share of what it shares."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def cpu_seconds(process: int) -> float:
    """Seconds of CPU that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def seconds_for(store: SqlStore, count: int) -> float:
    """Seconds until so many rollouts have ended, all of them well."""
    began = time.perf_counter()
    requests = [EnqueueRolloutRequest(input="?") for _ in range(count)]
    queued = await store.enqueue_many_rollouts(requests)
    ended = await store.wait_for_rollouts([rollout.rollout_id for rollout in queued], timeout=300)
    assert all(rollout.status == "succeeded" for rollout in ended), ended[0]
    return time.perf_counter() - began


async def measure(agent: str, isolation: Isolation, rollouts: int) -> dict[str, float]:
    """The figures of one runner."""
    with tempfile.TemporaryDirectory() as folder:
        store = await SqlStore.open(f"{folder}/store.sqlite")
        runner = Runner(store, agent, concurrency=1, isolation=isolation)
        running = asyncio.create_task(runner.run())
        figures = {"first, s": await seconds_for(store, 1)}
        if isolation == "process":
            [process] = children()
            figures["its CPU, s"] = cpu_seconds(process)
            figures["memory, MB"] = resident_mb(process)
        figures["each, ms"] = 1000 * await seconds_for(store, rollouts) / rollouts
        runner.stop()
        await running
        await store.close()
        return figures


async def run(rounds: int, rollouts: int) -> dict[str, dict[str, float]]:
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in IMPORTS:
            file = Path(folder) / f"agent_{name}.py"
            file.write_text(f"import {name}\n\n\ndef agent(task):\n    return 1.0\n")
            for place in PLACES:
                several = [await measure(f"{file}:agent", place, rollouts) for _ in range(rounds)]
                medians = {
                    key: statistics.median(one[key] for one in several) for key in several[0]
                }
                results[f"{name}, {place}"] = {
                    key: round(value, 3) for key, value in medians.items()
                }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=300)
    parser.add_argument("--json", type=Path, default=HERE / "results" / "isolation.json")
    arguments = parser.parse_args()
    results = asyncio.run(run(arguments.rounds, arguments.rollouts))
    for part, figures in results.items():
        print(f"{part:24}", *(f"{name}: {value:g}" for name, value in figures.items()), sep="  ")
    arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
