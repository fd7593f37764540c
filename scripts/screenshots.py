"""Takes the pictures docs/images/dashboard-*.png of real runs, so that they stay true.

Usage: python scripts/screenshots.py [--run runs/quickstart] [--run ANOTHER …] [--out docs/images]

The first run is shown in every view, the others are compared with it. Without any, two quickstarts
are run first. Forks are shown if a run has some (`agl fork ID --diagnose`). A third store holds an
attempt that its store times out while you wait."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, async_playwright

from agentlightning.server.app import create_app
from agentlightning.server.serve import HttpServer
from agentlightning.store.base import LightningStore
from agentlightning.store.many import ManyStores
from agentlightning.store.sql import SqlStore
from agentlightning.tracing.context import AttemptTracer
from agentlightning.tracing.logs import record_log
from agentlightning.types import And, Condition, Rollout, RolloutConfig

WINDOW = {"width": 1360, "height": 800}
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True}
WHY = "summary:has-text('Why did the reward move')"
SETTLE = 1000  # milliseconds in which a view is surely drawn


async def telling(store: LightningStore, run_id: str) -> Rollout:
    """The longest of the first successes of training, when most of its group still failed."""
    asked = [
        Condition("run_id", "eq", run_id),
        Condition("mode", "eq", "train"),
        Condition("reward", "ge", 1),
    ]
    found = await store.query_rollouts(where=And(asked), limit=30)
    lengths = {one.rollout_id: len(await store.query_spans(one.rollout_id)) for one in found}
    return max(found, key=lambda one: lengths[one.rollout_id])


async def hanging(path: Path) -> str:
    """A rollout whose agent calls a tool, prints, and then hangs until its store times it out."""
    store = await SqlStore.open(path)
    request = {"question": "My flight to Oslo was cancelled. Find me another one."}
    begun = await store.start_rollout(request, config=RolloutConfig(timeout_seconds=6))
    tracer = AttemptTracer(begun.rollout_id, begun.attempt.attempt_id)
    for tool, seconds in (("memory", 0.4), ("search", 1.5)):
        about = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": tool}
        began = time.time()
        await asyncio.sleep(seconds)
        tracer.record(f"execute_tool {tool}", about, start_time=began)
        record_log(tracer, "stdout", f"{tool} has answered")
    await store.add_many_spans(tracer.drain())
    await store.wait_for_rollouts([begun.rollout_id], timeout=60)
    await store.close()
    return begun.rollout_id


async def shoot(
    browser: Browser, url: str, out: Path, places: dict[str, str], **options: Any
) -> None:
    context = await browser.new_context(**{"viewport": WINDOW, "color_scheme": "light", **options})
    page = await context.new_page()
    await page.goto(url)
    await page.get_by_text("live", exact=True).wait_for(state="attached")
    for name, place in places.items():
        hash_, _, opened = place.partition("|")
        await page.evaluate("place => { location.hash = place }", hash_)
        await page.locator("main h1").first.wait_for()
        if opened:
            await page.locator(opened).click()
            await page.get_by_role("region", name="Evaluations").wait_for()
            await page.locator(opened).evaluate("summary => summary.scrollIntoView()")
        await page.wait_for_timeout(SETTLE)
        await page.screenshot(path=out / f"dashboard-{name}.png")
        print(out / f"dashboard-{name}.png")
    await context.close()


async def take(runs: list[Path], out: Path, program: str) -> None:
    failing = Path(tempfile.mkdtemp()) / "failing.sqlite"
    failed = await hanging(failing)
    store = await ManyStores.open([*runs, failing])
    run_id = next(
        run.run_id for run in await store.query_runs() if run.manifest["name"] == runs[0].name
    )
    rollout = await telling(store, run_id)
    one = f"/rollouts/{rollout.rollout_id}"
    light = {"rollout": one}
    for fork in await store.query_rollouts(where=Condition("source_id", "exists"), limit=1):
        light["forks"] = f"/rollouts/{fork.source.rollout_id}/forks" if fork.source else one
    dark = {"credit": f"{one}/credit", "tree": f"/groups/{rollout.group_id}/tree"}
    answers = {
        "compared": "/runs?smooth=0.4",
        "failed": f"/rollouts/{failed}/timeline",
        "why": f"/runs/{run_id}|{WHY}",
    }
    async with HttpServer(create_app(store)) as http, async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        await shoot(browser, http.url, out, light)
        await shoot(browser, http.url, out, dark, color_scheme="dark")
        for look, how in {"light": {}, "dark": {"color_scheme": "dark"}, "phone": PHONE}.items():
            await shoot(
                browser,
                http.url,
                out,
                {f"{name}-{look}": place for name, place in answers.items()},
                **how,
            )
    await store.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, action="append", help="a run's directory")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    program = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if program is None:
        sys.exit("there is no Chromium; scripts/system_packages.sh installs it")
    runs = arguments.run or [Path("runs/quickstart"), Path("runs/quickstart-2")]
    for seed, run in enumerate(runs, 1):
        if not (run / "store.sqlite").exists():
            command = [
                Path(sys.executable).with_name("agl"),
                "quickstart",
                "--seed",
                str(seed),
                "--run-dir",
                run,
            ]
            subprocess.run(command, check=True)
    asyncio.run(take(runs, arguments.out, program))


if __name__ == "__main__":
    main()
