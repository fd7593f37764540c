"""A server with something to show in every view, behind a key, and a real browser before it."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from playwright.async_api import Browser, Page, async_playwright

from agentlightning import semconv
from agentlightning.gateway.backend import Sampling
from agentlightning.gateway.backends.http import HttpBackend
from agentlightning.gateway.gateway import Gateway
from agentlightning.gateway.models import ModelEntry, ModelTable
from agentlightning.prompts import lineage
from agentlightning.server.app import create_app
from agentlightning.server.serve import HttpServer
from agentlightning.store.sql import SqlStore
from agentlightning.store.transfer import import_rollouts
from agentlightning.tracing.context import AttemptTracer
from agentlightning.tracing.logs import record_log
from agentlightning.tracing.rewards import reward_attributes
from agentlightning.types import (
    AttemptedRollout,
    EnqueueRolloutRequest,
    Metrics,
    PromptTemplate,
    Run,
    Span,
    SpanStatus,
)

FLIGHTS = Path(__file__).parent / "flights"
KEY = "the key of an administrator"
RUN = "run-18ea39b8679ff1da"
GROUP = f"{RUN}-30-v1"
ROLLOUT = f"{GROUP}-2"
SEEDS = (2, 3)
HOSTILE = (
    '<script>window.hacked = 1</script><img src=x onerror="window.hacked = '
    '1">\x1b[31mred\x1b[0m\x07\u202eder\x85\u061c'
)


class World:
    """What is served, and a browser's page that has signed in."""

    def __init__(self, store: SqlStore, url: str, browser: Browser) -> None:
        self.store, self.url, self.browser = store, url, browser

    @asynccontextmanager
    async def page(self, key: str = KEY, **options: Any) -> AsyncIterator[Page]:
        """A page in a session of its own, and an assertion that nothing failed in it."""
        context = await self.browser.new_context(
            **{"viewport": {"width": 1280, "height": 800}, **options}
        )
        page = await context.new_page()
        page.set_default_timeout(20_000)
        failures: list[str] = []
        page.on("pageerror", lambda error: failures.append(str(error)))
        page.on(
            "console",
            lambda said: (
                failures.append(said.text) if "Content Security Policy" in said.text else None
            ),
        )
        await page.goto(self.url)
        await page.get_by_label("Key of this server").fill(key)
        await page.get_by_role("button", name="Sign in").click()
        await page.get_by_role("heading", name="Runs", exact=True).wait_for()
        await page.get_by_text("live", exact=True).wait_for()
        yield page
        await context.close()
        assert failures == []

    async def show(self, page: Page, place: str, heading: str | None = None) -> None:
        """Go to a view, by what follows `#` in its URL, and wait until it has its heading."""
        await page.evaluate("place => { location.hash = place }", place)
        if heading is not None:
            await page.get_by_role("heading", name=heading).first.wait_for()


def chromium() -> str:
    """The browser's program. Skips the test where there is none, unless AGL_REQUIRE_BROWSER is
    set."""
    found = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if found is None:
        reason = "no Chromium; scripts/system_packages.sh installs it"
        if os.environ.get("AGL_REQUIRE_BROWSER"):
            pytest.fail(f"AGL_REQUIRE_BROWSER is set, and there is {reason}")
        pytest.skip(reason)
    return found


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        # Chromium's sandbox does not start as root, which CI is; what it shows comes from this test
        # alone.
        yield await playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])


@asynccontextmanager
async def served(store: SqlStore, upstream: str = "http://127.0.0.1:1/v1") -> AsyncIterator[str]:
    """The URL of a server of the store, with a gateway to a model at `upstream`."""
    models = ModelTable()
    models.put(ModelEntry("policy", HttpBackend(upstream), train=Sampling(temperature=1.0)))
    gateway = Gateway(models, store, admin_key=KEY)
    async with HttpServer(create_app(store, gateway=gateway, admin_key=KEY)) as http:
        yield http.url
    await gateway.close()


async def fill(store: SqlStore) -> None:
    """Two seeds of a training run with recorded rollouts, a search for prompts and a hostile
    rollout."""
    for seed in SEEDS:
        await _trained(store, seed)
    for group_id in (GROUP, f"{RUN}-4-v0"):
        await store.create_group(8, run_id=RUN, group_id=group_id)
    await import_rollouts(store, FLIGHTS / "rollouts.jsonl.gz")
    await _searched(store)
    await hostile(store)


async def _trained(store: SqlStore, seed: int) -> Run:
    manifest = {**json.loads((FLIGHTS / "manifest.json").read_text()), "seed": seed}
    run = await store.start_run(
        "grpo", manifest, run_id=RUN if seed == SEEDS[0] else f"{RUN}-{seed}"
    )
    for line in gzip.decompress((FLIGHTS / "metrics.jsonl.gz").read_bytes()).splitlines():
        step = json.loads(line)
        step["values"]["reward"] = step["values"].get("reward", 0) + 0.1 * (seed - SEEDS[0])
        await store.add_metrics(Metrics(run_id=run.run_id, **step))
    return run


async def _searched(store: SqlStore) -> None:
    run = await store.start_run("apo", {"config": {}}, run_id="run-apo")
    seed = lineage.Candidate(name="seed", round=0, texts={"system": "Answer."})
    better = lineage.Candidate(
        name="1-0",
        round=1,
        texts={"system": "Answer briefly."},
        parent="seed",
        critique="Too long.",
    )
    scores = {"seed": lineage.Score(0.25, 8), "1-0": lineage.Score(0.75, 8)}
    ended = lineage.Round(number=1, beam=["1-0", "seed"], scores=scores, final=True)
    for metadata, texts in (
        ({lineage.CANDIDATE: seed, "diff": ""}, seed.texts),
        ({lineage.CANDIDATE: better, "diff": "-Answer.\n+Answer briefly."}, better.texts),
        ({lineage.ROUND: ended}, better.texts),
    ):
        templates = {name: PromptTemplate(template=text) for name, text in texts.items()}
        await store.add_resources(templates, msgspec.to_builtins(metadata), run_id=run.run_id)


async def hostile(store: SqlStore) -> AttemptedRollout:
    """A rollout of which each text is an attempt to run a script, or to colour a terminal."""
    attempted = await store.start_rollout(HOSTILE, metadata={"tags": [HOSTILE]})
    said = json.dumps([{"role": "assistant", "content": HOSTILE, "name": HOSTILE}])
    tool = {"id": "call-1", "type": "function", "function": {"name": HOSTILE, "arguments": HOSTILE}}
    calls = json.dumps([{"role": "assistant", "content": None, "tool_calls": [tool]}])
    about = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": HOSTILE,
        "gen_ai.agent.name": HOSTILE,
        semconv.CALL_INDEX: 0,
        "gen_ai.input.messages": said,
        "gen_ai.output.messages": calls,
    }
    rollout_id, attempt_id = attempted.rollout_id, attempted.attempt.attempt_id
    common = {
        "rollout_id": rollout_id,
        "attempt_id": attempt_id,
        "trace_id": "1" * 32,
        "start_time": 1.0,
    }
    failed = SpanStatus(status_code="ERROR", description=HOSTILE)
    await store.add_many_spans(
        [
            Span(
                **common,
                sequence_id=1,
                span_id="1" * 16,
                name="chat",
                end_time=2.0,
                attributes=about,
            ),
            Span(
                **common, sequence_id=2, span_id="2" * 16, name=HOSTILE, end_time=3.0, status=failed
            ),
        ]
    )
    await store.update_attempt(
        rollout_id, attempt_id, status="failed", metadata={"reason": HOSTILE}
    )
    return attempted


async def evaluated(store: SqlStore, run_id: str = "run-evaluated") -> str:
    """A run of which two evaluations differ: Bergen got better, London much worse. The id of one of
    its rollouts."""
    config = {"algorithm": {"steps": 4, "group_size": 4}}
    run = await store.start_run(
        "grpo", {"seed": 4, "agent": "agent.py:weather", "config": config}, run_id=run_id
    )
    rollout_id = ""
    for step, rewards in ((0, {"Bergen": 0.5, "London": 2.0}), (4, {"Bergen": 1.0, "London": 0.0})):
        for town, value in rewards.items():
            asked = EnqueueRolloutRequest(
                input=town, mode="val", run_id=run.run_id, metadata={"step": step}
            )
            (rollout,) = await store.enqueue_many_rollouts([asked])
            attempt = (await store.start_attempt(rollout.rollout_id)).attempt
            tracer = AttemptTracer(rollout.rollout_id, attempt.attempt_id)
            tracer.record(
                semconv.REWARD, reward_attributes({"final": value}), start_time=1.0, end_time=1.0
            )
            await store.add_many_spans(tracer.drain())
            await store.update_attempt(rollout.rollout_id, attempt.attempt_id, status="succeeded")
            rollout_id = rollout.rollout_id
        values = {"val_reward": sum(rewards.values()) / 2}
        await store.add_metrics(
            Metrics(run_id=run.run_id, step=step, time=float(step), values=values)
        )
    await store.update_run(run.run_id, "succeeded", merge={"tags": ["weather"]})
    return rollout_id


async def stuck(store: SqlStore) -> AttemptedRollout:
    """A rollout that timed out long after its last step, the tool search."""
    attempted = await store.start_rollout("Find me a flight")
    tracer = AttemptTracer(attempted.rollout_id, attempted.attempt.attempt_id)
    at = attempted.attempt.start_time - 60  # spans may begin before what the store calls the start
    tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "search"}
    tracer.record("execute_tool search", tool, start_time=at, end_time=at + 20)
    record_log(tracer, "stdout", "searching", (at + 5, at + 6))
    await store.add_many_spans(tracer.drain())
    await store.update_attempt(attempted.rollout_id, attempted.attempt.attempt_id, status="timeout")
    return attempted
