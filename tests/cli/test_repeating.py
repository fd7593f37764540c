"""A run is repeated, and goes on, by the run file in its directory."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentlightning.cli.main import run
from agentlightning.cli.run_file import load_config, repeatable_settings
from agentlightning.config import RunConfig
from tests.test_trainer import TASKS, policy

AGENT = """
import os, signal
import agentlightning as agl
from agentlightning.types import Rollout

@agl.rollout
async def spelling(task, llm: agl.LLM, rollout: Rollout) -> float:
    if os.environ.get("INTERRUPTED_SEED") == str(rollout.metadata["seed"]) and rollout.mode == "train":
        del os.environ["INTERRUPTED_SEED"]
        os.kill(os.getpid(), signal.SIGINT)
    client = agl.openai_client(llm)
    answer = await client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": task["word"]}])
    return sum(letter in "aeiou" for letter in answer.choices[0].message.content or "") / 10
"""
RUN_FILE = """
agent: spelling_agent.py:spelling
model: model
train_dataset: tasks.jsonl
val_dataset: tasks.jsonl
algorithm: {name: dr_grpo, steps: 2, tasks_per_step: 2, group_size: 4, max_tokens: 6, returns: "worth.py:all_of_it"}
optimizer: {learning_rate: 1e-3}
max_sequence_length: 128
seed: 7
deterministic: true
"""
RETURNS = "def all_of_it(reward, transitions):\n    return [reward] * len(transitions)\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a user has it, with a finished run."""
    folder = tmp_path_factory.mktemp("project")
    files = {"spelling_agent.py": AGENT, "run.yaml": RUN_FILE, "worth.py": RETURNS}
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS[:3]))
    policy().save(folder / "model")
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert run(["train", "--run-dir", "run"]) == 0
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def weights(directory: Path) -> str:
    return hashlib.sha256(
        (directory / "checkpoints" / "step-000002" / "model.safetensors").read_bytes()
    ).hexdigest()


@pytest.mark.slow
def test_a_repeated_deterministic_run_ends_with_the_same_weights(
    project: Path, elsewhere: Path
) -> None:
    assert run(["train", str(project / "run" / "run.yaml"), "--out", "again"]) == 0
    assert weights(elsewhere / "again") == weights(project / "run")
    # A repeated run can be repeated, and flags and --set win.
    changed = ["--seed", "8", "--steps", "1", "--set", "algorithm.group_size=3"]
    assert run(["train", "again/run.yaml", "--out", "other", *changed]) == 0
    config = load_config(elsewhere / "other" / "run.yaml")
    assert config.seed == 8 and {"steps": 1, "group_size": 3}.items() <= config.algorithm.items()
    assert config.agent == f"{project}/spelling_agent.py:spelling"


def test_the_run_file_keeps_no_secrets_and_nothing_of_the_one_run(elsewhere: Path) -> None:
    agent: Any = {"command": "./agent", "env": {"OPENAI_API_KEY": "sk-1", "PLACE": "Oslo"}}
    values = {
        "agent": agent,
        "model": "m",
        "train_dataset": "t.jsonl",
        "api_key": "k",
        "run_dir": "r",
        "resume": True,
    }
    values["trackers"] = ["tensorboard", {"name": "lines.py:Lines"}]
    found = repeatable_settings(msgspec.convert(values, RunConfig))
    assert found["agent"]["env"] == {"PLACE": "Oslo"}
    assert found["train_dataset"] == str(elsewhere / "t.jsonl")
    assert found["trackers"] == ["tensorboard", {"name": f"{elsewhere}/lines.py:Lines"}]
    assert not {"api_key", "run_dir", "resume"} & set(found)


@pytest.mark.slow
def test_a_run_goes_on_with_what_it_began_with(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setenv("INTERRUPTED_SEED", "7")
    changed = ("--set", "algorithm.steps=3", "--set", "deterministic=false", "--out", "cut")
    assert run(["train", *changed]) == 130
    assert "agl train --resume --run-dir cut" in capsys.readouterr().out
    assert run(["train", "--resume", "--run-dir", "cut"]) == 0
    assert "step 3/3" in "".join(capsys.readouterr())
