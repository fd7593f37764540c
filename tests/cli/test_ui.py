"""`agl ui`: runs below a folder on one page, as they are written and after they have ended."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

from agentlightning.store.sql import SqlStore
from agentlightning.types import EnqueueRolloutRequest, Metrics, RunStatus
from tests.dashboard.world import chromium

pytestmark = pytest.mark.slow


async def made(path: Path, group_size: int, fails: int, status: RunStatus = "succeeded") -> None:
    """A run of two steps; `fails` of its rollouts fail."""
    path.parent.mkdir(parents=True)
    store = await SqlStore.open(path)
    config = {"models": {"policy": "tiny"}, "algorithm": {"group_size": group_size, "steps": 3}}
    run = await store.start_run("grpo", {"config": config, "seed": 1})
    values = {"reward": 0.5, "groups_without_variance": 3.0, "rollouts": 4.0 * group_size}
    for step in (1, 2):
        await store.add_metrics(
            Metrics(run_id=run.run_id, step=step, time=float(step), values=values)
        )
    requests = [EnqueueRolloutRequest(input=f"task {n}", run_id=run.run_id) for n in range(fails)]
    for rollout in await store.enqueue_many_rollouts(requests):
        ids = rollout.rollout_id, (await store.start_attempt(rollout.rollout_id)).attempt.attempt_id
        reason = {"reason": f"LookupError: no such city {rollout.rollout_id}"}
        await store.update_attempt(*ids, status="failed", metadata=reason)
    await store.update_run(run.run_id, status)
    await store.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    asyncio.run(made(tmp_path / "runs" / "small" / "store.sqlite", 4, 0))
    asyncio.run(made(tmp_path / "runs" / "large" / "store.sqlite", 8, 3))
    command = [sys.executable, "-m", "agentlightning.cli.main", "ui", "--port", "0"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=os.environ, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "2 runs in .; new ones appear by themselves\n"
        found = re.fullmatch(r"dashboard: (\S+)\n", process.stderr.readline())
        assert found is not None
        yield found[1], process
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_runs_are_compared_failures_explained_and_a_new_run_appears(
    served: tuple[str, subprocess.Popen[str]], tmp_path: Path
) -> None:
    url, process = served
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"]) as browser,
    ):
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.goto(url)
        runs = page.get_by_role("table", name="Runs")
        expect(runs.get_by_role("link", name="small")).to_be_visible()
        row = page.get_by_role("row").filter(has_text="algorithm.group_size")
        assert sorted(row.get_by_role("cell").all_inner_texts()) == ["4", "8"]
        with ThreadPoolExecutor() as other:  # Playwright runs a loop in this one
            other.submit(
                asyncio.run, made(tmp_path / "runs" / "later" / "store.sqlite", 2, 1)
            ).result()
        expect(runs.get_by_role("link", name="later")).to_be_visible(timeout=15_000)
        runs.get_by_role("link", name="large").click()
        expect(
            page.get_by_text("In 3 of 4 groups of the newest step all rollouts earned the same")
        ).to_be_visible()
        expect(page.get_by_text("3 failed rollouts, by cause")).to_be_visible()
        expect(page.locator(".causes li")).to_have_count(1)
        page.goto(f"{page.url.partition('#')[0]}#/runs")
        with ThreadPoolExecutor() as other:
            other.submit(
                asyncio.run, made(tmp_path / "runs" / "killed" / "store.sqlite", 2, 0, "running")
            ).result()
        expect(page.locator("[data-row='0']")).to_contain_text(
            re.compile("killed.*stopped"), timeout=15_000
        )
        process.send_signal(signal.SIGTERM)
        expect(page.get_by_role("alert").filter(has_text="has stopped")).to_be_visible(
            timeout=15_000
        )
