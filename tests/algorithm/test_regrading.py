"""Another reward for stored rollouts, by `agl regrade`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.cli.main import run
from agentlightning.store.sql import SqlStore

GRADERS = """
import agentlightning as agl

def short(task, rollout):
    return 1.0 / len(rollout.answer)

async def fails(task, rollout):
    if task["word"] == "a":
        raise LookupError("no such task")
    return float("nan") if task["word"] == "bb" else len(rollout.messages)

nothing = 3
unreachable = agl.rewards.RelativeJudge(agl.LLM(endpoint="http://127.0.0.1:1/v1", model="m"), "Be brief.")
"""


@agl.rollout
async def repeats(task: dict) -> float:
    """The reward is the length of the answer."""
    said = [{"role": "user", "content": "say"}], [{"role": "assistant", "content": task["word"]}]
    agl.emit_annotation(
        {"gen_ai.operation.name": "chat"}
        | {
            f"gen_ai.{name}.messages": json.dumps(text)
            for name, text in zip(("input", "output"), said, strict=True)
        }
    )
    return float(len(task["word"]))


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a run with four rollouts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "graders.py").write_text(GRADERS)
    tasks = [{"word": "a" * length if length < 2 else "b" * length} for length in (1, 2, 3, 4)]
    trainer = agl.Trainer(algorithm=agl.Baseline(), run_dir=tmp_path / "run", progress=False)
    trainer.fit(repeats, tasks, tasks)
    return tmp_path / "run"


def regrade(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run(["regrade", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_function_grades_what_is_stored(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = regrade(capsys, str(recorded), "graders.py:short", "--json")
    compared = json.loads(out)
    assert code == 0 and compared["graded"] == compared["rollouts"] == 4
    assert compared["before"] == 2.5
    assert compared["after"] == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4)
    assert compared["same_order"] is None  # every task was run once
    assert rewards(recorded) == [1.0, 2.0, 3.0, 4.0]


def test_a_saved_reward_is_the_rollouts_from_then_on(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = regrade(capsys, str(recorded), "graders.py:short", "--save")
    assert code == 0 and "4 of 4 rollouts graded\nmean reward 2.5 → 0.5208" in out
    assert rewards(recorded) == pytest.approx([1 / 4, 1 / 3, 1 / 2, 1.0])


def test_a_grader_that_fails_costs_that_rollout_its_reward(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = regrade(capsys, str(recorded), "graders.py:fails")
    assert code == 0 and out.startswith("2 of 4 rollouts graded")
    assert "1 rollouts got no reward: LookupError: no such task" in err
    assert "1 rollouts got no reward: the grader returned nan, not a finite number" in err
    code, _, err = regrade(capsys, str(recorded), "graders.py:nothing")
    assert code == 1 and "give a function of (task, rollout), or a RelativeJudge" in err
    code, _, err = regrade(capsys, str(recorded), "graders.py:unreachable")
    assert code == 1 and "4 rollouts got no reward: the only rollout of its task" in err


def rewards(directory: Path) -> list[float]:
    async def read() -> list[float]:
        store = await SqlStore.open(directory / "store.sqlite")
        try:
            rollouts = await store.query_rollouts()
            spans = [await store.query_spans(rollout.rollout_id) for rollout in rollouts]
            return sorted(agl.find_final_reward(given) or 0.0 for given in spans)
        finally:
            await store.close()

    return asyncio.run(read())
