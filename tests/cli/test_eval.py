"""`agl eval` runs an agent, or reads what runs have stored, and says how good it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentlightning.cli.main import run
from tests.test_trainer import TASKS

AGENT = """
import asyncio, contextlib, os, signal
import agentlightning as agl

async def ask(llm):
    # in vain: nobody answers at the endpoint
    with contextlib.suppress(Exception):
        client = agl.openai_client(llm).with_options(max_retries=0)
        await client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": "?"}])

@agl.rollout
async def obedient(task, llm: agl.LLM, resources: dict) -> float:
    if task["word"] == os.environ.get("INTERRUPTED_AT"):
        del os.environ["INTERRUPTED_AT"]
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()
    await ask(llm)
    if task["word"] == "umber":
        raise LookupError("no such colour")
    wanted = resources["prompt"].template if "prompt" in resources else llm.model
    return float(wanted.strip() in (task["word"], "always"))
"""
RUN_FILE = """
agent: measured_agent.py:obedient
train_dataset: tasks.jsonl
val_dataset: tasks.jsonl
initial_resources:
  llm: {resource_type: llm, endpoint: "http://127.0.0.1:9/v1", model: never-asked}
  prompt: {resource_type: prompt_template, template: ocean}
"""
ENDPOINT = ("--endpoint", "http://127.0.0.1:9/v1", "--endpoint-key", "none")
OBEDIENT = ("measured_agent.py:obedient", "tasks.jsonl")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as a user has it; its agent is rewarded where the model's name, or the prompt, is
    the task's word."""
    monkeypatch.chdir(tmp_path)
    tasks = [{**task, "kind": "odd" if task["index"] % 2 else "even"} for task in TASKS[:4]]
    (tmp_path / "measured_agent.py").write_text(AGENT)
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert run(["eval", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_an_agent_is_measured_at_an_endpoint(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = told(
        capsys,
        *OBEDIENT,
        *ENDPOINT,
        "--model",
        "apple",
        "--samples",
        "2",
        "-k",
        "1,2",
        "--out",
        "one",
    )
    assert found["ended"] == {"rewarded": 6, "failed": 2}
    assert "LookupError: no such colour" in found["problem"]
    assert found["attempts"] == [2, 2]
    assert {name: one["value"] for name, one in found["estimates"].items()} == dict.fromkeys(
        ("reward", "pass@1", "pass@2"), 0.25
    )
    assert {tag: one["reward"]["value"] for tag, one in found["tags"].items()} == {
        "kind=even": 0.5,
        "kind=odd": 0.0,
    }

    stored = told(capsys, "--rollouts", "one", "-k", "1,2")  # measured again, and nothing is run
    assert {**stored, "names": found["names"]} == found
    assert (
        told(capsys, "--rollouts", "one", "--threshold", "0")["estimates"]["pass@1"]["value"]
        == 0.75
    )


@pytest.mark.slow
def test_an_interrupted_evaluation_goes_on(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INTERRUPTED_AT", "ocean")
    command = (*OBEDIENT, *ENDPOINT, "--model", "always", "--out", "one", "--n-runners", "1")
    assert run(["eval", *command]) == 130
    assert "--resume continues" in capsys.readouterr().out
    assert told(capsys, *command, "--resume")["estimates"]["reward"]["value"] == 0.75


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        ((), 2, "choose what to measure"),
        (("--rollouts", "one", "--compare", "a", "b"), 2, "choose what to measure"),
        (
            ("--rollouts", "one", "--samples", "2"),
            2,
            "--samples is for what runs an agent, and none is named",
        ),
        ((*OBEDIENT, "--compare", "one", "two"), 2, "--compare is for what reads what is stored"),
        ((*OBEDIENT,), 2, "choose the model"),
        (("measured_agent.py:obedient", *ENDPOINT, "--model", "m"), 2, "DATA is missing"),
        ((*OBEDIENT, *ENDPOINT), 2, "--endpoint needs --model"),
        (("run.yaml", "-k", "1,4"), 2, "pass@4 needs 4 attempts at each task: --samples 4"),
        (("run.yaml", "-k", "0"), 2, "write 1,4,8"),
        (("--rollouts", "nowhere"), 1, "and no run in"),
    ],
)
def test_what_cannot_be_measured_says_why(
    project: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: int,
    told: str,
) -> None:
    assert run(["eval", *arguments]) == code
    assert told in " ".join(capsys.readouterr().err.split())


def test_the_run_file_here_is_shown(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["eval", "--show", "--limit", "1"]) == 0
    assert "Run: runs" in capsys.readouterr().out


@pytest.mark.slow
def test_two_measured_runs_are_compared_and_what_was_not_measured_is_refused(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "initial_resources.prompt.template"
    told(capsys, "run.yaml", "--set", f"{prompt}=never", "--out", "one")
    told(capsys, "run.yaml", "--set", f"{prompt}=always", "--out", "two")
    reward = told(capsys, "--compare", "one", "two@0")["differences"]["reward"]
    assert (reward["value"], reward["tasks"], reward["p"]) == (0.75, 4, 2 / 8)
    for arguments, said in (
        (("--rollouts", "one@7"), "one has measured no '7'; it has 0"),
        (("--rollouts", "one", "--mode", "train"), "one has no rollouts of mode train"),
        (("--rollouts", "one", "-k", "2"), "the most that one has is 1"),
    ):
        capsys.readouterr()
        assert run(["eval", *arguments]) == 1
        assert said in capsys.readouterr().err
