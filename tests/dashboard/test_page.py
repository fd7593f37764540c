"""The dashboard as people use it, in a real browser: every view, live, by keyboard, at size, and
under attack."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from playwright.async_api import Browser, Page, expect

from agentlightning import semconv
from agentlightning.cli.server_commands import served_model
from agentlightning.learner.policy import Policy
from agentlightning.learner.tiny import chat_text, make_model, make_tokenizer
from agentlightning.server.app import create_app
from agentlightning.server.serve import HttpServer
from agentlightning.store.many import ManyStores
from agentlightning.store.sql import SqlStore
from agentlightning.tracing.context import AttemptTracer, bind
from agentlightning.tracing.emit import emit_reward
from agentlightning.types import Condition, EnqueueRolloutRequest, Metrics
from tests.dashboard.test_routes import record
from tests.dashboard.world import (
    GROUP,
    HOSTILE,
    KEY,
    ROLLOUT,
    RUN,
    World,
    browser,
    evaluated,
    fill,
    served,
    stuck,
)
from tests.node import installed

pytestmark = pytest.mark.anyio
expect.set_options(timeout=8_000)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """One loop for the module, whose browser and server its tests share."""
    return "asyncio"


@pytest.fixture(scope="module")
async def chromium(anyio_backend) -> AsyncIterator[Browser]:
    async with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
async def world(chromium) -> AsyncIterator[World]:
    store = await SqlStore.open(":memory:")
    await fill(store)
    async with served(store) as url:
        yield World(store, url, chromium)
    await store.close()


async def see(page: Page, *texts: str) -> None:
    for text in texts:
        await expect(page.get_by_text(text).filter(visible=True).first).to_be_visible()


async def loaded(page: Page) -> None:
    await expect(page.locator("main h1").first).to_be_visible()
    await expect(page.locator("[aria-busy]")).to_have_count(0)


# --- every view -----------------------------------------------------------------------------------


@pytest.mark.slow
async def test_runs_are_compared_over_what_one_asks_and_seeds_become_one_line_with_its_spread(
    world,
) -> None:
    async with world.page() as page:
        await see(page, "grpo seed 2", "grpo seed 3", "apo")
        chart = page.get_by_role("img", name=re.compile(r"^reward\. "))
        await expect(chart).to_have_accessible_name(re.compile("grpo, 2 seeds: last "))
        await expect(page.get_by_role("list", name="Legend")).to_contain_text(
            "grpo seed 3 and 1 other seed"
        )
        await page.get_by_role("button", name="each seed").click()
        await expect(chart).to_have_accessible_name(
            re.compile("grpo seed 3: last .*; grpo seed 2: last ")
        )
        await expect(page.get_by_role("list", name="Legend").get_by_role("listitem")).to_have_count(
            3
        )
        for axis in ("time", "rollouts", "tokens", "cost"):
            await page.get_by_role("button", name=axis, exact=True).click()
        await page.get_by_role("button", name="log", exact=True).click()
        await page.get_by_label("Smoothing").fill("0.5")
        await page.get_by_label("Compare apo run-apo").uncheck()
        await expect(page.get_by_label("Compare apo run-apo")).to_be_focused()
        # the chosen ones come first
        await expect(page.get_by_role("row").last).to_contain_text("apo")
        assert "x=cost" in page.url and "scale=log" in page.url and "smooth=0.5" in page.url
        await page.get_by_label("Search runs").fill("returns=identical seed")
        await see(page, "2 runs found")
        await page.get_by_role("button", name="Clear").click()
        await page.get_by_label("Search metrics").fill("grad")
        await expect(page.get_by_role("img", name=re.compile(r"^grad_norm\. "))).to_be_visible()
        for kind, begins in (
            ("CSV", b"line,cost,grad_norm,low,high\ngrpo seed"),
            ("PNG", b"\x89PNG"),
        ):
            async with page.expect_download() as download:
                await page.get_by_role("button", name=f"Download grad_norm as {kind}").click()
            file = await (await download.value).path()
            assert (await asyncio.to_thread(file.read_bytes)).startswith(begins)
        await page.get_by_role("button", name="Pin grad_norm").click()
        await page.get_by_label("Search metrics").fill("")
        await page.reload()
        pinned = page.get_by_role("region", name="Pinned")
        await expect(pinned.get_by_role("img", name=re.compile(r"^grad_norm\. "))).to_be_visible()
        plot = pinned.locator(".u-over")
        box = await plot.bounding_box()
        await page.mouse.move(box["x"] + 40, box["y"] + 20)
        await page.mouse.down()
        await page.mouse.move(box["x"] + 42, box["y"] + 70, steps=4)
        await page.mouse.up()
        # zoomed, not opened
        await expect(page.get_by_role("heading", name="Runs", exact=True)).to_be_visible()
        await page.get_by_role("row", name=re.compile("grpo seed 2")).get_by_role("link").click()
        await page.get_by_text("Manifest").click()
        await see(page, '"returns": "identical"')


@pytest.mark.slow
async def test_rollouts_are_found_by_what_they_are(world) -> None:
    async with world.page() as page:
        await world.show(page, "/rollouts", "Rollouts")
        await see(page, "17 rollouts")
        await page.get_by_label("Any status").select_option("failed")
        await see(page, "1 rollout", "red")
        await page.get_by_role("button", name="Clear").click()
        await page.get_by_label("Search ids, inputs, errors").fill("Oslo")
        await see(page, "8 rollouts")
        await page.get_by_label("Reward from").fill("0.5")
        await see(page, "1 rollout", "My flight to Oslo was cancelled.")
        await page.get_by_role("link", name="My flight to Oslo was cancelled.").click()
        await page.get_by_role("heading", name=ROLLOUT).wait_for()


@pytest.mark.slow
async def test_rollouts_are_sorted_by_a_column_and_the_url_keeps_it(world) -> None:
    async with world.page() as page:
        await world.show(page, f"/rollouts?run={RUN}", "Rollouts")
        header = page.get_by_role("columnheader", name="Reward")
        rewards = page.locator('[role="row"]:not(.head) > :nth-child(4)')
        for arrow, best_first in (("descending", True), ("ascending", False)):
            await header.get_by_role("button").click()
            await expect(header).to_have_attribute("aria-sort", arrow)
            await expect(rewards.first).to_have_text("1" if best_first else "0")
            shown = [
                float(text) for text in await rewards.all_inner_texts() if text not in ("", "–")
            ]
            assert len(shown) > 3 and shown == sorted(shown, reverse=best_first)
        assert "sort=reward" in page.url
        await see(page, "Error", "Tags", "Step")


@pytest.mark.slow
async def test_a_click_on_a_point_opens_the_rollouts_of_its_step(world) -> None:
    run = await world.store.start_run("grpo", {"seed": 9}, run_id="run-steps")
    for step in (1, 2):
        await world.store.add_metrics(
            Metrics(run_id=run.run_id, step=step, time=1.0, values={"reward": step / 4})
        )
    held_out = EnqueueRolloutRequest(
        input="held out", run_id=run.run_id, mode="val", metadata={"step": 1}
    )
    asked = [
        EnqueueRolloutRequest(
            input=f"step {step}", run_id=run.run_id, metadata={"sample": f"train-{step}-0-0"}
        )
        for step in (1, 2, 11)
    ]
    for one in await world.store.enqueue_many_rollouts([held_out, *asked]):
        await world.store.update_rollout(one.rollout_id, status="cancelled")
    async with world.page() as page:
        await world.show(page, "/runs/run-steps", "run-steps")
        await (
            page.get_by_role("img", name=re.compile(r"^reward\. "))
            .locator(".u-over")
            .click(position={"x": 3, "y": 80})
        )
        await page.get_by_role("heading", name="Rollouts").wait_for()
        await see(page, "1 rollout", "step 1")
        assert "mode=train" in page.url
        await page.get_by_label("Any mode").select_option("Any mode")
        await see(page, "2 rollouts", "held out")


@pytest.mark.slow
async def test_a_rollout_is_seen_as_conversation_time_tokens_credit_and_as_it_is_stored(
    world,
) -> None:
    async with world.page() as page:
        await world.show(page, f"/rollouts/{ROLLOUT}", ROLLOUT)
        await see(
            page,
            "My flight to Oslo was cancelled.",
            "memory",
            "from: Lisbon, max: 400",
            "flight: IB35",
        )
        await page.get_by_role("link", name="Timeline").click()
        await page.get_by_role("button", name=re.compile("^call ")).first.click()
        await see(page, "Tokens read", "Began after")
        await page.get_by_role("link", name="Tokens", exact=True).click()
        await see(page, "37 tokens", "10 tokens, mean logprob")
        await page.get_by_role("button", name="advantage").click()
        await see(page, "full at 2.475")
        await page.get_by_role("link", name="Credit", exact=True).click()
        await see(page, "identical", "+2.475")
        await page.get_by_role("link", name="Attempts").click()
        await see(page, "the tabs show this one")
        await page.get_by_role("link", name="Logs").click()
        await see(page, "wrote nothing")
        await page.get_by_role("link", name="Raw").click()
        await page.get_by_text("Spans, with their token ids").click()
        await see(page, '"prompt_token_ids"')


@pytest.mark.slow
async def test_a_timed_out_attempt_is_seen_on_one_axis_with_where_it_stood(world) -> None:
    attempted = await stuck(world.store)
    async with world.page() as page:
        await world.show(page, f"/rollouts/{attempted.rollout_id}/timeline", attempted.rollout_id)
        lines = page.locator(".steps > li")
        await expect(lines).to_contain_text(
            ["attempt 1", "tool search", "log stdout", "nothing recorded", "timeout"]
        )
        await see(page, "after its last recorded step: tool search")
        bar = lines.nth(2).locator(".lane i")
        assert (await bar.bounding_box())["width"] / (
            await lines.nth(1).locator(".lane").bounding_box()
        )["width"] > 0.2
        await page.get_by_role("link", name="Logs").click()
        await see(page, "searching")


@pytest.mark.slow
async def test_a_group_is_seen_side_by_side_and_as_a_tree_of_what_it_shares(world) -> None:
    async with world.page() as page:
        await world.show(page, f"/groups/{GROUP}", f"Group {GROUP}")
        await see(page, "8 members", "0.125", "+2.475", "memory ✓")
        await page.get_by_role("link", name="Prefix tree").click()
        await see(page, "1,772", "86.9 %", "×8")
        await page.get_by_role("link", name="#2.2").click()
        await page.get_by_role("heading", name=ROLLOUT).wait_for()


@pytest.mark.slow
async def test_what_surrounds_rollouts_has_views_of_its_own(world) -> None:
    async with world.page() as page:
        await world.show(page, "/prompts", "Prompts")
        await see(page, "1-0", "Too long.", "+Answer briefly.", "8 tasks")
        await world.show(page, "/resources", "Resources")
        await see(page, "Version 3", "Answer briefly.")
        await world.store.update_worker(
            "worker-1", {"running": 3, "finished": 40, "concurrency": 8}
        )
        await world.show(page, "/workers", "Workers")
        await see(page, "worker-1", "3 of 8")
        await world.store.update_worker(
            "worker-1", {"running": 0, "finished": 40, "concurrency": 8, "ended": True}
        )
        await see(page, "0 at work", "ended")
        await world.show(page, "/backends", "Backends")
        await see(page, "policy", "http://127.0.0.1:1/v1")
        await world.show(page, f"/quality?run={RUN}", "Data quality")
        await see(page, "Calls excluded")


@pytest.mark.slow
async def test_where_a_prefix_broke_is_said_with_what_can_be_done(world) -> None:
    one, _ = await record(world.store, [1.0, 0.0])
    spans = await world.store.query_spans(one.rollout_id)
    second = next(span for span in spans if span.attributes.get(semconv.CALL_INDEX) == 1)
    async with world.page() as page:
        await world.show(
            page, f"/rollouts/{one.rollout_id}/tokens?call={second.span_id}", one.rollout_id
        )
        broken = page.get_by_role("region", name="Broken prefix")
        await expect(broken).to_contain_text("Call 1 should continue call 0")
        await expect(broken).to_contain_text("recorded")


# --- live, and by hand ----------------------------------------------------------------------------


@pytest.mark.slow
async def test_what_happens_is_seen_without_a_reload(world) -> None:
    async with world.page() as page:
        await page.evaluate("window.stayed = true")
        run = await world.store.start_run("grpo", {"seed": 7}, run_id="run-live")
        await world.store.add_metrics(
            Metrics(run_id=run.run_id, step=1, time=1.0, values={"reward": 0.5})
        )
        await see(page, "grpo seed 7")
        await world.show(page, "/rollouts", "Rollouts")
        asked = EnqueueRolloutRequest(input={"question": "Is this live?"}, run_id=run.run_id)
        (waiting,) = await world.store.enqueue_many_rollouts([asked])
        row = page.get_by_role("row", name=re.compile("Is this live"))
        await expect(row).to_contain_text("queuing")
        await world.show(page, f"/rollouts/{waiting.rollout_id}", waiting.rollout_id)
        await page.get_by_role("button", name="Cancel").click()
        await expect(page.locator(".view-head")).to_contain_text("cancelled")
        await world.store.update_rollout(waiting.rollout_id, metadata={"tags": ["from elsewhere"]})
        await see(page, "from elsewhere")
        assert await page.evaluate("window.stayed")


@pytest.mark.slow
async def test_a_run_says_why_it_ended_and_is_renamed_tagged_stopped_and_deleted(world) -> None:
    manifest = {"seed": 1, "config": {"algorithm": {"steps": 40}}}
    failed = await world.store.start_run("grpo", manifest, run_id="run-of-old")
    await world.store.next_policy_version(failed.run_id)
    reason = f"TrainingError: {HOSTILE}"
    await world.store.update_run(
        failed.run_id, "failed", merge={"reason": reason, "conclusion": "It got worse."}
    )
    running = await world.store.start_run("grpo", manifest, run_id="run-going")
    for step in (1, 2):
        values = {"reward": 0.5, "calls": 30.0, "excluded/ended by a stop string": 10.0}
        seconds = time.time() - 60 * (3 - step)
        await world.store.add_metrics(
            Metrics(run_id=running.run_id, step=step, time=seconds, values=values)
        )
    async with world.page() as page:
        await expect(page.get_by_role("row", name=re.compile("run-of-old"))).to_contain_text(
            "TrainingError: <script>"
        )
        await world.show(page, "/runs/run-of-old", "run-of-old")
        await expect(page.locator("main section > [role=alert]")).to_contain_text(
            "TrainingError: <script>"
        )
        await see(page, "It got worse.")
        await expect(page.get_by_text("Policy version")).to_have_count(0)  # it took no step
        await page.get_by_role("button", name="Rename").click()
        await page.get_by_label("Name").fill("the first try")
        await page.get_by_role("button", name="Save name").click()
        await page.get_by_role("heading", name="the first try").wait_for()
        await page.get_by_role("button", name="Tag", exact=True).click()
        await page.get_by_label("Tags, with commas").fill("wrong, old")
        await page.get_by_role("button", name="Save tags").click()
        await see(page, "wrong")
        await world.show(page, "/runs?tag=old", "Runs")
        await see(page, "1 run found", "the first try")
        await world.show(page, "/runs/run-of-old", "the first try")
        await page.get_by_role("button", name="Delete", exact=True).click()
        await page.get_by_role("button", name="Delete run").click()
        await page.get_by_role("heading", name="Runs", exact=True).wait_for()
        assert "run-of-old" not in {run.run_id for run in await world.store.query_runs()}
        await world.show(page, "/runs/run-going", "run-going")
        await see(
            page,
            "2 of 40 steps, about ",
            '25% of the calls are not trained (ended by a stop string): `keep: ["ended',
        )
        await expect(page.get_by_role("progressbar", name="Steps done")).to_have_attribute(
            "value", "2"
        )
        await page.get_by_role("button", name="Stop", exact=True).click()
        await see(page, "stops after this step")
    (going,) = [run for run in await world.store.query_runs() if run.run_id == "run-going"]
    assert going.manifest["stop"] is True


@pytest.mark.slow
async def test_tasks_stand_side_by_side_and_a_held_out_rollout_is_not_trained(world) -> None:
    held_out = await evaluated(world.store)
    async with world.page() as page:
        await world.show(page, "/runs/run-evaluated", "run-evaluated")
        await page.locator("summary:has-text('Why did the reward move')").click()
        table = page.get_by_role("region", name="Evaluations")
        tasks = table.locator("tbody").last.get_by_role("row")
        await expect(tasks).to_contain_text(["Task", "London", "Bergen"])
        await expect(tasks.nth(1)).to_contain_text("−2")
        await table.get_by_role("button", name="Change").click()
        await expect(tasks).to_contain_text(["Task", "Bergen", "London"])
        await expect(tasks.nth(1)).to_contain_text("+0.5")
        await world.show(page, "/runs?runs=run-evaluated,run-apo", "Runs")
        await page.locator("summary:has-text('Why do they differ')").click()
        await expect(page.get_by_role("region", name="Tasks by run")).to_contain_text("London")
        await world.show(page, f"/rollouts/{held_out}/credit", held_out)
        await see(page, "Held-out rollouts are not trained")
        await world.show(page, "/rollouts?mode=val", "Rollouts")
        row = page.get_by_role("row", name=re.compile("London")).first
        await expect(row).to_contain_text("grpo seed 4")
        await expect(row.locator(".reward")).to_have_class(re.compile("shade-0"))


@pytest.mark.slow
async def test_a_page_that_only_reads_offers_no_empty_views_and_names_the_command(
    chromium, tmp_path: Path
) -> None:
    (tmp_path / "one").mkdir()
    store = await SqlStore.open(tmp_path / "one" / "store.sqlite")
    await store.start_run("grpo", {}, run_id="run-read")
    await store.update_run("run-read", "succeeded", merge={"name": "my name"})
    await store.close()
    many = await ManyStores.open([tmp_path])
    async with HttpServer(create_app(many)) as http:
        page = await chromium.new_page()
        await page.goto(f"{http.url}/#/runs/run-read")
        await page.get_by_role("heading", name="my name").wait_for()
        await page.get_by_text("Rename, tag, delete").click()
        await see(page, "agl runs rename run-read NAME")
        views = page.get_by_role("navigation", name="Views").get_by_role("link")
        await expect(views).to_contain_text(
            ["Agent Lightning", "Runs", "Rollouts", "Prompts", "Data quality"]
        )
        await expect(views).to_have_count(5)
        await page.close()
    await many.close()


@pytest.mark.slow
async def test_a_person_tags_scores_annotates_and_runs_a_rollout_again(world) -> None:
    attempted = await world.store.start_rollout("by hand")
    await world.store.update_attempt(
        attempted.rollout_id, attempted.attempt.attempt_id, status="succeeded"
    )
    async with world.page() as page:
        await world.show(page, f"/rollouts/{attempted.rollout_id}", attempted.rollout_id)
        await page.get_by_role("button", name="Tag").click()
        await page.get_by_label("Tags, with commas").fill("good, checked")
        await page.get_by_role("button", name="Save tags").click()
        await see(page, "checked")
        await page.get_by_role("button", name="Score").click()
        await page.get_by_label("Reward, which").fill("0.75")
        await page.get_by_label("Comment").fill("Right, but slow")
        await page.get_by_role("button", name="Save score").click()
        await see(page, "0.75", "Right, but slow")
        await page.get_by_role("button", name="Annotate").click()
        await page.get_by_label("Label, such as good").fill("wrong")
        await page.get_by_label("Note").fill("Searched for an hour")
        await page.get_by_label("Corrected answer").fill("SK462")
        await page.get_by_role("button", name="Save annotation").click()
        await see(page, "Searched for an hour", "SK462")
        await page.get_by_role("button", name="Retry").click()
        await expect(page.get_by_role("heading", level=1)).not_to_have_text(attempted.rollout_id)
        await world.show(page, "/rollouts?tag=checked", "Rollouts")
        await see(page, "2 rollouts")
        await world.show(page, "/rollouts", "Rollouts")
        await page.get_by_label("Label", exact=True).fill("wrong")
        await see(page, "2 rollouts", "by hand")
    issued = await world.store.issue_key(name="reader", scopes=["read"])
    async with world.page(issued.api_key) as page:
        await world.show(page, f"/rollouts/{attempted.rollout_id}", attempted.rollout_id)
        await see(
            page,
            "Nothing can be changed or annotated here: your key lacks the scope trainer.",
            "SK462",
        )
        await expect(page.get_by_role("button", name="Annotate")).to_have_count(0)


async def test_a_rollout_is_tried_again_from_a_call_and_its_forks_are_branches(
    world: World,
) -> None:
    async with world.page() as page:
        await world.show(page, f"/rollouts/{ROLLOUT}", ROLLOUT)
        await page.get_by_role("button", name="try again from here").nth(1).click()
        await see(page, f"agl fork {ROLLOUT} --at 1")
        await page.get_by_label("Forks", exact=True).fill("2")
        await page.get_by_label("Answer of call 1").fill("flight: IB36")
        await page.get_by_role("button", name="Queue 2 forks").click()
        await see(page, "From call 1", "2 forks", "queuing")
        forks = await world.store.query_rollouts(where=Condition("source_id", "eq", ROLLOUT))
        assert [fork.source and fork.source.answer for fork in forks] == ["flight: IB36"] * 2
        assert len({fork.metadata["sample"] for fork in forks}) == 2
        attempted = await world.store.start_attempt(forks[0].rollout_id)
        ids = attempted.rollout_id, attempted.attempt.attempt_id
        with bind(AttemptTracer(*ids)) as tracer:
            said = [{"role": "assistant", "content": "flight: IB36"}]
            own = {semconv.CALL_INDEX: 1, semconv.GEN_AI_OUTPUT_MESSAGES: json.dumps(said)}
            tracer.record("chat policy", own)
            emit_reward(0.75)
        await world.store.add_many_spans(tracer.drain())
        await world.store.update_attempt(*ids, status="succeeded")
        await see(page, "0.75", "flight: IB36")
        await page.get_by_role("link", name=forks[0].rollout_id).click()
        await see(page, "fork of", "at call 1")
        await page.get_by_role("link", name=ROLLOUT, exact=True).click()
        await world.show(page, f"/rollouts/{ROLLOUT}/forks", ROLLOUT)
        await see(page, "mean reward 0.75 of 1")
    issued = await world.store.issue_key(name="looker", scopes=["read"])
    async with world.page(issued.api_key) as page:
        await world.show(page, f"/rollouts/{ROLLOUT}", ROLLOUT)
        await page.get_by_role("button", name="try again from here").first.click()
        await see(page, f"agl fork {ROLLOUT} --at 0")
        await expect(page.get_by_role("button", name="Queue")).to_have_count(0)
    await world.store.cancel_rollout(forks[1].rollout_id)
    await world.store.delete_rollouts(Condition("source_id", "eq", ROLLOUT))


async def talk(request: web.Request) -> web.StreamResponse:
    """An OpenAI-compatible model, which calls a tool, or counts until it is stopped."""
    asked = (await request.json())["messages"]
    answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await answer.prepare(request)
    tool = {
        "index": 0,
        "id": "c1",
        "type": "function",
        "function": {"name": "search", "arguments": '{"to": "Oslo"}'},
    }
    deltas = itertools.chain([{"content": "Let me look. "}, {"tool_calls": [tool]}])
    if "count" in asked[-1]["content"]:
        deltas = ({"content": f"{number} "} for number in itertools.count(1))
    with contextlib.suppress(ConnectionError):
        for delta in deltas:
            event = {
                "id": "x",
                "object": "chat.completion.chunk",
                "choices": [{"index": 0, "delta": delta}],
            }
            await answer.write(f"data: {json.dumps(event)}\n\n".encode())
            await asyncio.sleep(0.02)
        end = {"id": "x", "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
        await answer.write(f"data: {json.dumps(end)}\n\ndata: [DONE]\n\n".encode())
    return answer


@pytest.mark.slow
async def test_a_person_talks_to_the_model_stops_it_and_sees_its_tool_calls(chromium) -> None:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", talk)
    runner = web.AppRunner(app)
    await runner.setup()
    await (site := web.TCPSite(runner, "127.0.0.1", 0)).start()
    port = site._server.sockets[0].getsockname()[1]
    store = await SqlStore.open(":memory:")
    issued = await store.issue_key(name="reader", scopes=["read"])
    async with served(store, f"http://127.0.0.1:{port}/v1") as url:
        world = World(store, url, chromium)
        async with world.page() as page:
            await world.show(page, "/chat", "Chat")
            await page.get_by_label("Message").fill("please count")
            await page.get_by_role("button", name="Send").click()
            await see(page, "1 2 3")
            await page.get_by_role("button", name="Stop").click()
            await expect(page.get_by_role("button", name="Send")).to_be_visible()
            await page.get_by_label("Message").fill("to Oslo")
            await page.keyboard.press("Control+Enter")
            await see(page, "Let me look.", "search", '({"to": "Oslo"})')
            await expect(page.locator(".message")).to_have_count(4)
            await page.get_by_role("button", name="New conversation").click()
            await expect(page.locator(".message")).to_have_count(0)
            models = f"{url}/v1/models"  # the cookie is good for the page's own origin alone
            assert (await page.request.get(models)).status == 200
            assert (
                await page.request.get(models, headers={"origin": "http://elsewhere.example"})
            ).status == 403
            await page.context.clear_cookies()
            assert (await page.request.get(models)).status == 401
        async with world.page(issued.api_key) as page:
            await world.show(page, "/chat", "Chat")
            await see(page, "may not call models; it needs the scope worker")
    await runner.cleanup()
    await store.close()


@pytest.mark.slow
async def test_the_page_of_a_served_checkpoint_talks_to_it(chromium, tmp_path: Path) -> None:
    tokenizer = make_tokenizer([chat_text([{"role": "user", "content": "one two three"}])])
    Policy(make_model(tokenizer, seed=0), tokenizer).save(tmp_path / "model")
    async with served_model(str(tmp_path / "model"), model_name="mine", seed=0, key=KEY) as url:
        page = await chromium.new_page()
        await page.goto(f"{url}/#/chat")
        await page.get_by_label("Key of this server").fill(KEY)
        await page.get_by_role("button", name="Sign in").click()
        await page.get_by_label("Message").fill("one")
        await page.get_by_role("button", name="Send").click()
        await expect(page.locator(".message")).to_have_count(2)
        await expect(page.get_by_label("Model")).to_have_value("mine")
        await page.close()


@pytest.mark.slow
async def test_the_keyboard_reaches_everything(world) -> None:
    async with world.page() as page:
        await page.keyboard.press("g")
        await page.keyboard.press("o")
        await page.get_by_role("heading", name="Rollouts").wait_for()
        await page.get_by_role("link", name="My flight to Oslo").first.wait_for()
        await page.keyboard.press("/")
        await page.keyboard.type("Oslo")
        await expect(page.get_by_text("8 rollouts", exact=True)).to_be_visible()
        await page.keyboard.press("Escape")
        for key in ("j", "j", "j", "k"):
            await page.keyboard.press(key)
        await expect(page.locator("[data-row='1'] a").first).to_be_focused()
        await page.keyboard.press("Enter")
        await page.get_by_role("link", name="Conversation").wait_for()
        await page.keyboard.press("3")
        await see(page, "mean logprob")
        await page.keyboard.press("u")
        await page.get_by_role("heading", name="Rollouts").wait_for()
        await page.keyboard.press("?")
        await expect(page.get_by_role("dialog", name="Keyboard")).to_be_visible()
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("dialog")).to_have_count(0)
        before = await page.evaluate("document.documentElement.dataset.theme")
        await page.keyboard.press("t")
        assert await page.evaluate("document.documentElement.dataset.theme") != before


# --- safety and size ------------------------------------------------------------------------------


@pytest.mark.slow
async def test_hostile_content_does_nothing_in_any_view(world) -> None:
    page_of = await world.store.query_rollouts(limit=200)
    (target,) = [one for one in page_of if one.input == HOSTILE]
    base = f"/rollouts/{target.rollout_id}"
    async with world.page() as page:
        for place in (
            "/rollouts",
            *(f"{base}/{tab}" for tab in ("conversation", "timeline", "attempts", "raw")),
        ):
            await world.show(page, place)
            await see(page, "<script>window.hacked = 1</script>")
            assert not {"\x1b", "\u202e", "\x85", "\u061c"} & {*await page.inner_text("main")}
        await world.show(page, f"{base}/{HOSTILE}?call={HOSTILE}&x={HOSTILE}")
        await page.evaluate("place => { location.hash = place }", f"/{HOSTILE}")
        await see(page, "There is no view")
        assert await page.evaluate("window.hacked") is None


async def test_nothing_is_asked_of_others_and_the_key_is_in_no_url(world) -> None:
    asked: list[str] = []
    context = await world.browser.new_context()
    page = await context.new_page()
    page.on("request", lambda request: asked.append(request.url))
    await page.goto(world.url)
    await page.get_by_label("Key of this server").fill("a wrong key")
    await page.get_by_role("button", name="Sign in").click()
    await expect(page.get_by_role("alert")).to_be_visible()
    await page.get_by_label("Key of this server").fill(KEY)
    await page.get_by_role("button", name="Sign in").click()
    await page.get_by_role("heading", name="Runs").wait_for()
    assert asked and all(url.startswith(world.url) for url in asked)
    assert not any("key" in url for url in asked)
    assert KEY not in await page.evaluate(
        "JSON.stringify([localStorage, sessionStorage, document.cookie])"
    )
    await page.evaluate("fetch('api/v1/dashboard/session', {method: 'DELETE'})")
    await page.keyboard.press("g")
    await page.keyboard.press("o")
    await expect(page.get_by_label("Key of this server")).to_be_visible()
    await context.close()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_no_view_has_a_fault_of_accessibility(world, scheme) -> None:
    axe = (
        installed(Path(__file__).parent / "package.json")
        / "node_modules"
        / "axe-core"
        / "axe.min.js"
    )
    places = [
        "/runs",
        "/rollouts",
        f"/groups/{GROUP}",
        f"/groups/{GROUP}/tree",
        "/prompts",
        "/quality",
    ]
    places += ["/resources", "/workers", "/backends", "/chat", f"/runs/{RUN}"]
    attempted = await stuck(world.store)
    await evaluated(world.store, f"run-{scheme}")
    places += [f"/runs/run-{scheme}|summary:has-text('Why did the reward move')"]
    places += [f"/runs/run-{scheme}|text=Rename", "/runs|summary:has-text('Columns of settings')"]
    places += [f"/rollouts/{attempted.rollout_id}/timeline", f"/rollouts?run={RUN}&step=31"]
    places += [
        f"/runs/{RUN}|summary:has-text('Why did the reward move')",
        f"/rollouts/{ROLLOUT}|text=Annotate",
    ]
    places += [
        f"/rollouts/{ROLLOUT}/{tab}"
        for tab in ("conversation", "timeline", "tokens", "credit", "raw")
    ]
    faults: list[tuple[str, str, list[str]]] = []
    async with world.page(color_scheme=scheme, bypass_csp=True) as page:
        await page.add_script_tag(path=axe)
        for place in places:
            place, _, button = place.partition("|")
            await world.show(page, place)
            await loaded(page)
            if button:
                await page.locator(button).first.click()
                await loaded(page)
            found = await page.evaluate("axe.run().then(found => found.violations)")
            for fault in found:
                faults.append(
                    (place, fault["id"], [node["html"][:120] for node in fault["nodes"][:3]])
                )
    assert faults == []


@pytest.mark.slow
async def test_it_is_readable_on_a_phone(world) -> None:
    async with world.page(viewport={"width": 390, "height": 844}, has_touch=True) as page:
        of_one = [f"/rollouts/{ROLLOUT}{tab}" for tab in ("", "/timeline", "/credit")]
        for place in ("/runs", "/rollouts", *of_one, f"/groups/{GROUP}", "/chat"):
            await world.show(page, place)
            await loaded(page)
            assert await page.evaluate("document.documentElement.scrollWidth") <= 390, place
        await world.show(page, f"/rollouts/{ROLLOUT}/raw", ROLLOUT)
        await expect(page.get_by_role("link", name="Raw")).to_be_in_viewport(ratio=0.9)
        await world.show(page, "/backends", "Backends")
        await expect(page.get_by_role("link", name="Backends")).to_be_in_viewport(ratio=0.9)


@pytest.mark.slow
async def test_a_hundred_thousand_rollouts_are_loaded_as_they_come_into_sight(chromium) -> None:
    store = await SqlStore.open(":memory:")
    for start in range(0, 100_000, 10_000):
        some = [
            EnqueueRolloutRequest(input=f"task {number}") for number in range(start, start + 10_000)
        ]
        await store.enqueue_many_rollouts(some)
    async with served(store) as url, World(store, url, chromium).page() as page:
        asked: list[str] = []
        page.on(
            "request",
            lambda request: asked.append(request.url) if "rollouts" in request.url else None,
        )
        await page.evaluate("location.hash = '/rollouts'")
        await see(page, "100,000 rollouts", "task 99999")
        assert await page.locator(".row").count() < 70
        assert len(asked) == 1
        await page.locator(".table").evaluate("table => { table.scrollTop = 80 * 30 }")
        await see(page, "task 99899")
        assert len(asked) == 2
    await store.close()
