"""`scripts/explain.py` as a user types it: a rollout with a break in it, and what cannot be explained."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from agentlightning import semconv
from agentlightning.store.sql import SqlStore
from agentlightning.tracing.context import AttemptTracer, bind
from agentlightning.tracing.emit import emit_reward
from agentlightning.types import EnqueueRolloutRequest, Span
from scripts.explain import main as explain
from tests.cli.world import CHAT, TOKENIZER, letters, sampled_call, shown_by

END = CHAT.encode("<|end|>")
SYSTEM = {"role": "system", "content": "You are the writer\x1b[2J\u202e[bold]. Be there."}
STORE = "store.sqlite"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def agl(capsys: pytest.CaptureFixture[str]):
    return shown_by(explain, capsys)


def fill(manifest: dict[str, Any] | None = None) -> str:
    """A writer asked three times, whose second answer is cut into other tokens when it is sent back, and a judge; the
    rollout's id."""

    async def work() -> str:
        store = await SqlStore.open(STORE)
        await store.start_run("train", manifest or {}, "run-1")
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input="task", run_id="run-1")])
        leased = await store.dequeue_rollout()
        assert leased is not None
        ids = {"rollout_id": leased.rollout_id, "attempt_id": leased.attempt.attempt_id}
        messages: list[dict[str, Any]] = [SYSTEM]
        spans: list[Span] = []
        for index, said in enumerate((CHAT.encode("there"), letters("there"), CHAT.encode("there"))):
            messages = [*messages, {"role": "user", "content": "hello"}]
            spans.append(sampled_call(ids, index, messages, (*said, *END), "there"))
            messages = [*messages, {"role": "assistant", "content": "there"}]
        judge = [{"role": "user", "content": "and then?"}]
        frozen = {semconv.CALL_TRAINABLE: False, semconv.GEN_AI_RESPONSE_MODEL: "judge"}
        spans.append(sampled_call(ids, 3, judge, END, "there", **frozen))
        tracer = AttemptTracer(leased.rollout_id, leased.attempt.attempt_id)
        with bind(tracer):
            emit_reward(0.5)
        await store.add_many_spans([*spans, *tracer.drain()])
        await store.update_attempt(leased.rollout_id, leased.attempt.attempt_id, status="succeeded")
        await store.close()
        return leased.rollout_id

    return asyncio.run(work())


def test_calls_conversations_sizes_and_breaks_are_shown(agl) -> None:
    name = fill()
    TOKENIZER.save_pretrained("start")  # where a run keeps the model it started from
    code, out, err = agl(name, STORE)
    assert (code, err) == (0, "")
    assert out.startswith(f"rollout {name}: train, succeeded, trainable, reward 0.5 (final 0.5)\n")
    rows = [line.split() for line in out.splitlines()]
    first, second = (row for row in rows if row[:1] in (["0"], ["1"]))
    assert first[-2:] == ["3", "yes"] and [*second[-6:-4], second[-1]] == ["of", "0", "yes"]
    assert any(row[:1] == ["3"] and row[-3:] == ["no:", "frozen", "model"] for row in rows)
    assert "0 → 1 ✗ 2 (from 0)" in out
    assert [line.split()[1:4] for line in out.splitlines() if line.startswith("level")] == [
        ["transition", "3", "rows"],
        ["trajectory", "2", "rows"],
        ["tree", "3", "rows"],
    ]
    assert "call 2 should continue call 1, and is other from token " in out and "in that call's answer: split\n" in out
    assert "<|assistant|> » t·h·e·r·e·<|end|>\n" in out
    assert "<|assistant|> » there·<|end|>·<|user|>·" in out
    assert "(the embedded engine, SGLang)" in out


def test_what_a_terminal_would_obey_is_spelled_out(agl) -> None:
    _, out, _ = agl(fill(), STORE)
    assert not {"\x1b", "\u202e"} & set(out) and "\\x1b[2J\\u202e[bold]" in out


def test_json_says_the_same(agl) -> None:
    name = fill()
    TOKENIZER.save_pretrained("start")
    said = json.loads(agl(name, STORE, "--json")[1])
    assert [call["continues"] for call in said["calls"]] == [None, 0, 0, None]
    assert [call["conversation"] for call in said["calls"]] == [0, 0, 0, None]
    assert said["calls"][3]["left_out"] == "frozen model"
    (broken,) = said["breaks"]
    assert broken["found"]["kind"] == "split" and broken["recorded"][:5] == [*"there"]
    assert 0 < said["levels"][1]["saved"] < said["levels"][2]["saved"] < 1
