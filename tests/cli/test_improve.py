"""`agl improve`: prompts, then weights, within one budget."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agentlightning.cli.main import run
from agentlightning.learner.policy import Policy
from agentlightning.learner.tiny import chat_text, make_model, make_tokenizer

AGENT = """
import agentlightning as agl

RULE = "You are the clerk of a hotel."

@agl.rollout
async def agent(task, llm: agl.LLM) -> float:
    client = agl.openai_client(llm)
    messages = [{"role": "system", "content": RULE}, {"role": "user", "content": task["say"]}]
    answer = await client.chat.completions.create(model=llm.model, messages=messages)
    return (len(answer.choices[0].message.content or "") % 5) / 4
"""
RUN_FILE = """
agent: agent.py:agent
model: model
train_dataset: tasks.jsonl
val_dataset: tasks.jsonl
algorithm:
  {name: grpo, steps: 2, tasks_per_step: 2, group_size: 4, max_tokens: 8, budget: {rollouts: 120}}
optimizer: {learning_rate: 1e-4}
max_sequence_length: 128
n_runners: 8
"""


class Editor(BaseHTTPRequestHandler):
    """Adds a word to every prompt."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        text = "<prompt>You are the clerk of a hotel. Answer.</prompt>"
        choice = {"index": 0, "message": {"role": "assistant", "content": text}}
        body = json.dumps({"id": "c", "model": "m", "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def editor() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Editor)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    words = ("one", "two", "three", "four", "five", "six")
    (tmp_path / "tasks.jsonl").write_text(
        "".join(json.dumps({"say": word}) + "\n" for word in words)
    )
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    messages = [
        {"role": "user", "content": " ".join(words)},
        {"role": "assistant", "content": "seven eight"},
    ]
    tokenizer = make_tokenizer([chat_text(messages, [])], 300)
    Policy(make_model(tokenizer, seed=0), tokenizer).save(tmp_path / "model")
    return tmp_path


def improve(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run(["improve", "run.yaml", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_each_step_begins_with_what_the_ones_before_brought_and_is_not_repeated(
    project: Path, editor: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--reflection-endpoint", editor, "--run-dir", "runs/all", "--json")
    code, out, err = improve(capsys, *arguments)
    assert code == 0, err
    steps = json.loads(out.splitlines()[-1])["steps"]
    assert [step["name"] for step in steps] == ["prompts", "fine-tuning", "training"]
    assert sum(step["rollouts"] for step in steps) <= 120
    assert all(step["rollouts"] > 0 for step in steps)
    prompts, tuned, trained = steps
    settings = (project / "runs/all/training/run.yaml").read_text()
    kept = tuned["checkpoint"] if tuned["after"] > tuned["before"] else str(project / "model")
    assert os.path.relpath(kept, project) in settings
    assert ("hotel. Answer." in settings) == (prompts["after"] > prompts["before"])
    assert Path(trained["checkpoint"]).is_dir()

    again = improve(capsys, *arguments)
    assert json.loads(again[1].splitlines()[-1])["steps"] == steps
    code, out, err = improve(capsys, *arguments[:-1])
    assert "prompts" in out and "kept" in out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("--set", "algorithm={name: grpo}"), "give an algorithm that learns from rewards"),
        (("--set", "algorithm={name: gepa}"), "give an algorithm that learns from rewards"),
        (("--set", "val_dataset=null"), "give val_dataset"),
    ],
)
def test_what_cannot_be_improved_is_refused_before_anything_runs(
    project: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, ...], said: str
) -> None:
    code, _, err = improve(capsys, *change)
    assert code == 1 and said in err
    assert not (project / "runs").exists()


def test_steps_that_the_budget_does_not_reach_are_left_out(
    project: Path, editor: str, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("--set", "algorithm.budget={rollouts: 19}", "--reflection-endpoint", editor)
    code, out, err = improve(capsys, *small, "--json")
    assert code == 0, err
    assert [step["name"] for step in json.loads(out.splitlines()[-1])["steps"]] == ["prompts"]
    for name in ("fine-tuning", "training"):
        assert f"{name} is left out: the budget is " in err
