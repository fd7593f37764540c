"""How long the dashboard's list of rollouts takes to show, in a real browser, with many rollouts in
the store.

    python benchmarks/dashboard.py [--rollouts 100000] [--rounds 7]

Store, server and browser are on this machine; a round is a page that is opened anew, script and
styles from the browser's cache. The floor is an empty page of the same server (`/health`)."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from agentlightning.store.sql import SqlStore  # noqa: E402
from agentlightning.types import EnqueueRolloutRequest  # noqa: E402
from tests.dashboard.world import World, browser, served  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "dashboard.json"
AT_ONCE = 10_000


async def measure(rollouts: int, rounds: int) -> dict[str, float]:
    """Medians, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        store = await SqlStore.open(Path(folder) / "store.sqlite")
        for start in range(0, rollouts, AT_ONCE):
            numbers = range(start, min(rollouts, start + AT_ONCE))
            await store.enqueue_many_rollouts(
                [EnqueueRolloutRequest(input=f"task {number}") for number in numbers]
            )
        list_shown: list[float] = []
        empty: list[float] = []
        async with (
            browser() as chromium,
            served(store) as url,
            World(store, url, chromium).page() as page,
        ):
            for _ in range(rounds):
                began = time.perf_counter()
                await page.goto(f"{url}/health")
                empty.append(time.perf_counter() - began)
                began = time.perf_counter()
                await page.goto(f"{url}/#/rollouts")
                await page.get_by_text(f"task {rollouts - 1}").first.wait_for()
                list_shown.append(time.perf_counter() - began)
        await store.close()
    return {
        "rollouts": rollouts,
        "list": statistics.median(list_shown),
        "floor": statistics.median(empty),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    found = asyncio.run(measure(arguments.rollouts, arguments.rounds))
    print(
        f"{'list of rollouts':>18} {found['list']:>6.2f} s with {arguments.rollouts:,} in the store"
    )
    print(f"{'floor':>18} {found['floor']:>6.2f} s")
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
