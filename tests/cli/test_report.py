"""`agl report`: a page that is whole by itself, in which what others wrote is text, and pictures of the curves."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from agentlightning import semconv
from agentlightning.cli.main import run
from agentlightning.store.sql import SqlStore
from agentlightning.tracing.context import AttemptTracer, bind
from agentlightning.tracing.emit import emit_reward
from agentlightning.types import EnqueueRolloutRequest, Span
from tests.cli.world import HOSTILE, add_run, make_runs


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Page(HTMLParser):
    """The tags of a page, its attributes that name a place, and its text."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.places: list[str] = []
        self.text = ""
        self.source = Path(path).read_text()
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.places += [value or "" for name, value in attrs if name in ("src", "href", "action", "style", "onload")]

    def handle_data(self, data: str) -> None:
        self.text += data


def converse(rewards: list[float]) -> None:
    """A run whose rollouts each said something hostile."""

    async def work() -> None:
        store = await SqlStore.open("runs/mine/store.sqlite")
        await add_run(store, "mine")
        await store.start_run("grpo", {}, run_id="mine")
        for reward in rewards:
            await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=HOSTILE, run_id="mine")])
            [leased] = await store.dequeue_many_rollouts()
            ids = (leased.rollout_id, leased.attempt.attempt_id)
            answer = {"role": "assistant", "content": f"{HOSTILE} is worth {reward}"}
            call = {"id": "1", "type": "function", "function": {"name": "search", "arguments": '{"q": "</pre><img>"}'}}
            said = {
                semconv.GEN_AI_INPUT_MESSAGES: [{"role": "user", "content": HOSTILE}],
                semconv.GEN_AI_OUTPUT_MESSAGES: [{**answer, "tool_calls": [call]}],
            }
            attributes = {name: json.dumps(value) for name, value in said.items()}
            span = Span(rollout_id=ids[0], attempt_id=ids[1], sequence_id=0, trace_id="1" * 32, span_id="2" * 16,
                        name="chat", start_time=1.0, end_time=2.0, attributes=attributes)  # fmt: skip
            tracer = AttemptTracer(*ids)
            with bind(tracer):
                emit_reward(reward)
            await store.add_many_spans([span, *tracer.drain()])
            await store.update_attempt(*ids, status="succeeded")
        await store.close()

    asyncio.run(work())


@pytest.mark.slow
def test_a_page_needs_nothing_beside_it_and_allows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    converse([0.1, 0.9, 0.5])
    assert run(["report"]) == 0
    assert capsys.readouterr().out == "report-mine/report.html, and 3 pictures beside it\n"
    page = Page("report-mine/report.html")
    assert not {"script", "iframe", "link", "form", "object"} & set(page.tags)
    assert page.tags.count("img") == 3
    assert all(place.startswith(("data:image/png;base64,", "#run-")) for place in page.places)
    [style] = re.findall(r"<style>(.*?)</style>", page.source, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"content=\"default-src 'none'; img-src data:; style-src 'sha256-{digest}'\"" in page.source


def test_what_others_wrote_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    converse([0.1, 0.9, 0.5])
    assert run(["report", "--examples", "2"]) == 0
    page = Page("report-mine/report.html")
    assert "<script>alert(1)</script> is worth 0.9" in page.text and "is worth 0.1" in page.text
    assert "is worth 0.5" not in page.text and 'search({"q": "</pre><img>"})' in page.text
    assert not {"\x1b", "\x07", "\u202e"} & set(page.source)


def test_the_page_tells_how_the_run_was_started_and_what_it_reached() -> None:
    converse([0.5])
    assert run(["report"]) == 0
    text = " ".join(Page("report-mine/report.html").text.split())
    for words in (
        "0.250 → 0.700",
        "0.200 → 0.700",
        "1 succeeded",
        "commit c0ffee",
        "agl train",
        "-0.01 -0.1 -0.01 -0.1",
    ):
        assert words in text, words


def test_several_runs_share_a_page_and_its_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    make_runs("one", "two")
    assert run(["report", "one", "two", "--out", "both", "--metric", "reward", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"runs": ["one", "two"], "files": ["both/report.html", "both/reward.png"]}
    assert Path("both/reward.png").read_bytes().startswith(b"\x89PNG")
    page = Page("both/report.html")
    assert page.places[:2] == ["#run-1", "#run-2"] and page.tags.count("img") == 1
    assert run(["report", "one", "--out", "both"]) == 0  # made anew in the same place


def test_a_place_that_cannot_be_written_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    make_runs("one")
    Path("taken").write_text("a file")
    assert run(["report", "--out", "taken/inside"]) == 1
    assert "cannot write to taken/inside" in capsys.readouterr().err
