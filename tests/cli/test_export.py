"""`agl export`: what a store holds, as a dataset in a file."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from agentlightning.cli.main import run
from agentlightning.store.sql import SqlStore
from agentlightning.tracing.context import AttemptTracer, bind
from agentlightning.tracing.emit import emit_reward
from agentlightning.types import EnqueueRolloutRequest, Mode, Span
from tests.data.recordings import call, says

USER = says("user", "hello")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store with a group of three (rewards 0, 1, 1; answers a, b, b), a held-out rollout and one
    that failed."""
    monkeypatch.chdir(tmp_path)

    async def fill() -> None:
        store = await SqlStore.open("agentlightning.sqlite")
        await store.create_group(3, group_id="g")
        for index, (answer, reward) in enumerate([("a", 0.0), ("b", 1.0), ("b", 1.0)]):
            await add(store, answer, reward, group_id="g", group_index=index)
        await add(store, "held out", 1.0, mode="val")
        await add(store, "failed", 1.0, status="failed")
        await store.close()

    asyncio.run(fill())


async def add(
    store: SqlStore,
    answer: str,
    reward: float,
    mode: Mode = "train",
    status: Any = "succeeded",
    attributes: Any = (),
    **more: Any,
) -> None:
    (rollout,) = await store.enqueue_many_rollouts(
        [EnqueueRolloutRequest(input="task", mode=mode, **more)]
    )
    attempt = (await store.start_attempt(rollout.rollout_id)).attempt
    tracer = AttemptTracer(rollout.rollout_id, attempt.attempt_id)
    with bind(tracer):
        emit_reward(reward)
    sampled = call(0, [USER], says("assistant", answer), **dict(attributes))
    names = {name: getattr(sampled, name) for name in sampled.__struct_fields__}
    own = {
        "rollout_id": rollout.rollout_id,
        "attempt_id": attempt.attempt_id,
        "start_time": attempt.start_time,
    }
    await store.add_many_spans(
        [Span(**names | own | {"end_time": attempt.start_time}), *tracer.drain()]
    )
    await store.update_attempt(rollout.rollout_id, attempt.attempt_id, status=status)


def export(*options: str) -> list[Any]:
    assert run(["export", "out.jsonl", "--force", *options]) == 0
    return [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]


def answers(lines: list[Any]) -> list[str]:
    return [line["messages"][-1]["content"] for line in lines]


def test_conversations_of_rollouts_that_succeeded_and_are_not_held_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert answers(export("--format", "sft")) == ["a", "b", "b"]
    assert capsys.readouterr().out == (
        "wrote 3 conversations of 3 rollouts to out.jsonl\n"
        "OpenAI and Azure take no file of fewer than 10 lines\n"
    )
    assert answers(export("--format", "sft", "--mode", "val")) == ["held out"]
    assert answers(export("--format", "sft", "--status", "failed")) == ["failed"]
    assert answers(export("--format", "sft", "--min-reward", "0.5", "--best-of-group")) == ["b"]


def test_pairs_and_what_was_left_out_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = export("--format", "dpo", "--json")
    assert line["preferred_output"] == [says("assistant", "b")] and line["input"] == {
        "messages": [USER]
    }
    told = json.loads(capsys.readouterr().out)
    assert (told["file"], told["pairs"], told["rollouts"]) == ("out.jsonl", 1, 3)
    assert list(told["left_out"].values()) == [1, 1]


def test_rows_of_every_rollout_that_has_ended() -> None:
    assert run(["export", "out.parquet", "--format", "parquet"]) == 0
    table = parquet.read_table("out.parquet").to_pydict()
    assert sorted(table["mode"]) == ["train", "train", "train", "train", "val"]
    assert sorted(table["status"]) == ["failed", *["succeeded"] * 4]
    assert run(["export", "few.parquet", "--min-reward", "1"]) == 0  # its name says the format
    assert parquet.read_table("few.parquet").num_rows == 3  # one that failed has no reward


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            ["--format", "sft", "--min-reward", "2"],
            "nothing was written: 3 rollouts give no conversations",
        ),
        (["--format", "sft", "--run", "nobody's"], "there is no run"),
        (["--format", "sft", "--agents", "("], "agents is '('"),
        (
            [
                "--store",
                "agentlightning.sqlite",
                "--format",
                "sft",
                "--server",
                "http://127.0.0.1:1",
            ],
            "choose the store",
        ),
        ([], "choose with --format"),
        (["--format", "dpo", "--best-of-group"], "--best-of-group goes with --format sft"),
    ],
)
def test_where_nothing_can_be_written_there_is_no_file(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["export", "out.jsonl", *options]) != 0
    assert told in capsys.readouterr().err
    assert not list(Path().glob("out*"))
    Path("out.jsonl").write_text("mine")
    assert run(["export", "out.jsonl", "--format", "sft"]) == 1
    assert "--force" in capsys.readouterr().err and Path("out.jsonl").read_text() == "mine"
