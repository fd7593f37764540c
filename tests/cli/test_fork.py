"""`agl fork` runs a recorded rollout again from one of its calls, or from each of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentlightning.algorithm.diagnosis import decisions
from agentlightning.cli.main import run
from agentlightning.cli.training import TEMPLATE
from agentlightning.gateway.recordings import Record, RecordedCall
from agentlightning.tracing.rewards import get_reward_value
from agentlightning.types import Span

pytestmark = pytest.mark.slow

# The first answer alone decides. The second message has an open end, which a mistake changes.
AGENT = """
import os
import agentlightning as agl

TEAMS = ("billing", "technical", "shipping", "account")
LATER = ("It says no.", "Can I have it in writing?")

def prompt(task):
    return [{"role": "system", "content": "Which team?"}, {"role": "user", "content": task["message"]}]

def note(what):
    with open("ran.txt", "a") as file:
        file.write(what + "\\n")

@agl.operation
def look_up(answer: str, number: int) -> dict:
    note("look_up")
    return {"found": [answer, None, 0.5], "number": number}

@agl.operation(once=True)
async def book(team: str) -> str:
    note("book")
    return f"booked {team}"

@agl.rollout
async def agent(task: dict, llm: agl.LLM) -> float:
    client = agl.openai_client(llm)
    messages = prompt(task)
    messages[0]["content"] += os.environ.get("MISTAKE", "")
    answers = []
    for text in ("", *LATER):
        if text:
            messages.append({"role": "user", "content": text})
        answer = await client.chat.completions.create(model=llm.model, messages=messages)
        answers.append(answer.choices[0].message.content or "")
        messages.append({"role": "assistant", "content": answers[-1]})
        found = look_up(answers[0], len(answers))
        assert found == {"found": [answers[0], None, 0.5], "number": len(answers)}
        agl.emit_reward(0.125 * len(answers))
    assert await book(task["team"]) == f"booked {task['team']}"
    return float(answers[0].strip() == task["team"])
"""
RUN_FILE = """
agent: agent.py:agent
model: tiny_model.py:make
train_dataset: tasks.jsonl
val_dataset: tasks.jsonl
algorithm: {name: grpo, steps: 1, max_tokens: 8}
"""


@pytest.fixture
def project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[Path, list[dict[str, Any]]]:
    """A folder as a user has it, and the rollouts of its evaluation."""
    monkeypatch.chdir(tmp_path)
    for name in ("tiny_model.py", "heldout.jsonl"):
        shutil.copy(TEMPLATE / name, tmp_path)
    (tmp_path / "heldout.jsonl").rename("tasks.jsonl")
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    assert run(["eval", "run.yaml", "--limit", "6", "--run-dir", "runs/first"]) in (0, 1)
    capsys.readouterr()
    assert run(["rollouts", "ls", "--json"]) == 0
    return tmp_path, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert run([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_forks_go_on_from_a_call_and_say_which_calls_mattered(
    project: tuple[Path, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    _, rollouts = project
    name = rollouts[0]["rollout_id"]
    from_two = told(capsys, "fork", name, "--at", "2", "--samples", "3")
    assert [fork["reward"] for fork in from_two["forks"]] == [rollouts[0]["reward"]] * 3
    team = rollouts[0]["input"]["team"]
    given = told(capsys, "fork", name, "--at", "0", "--answer", team, "--samples", "2")
    assert given["mean_reward"] == 1
    assert {fork["answer"] for fork in given["forks"]} == {f"“{team}”"}
    found = told(capsys, "fork", name, "--diagnose", "--samples", "6")["decisions"]
    assert [decision["call"] for decision in found] == [0, 1, 2]
    assert [decision["effect"] for decision in found[1:]] == [0, 0]
    assert found[0]["effect"] == pytest.approx(rollouts[0]["reward"] - found[0]["value"])
    passed = told(capsys, "eval", "--from-fork", f"{name}@0", "--samples", "6", "-k", "1,6")
    assert passed["estimates"]["pass@1"]["value"] == pytest.approx(found[0]["value"])
    # a fork of a fork
    fork = from_two["forks"][0]["rollout_id"]
    again = told(capsys, "fork", fork, "--at", "1", "--samples", "1")
    assert again["mean_reward"] == rollouts[0]["reward"]


@pytest.mark.parametrize("isolation", ["none", "process"])
def test_operations_run_again_or_give_what_was_recorded(
    project: tuple[Path, list[dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
    isolation: str,
) -> None:
    folder, rollouts = project
    ran = folder / "ran.txt"
    fork = ("fork", rollouts[0]["rollout_id"], "--at", "2", "--samples", "1")
    fork += ("--isolation", isolation)
    for tools, expected in (("run", ["look_up"] * 3), ("recorded", ["look_up"])):
        ran.write_text("")
        forked = told(capsys, *fork, "--tools", tools)["forks"][0]
        assert (forked["status"], forked["error"]) == ("succeeded", None)
        assert ran.read_text().splitlines() == expected
        assert run(["rollouts", "show", forked["rollout_id"], "--json"]) == 0
        spans = json.loads(capsys.readouterr().out)["spans"]
        own = [msgspec.convert(span, Span) for span in spans if span.pop("tokens", None) is None]
        rewards = [reward for span in own if (reward := get_reward_value(span)) is not None]
        assert sorted(rewards) == sorted([0.125, 0.25, 0.375, forked["reward"]])


def test_a_fork_that_diverges_says_how(
    project: tuple[Path, list[dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = project[1][0]["rollout_id"]
    monkeypatch.setenv("MISTAKE", " Today is 2026-11-28.")
    failed = told(capsys, "fork", name, "--at", "1", "--samples", "1", code=1)
    assert "in the record" in failed["forks"][0]["error"]
    went_on = told(capsys, "fork", name, "--at", "1", "--samples", "1", "--on-divergence", "live")
    assert went_on["forks"][0]["status"] == "succeeded"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ROLLOUT", "--at", "3"), "has no call 3 that was answered: 0, 1, 2"),
        (("nobody", "--at", "0"), "there is no rollout 'nobody'"),
        (("ROLLOUT",), "choose a call: --at CALL, or every call: --diagnose"),
        (("ROLLOUT", "--at", "-1"), "--at"),
        (("ROLLOUT", "--diagnose", "--answer", "yes"), "--answer is for one call"),
    ],
)
def test_mistakes(
    project: tuple[Path, list[dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    name = project[1][0]["rollout_id"]
    words = [name if word == "ROLLOUT" else word for word in arguments]
    assert run(["fork", *words]) in (1, 2)
    assert message in capsys.readouterr().err


def recorded(index: int, start: float, end: float, follows: int | None = None) -> RecordedCall:
    span = Span(
        rollout_id="r",
        attempt_id="a",
        sequence_id=index,
        trace_id="0" * 32,
        span_id=f"{index:016x}",
        name="call",
        start_time=start,
        end_time=end,
    )
    return RecordedCall(span, ("r", "a", index), index, b"", frozenset(), follows, True)


def test_a_difference_of_few_rewards_is_no_certainty() -> None:
    record = Record([recorded(0, 0, 1), recorded(1, 2, 3)])
    first, last = decisions(record, 1.0, {0: [0.0] * 8, 1: [0.0, 1.0] * 4})
    assert (first.value, first.effect, last.value, last.effect) == (0, 0.5, 0.5, 0.5)
    # Agresti and Caffo: (5/10 − 1/10) ± 1.96 √(0.25/10 + 0.09/10), with the sample's variances
    assert first.interval == pytest.approx((0.4 - 0.3809, 0.4 + 0.3809), abs=1e-3)
    assert last.interval is not None
    assert first.mattered
    once = decisions(record, 1.0, {0: [0.0], 1: [1.0]})[0]
    assert once.effect == 1
    assert not once.mattered


def test_of_agents_side_by_side_the_others_stay_as_they_were() -> None:
    # 0 ──── 2    two conversations
    #   1 ──
    record = Record([recorded(0, 0, 1), recorded(1, 0.5, 3), recorded(2, 2, 4, 0)])
    rewards = {0: [0.0, 0.0], 1: [1.0, 0.0], 2: [1.0, 1.0]}
    found = decisions(record, 1.0, rewards)
    assert [decision.effect for decision in found] == [1, 0.5, 0]
    assert decisions(record, 1.0, {0: [], 1: [1.0], 2: [1.0]})[0].effect is None
