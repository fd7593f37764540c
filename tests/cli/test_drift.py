"""`scripts/drift.py` as a user types it: on a store with a little drift in it, and on what it cannot work with."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from agentlightning.store.sql import SqlStore
from agentlightning.types import EnqueueRolloutRequest
from scripts.drift import main as run
from tests.cli.world import CHAT, TOKENIZER, letters, sampled_call, shown_by

END = "<|end|>"


def fill(path: Path, answers: list[tuple[tuple[int, ...], str]]) -> None:
    """A store with one conversation, in which the policy gave these answers."""

    async def work() -> None:
        store = await SqlStore.open(path)
        await store.start_run("train", {}, "run-1")
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input="task", run_id="run-1")])
        leased = await store.dequeue_rollout()
        assert leased is not None
        ids = {"rollout_id": leased.rollout_id, "attempt_id": leased.attempt.attempt_id}
        messages: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
        for index, (sampled, said) in enumerate(answers):
            await store.add_many_spans([sampled_call(ids, index, messages, sampled, said)])
            answer = {"role": "assistant", "content": said}
            messages = [*messages, answer, {"role": "user", "content": "and then?"}]
        await store.close()

    asyncio.run(work())


SPLIT = (*letters("there"), *CHAT.encode(END)), "there"
CLEAN = CHAT.encode("there" + END), "there"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save_pretrained(path)
    return path


@pytest.fixture
def agl(capsys: pytest.CaptureFixture[str]):
    return shown_by(run, capsys)


def test_drift_is_counted_by_check_and_kind_with_examples(tmp_path: Path, tokenizer: Path, agl) -> None:
    """Conversations go on across the pages of a store."""
    fill(tmp_path / "few.db", [SPLIT, CLEAN, CLEAN])
    code, out, err = agl(tmp_path / "few.db", "--tokenizer", tokenizer)
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert out.startswith("compared 3 answers (") and ", call 0\n" in out
    assert ["answer", "split", "1", "33.33%", "5"] in [line[:5] for line in lines]
    assert ["history", "split", "1", "50.00%", "6"] in [line[:5] for line in lines]
    assert " » t·h·e·r·e·<|end|>\n" in out
    assert f" » {'·'.join(CHAT.tokenizer.encode('there<|end|>').tokens)}\n" in out

    fill(tmp_path / "many.db", [SPLIT] * 70)
    found = json.loads(agl(tmp_path / "many.db", "--tokenizer", tokenizer, "--json", "--examples", 2)[1])
    drift = [(row["check"], row["kind"], row["calls"]) for row in found["drift"]]
    assert drift == [("answer", "split", 70), ("history", "split", 69)]
    assert found["compared"]["history"]["calls"] == 69
    assert [example["call_index"] for example in found["examples"]] == [0, 1, 0, 1]
    assert found["examples"][0]["drift"]["recorded"] == [*"there", END]
    assert found["drift"][0]["share_of_calls"] == 1.0 and found["refused_prompts"] == 0
