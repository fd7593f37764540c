"""Takes the pictures docs/images/dashboard-*.png of real runs, so that they stay true.

Usage: python scripts/screenshots.py [--run runs/quickstart] [--run ANOTHER …] [--out docs/images]

The first run is shown in every view, the others are compared with it. Without any, a quickstart is run first.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, async_playwright

from agentlightning.server.app import create_app
from agentlightning.server.serve import HttpServer
from agentlightning.store.sql import SqlStore
from agentlightning.types import And, Condition, Rollout

WINDOW = {"width": 1360, "height": 800}
SETTLE = 1000  # milliseconds in which a view is surely drawn


def bring_together(store: Path, directories: list[Path]) -> None:
    """Copy runs of other stores, with what they measured, into this one."""
    with contextlib.closing(sqlite3.connect(store)) as connection:
        for directory in directories:
            connection.execute("ATTACH ? AS other", (str(directory / "store.sqlite"),))
            for table in ("runs", "metrics"):
                connection.execute(f"INSERT OR IGNORE INTO {table} SELECT * FROM other.{table}")
            connection.commit()
            connection.execute("DETACH other")


async def telling(store: SqlStore, run_id: str) -> Rollout:
    """The longest of the first successes of training, when most of its group still failed."""
    asked = [Condition("run_id", "eq", run_id), Condition("mode", "eq", "train"), Condition("reward", "ge", 1)]
    found = await store.query_rollouts(where=And(asked), limit=30)
    lengths = {one.rollout_id: len(await store.query_spans(one.rollout_id)) for one in found}
    return max(found, key=lambda one: lengths[one.rollout_id])


async def shoot(browser: Browser, url: str, out: Path, places: dict[str, str], **options: Any) -> None:
    context = await browser.new_context(**{"viewport": WINDOW, "color_scheme": "light", **options})
    page = await context.new_page()
    await page.goto(url)
    await page.get_by_text("live", exact=True).wait_for(state="attached")
    for name, place in places.items():
        await page.evaluate("place => { location.hash = place }", place)
        await page.locator("main h1").first.wait_for()
        await page.wait_for_timeout(SETTLE)
        await page.screenshot(path=out / f"dashboard-{name}.png")
        print(out / f"dashboard-{name}.png")
    await context.close()


async def take(runs: list[Path], out: Path, program: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        copy = shutil.copytree(runs[0], Path(directory) / "run")
        store = await SqlStore.open(str(copy / "store.sqlite"))
        run_id = (await store.query_runs())[0].run_id
        await store.close()
        bring_together(copy / "store.sqlite", runs[1:])
        store = await SqlStore.open(str(copy / "store.sqlite"))
        rollout = await telling(store, run_id)
        one = f"/rollouts/{rollout.rollout_id}"
        light = {"runs": "/runs?smooth=0.4", "rollout": one}
        dark = {"tokens": f"{one}/tokens?color=advantage", "credit": f"{one}/credit"}
        dark["tree"] = f"/groups/{rollout.group_id}/tree"
        async with HttpServer(create_app(store)) as http, async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
            await shoot(browser, http.url, out, light)
            await shoot(browser, http.url, out, dark, color_scheme="dark")
        await store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, action="append", help="a run's directory")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        sys.exit("there is no Chromium; scripts/system_packages.sh installs it")
    runs = arguments.run or [Path("runs/quickstart")]
    if not (runs[0] / "store.sqlite").exists():
        subprocess.run([Path(sys.executable).with_name("agl"), "quickstart", "--out", runs[0]], check=True)
    asyncio.run(take(runs, arguments.out, program))


if __name__ == "__main__":
    main()
