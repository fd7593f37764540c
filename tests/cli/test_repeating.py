"""`agl train --from` repeats a run from its manifest."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentlightning.algorithm.directory import differences, make_manifest
from agentlightning.cli.config import TrainConfig, kept
from agentlightning.cli.main import run
from agentlightning.cli.place import Place
from agentlightning.cli.runs import choose_run
from agentlightning.cli.training import repeated
from agentlightning.errors import ConfigError
from agentlightning.types import Run
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


def find_run(name: str, place: Place) -> Run:
    return asyncio.run(choose_run(name, place)).run


def weights(directory: Path) -> str:
    return hashlib.sha256((directory / "checkpoints" / "step-000002" / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.slow
def test_a_repeated_deterministic_run_ends_with_the_same_weights(project: Path, elsewhere: Path) -> None:
    assert run(["train", "--from", str(project / "run"), "--out", "again"]) == 0
    assert weights(elsewhere / "again") == weights(project / "run")
    # A repeated run can be repeated, and flags and --set win.
    changed = ["--seed", "8", "--steps", "1", "--set", "algorithm.group_size=3"]
    assert run(["train", "--from", "again", "--out", "other", *changed]) == 0
    first, second = (find_run(name, Place()).manifest for name in ("again", "other"))
    assert (first["seed"], second["seed"]) == (7, 8)
    assert {"steps": 1, "group_size": 3, "constant_length": 6}.items() <= second["config"]["algorithm"].items()
    assert second["config"]["run_file"]["agent"] == f"{project}/spelling_agent.py:spelling"


def test_other_tasks_are_refused_unless_they_are_named(
    project: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = find_run(str(project / "run"), Place())
    tasks = project / "tasks.jsonl"
    whole = tasks.read_text()
    (elsewhere / "fewer.jsonl").write_text(whole.splitlines()[0])
    tasks.write_text(whole.splitlines()[0])
    try:
        assert run(["train", "--from", str(project / "run")]) == 1
        assert "tasks.jsonl holds other tasks" in capsys.readouterr().err
        named = {"train_dataset": "fewer.jsonl", "val_dataset": "fewer.jsonl"}
        assert repeated(earlier, (), named).train_dataset == "fewer.jsonl"
    finally:
        tasks.write_text(whole)


def test_a_run_of_python_objects_says_why_it_cannot_be_repeated() -> None:
    manifest = make_manifest(config={}, seed=0, train_tasks=[1], val_tasks=[]) | {"command": ["python", "mine.py"]}
    with pytest.raises(ConfigError, match=r"no names for its agent, its model and its datasets.*python mine\.py"):
        repeated(Run(run_id="r", kind="grpo", start_time=0.0, manifest=manifest), (), {})


def test_another_algorithm_starts_from_its_own_defaults(project: Path) -> None:
    earlier = find_run(str(project / "run"), Place())
    same, other = repeated(earlier, (), {}), repeated(earlier, (), {"algorithm": "gspo"})
    assert same.algorithm["loss"] == "ppo_clip"
    assert "loss" not in other.algorithm
    assert other.algorithm["group_size"] == 4


def test_what_is_different_now_is_told_line_by_line() -> None:
    manifest = make_manifest(config={}, seed=0, train_tasks=[], val_tasks=[])
    assert differences(manifest) == []
    torch = manifest["packages"]["torch"]
    manifest["packages"]["torch"], manifest["commit"], manifest["hardware"]["cores"] = "1.0", "abc", 512
    told = differences(manifest)
    assert told[0].startswith("commit was abc, is ")
    assert told[1:] == [f"packages: torch was 1.0, is {torch}", f"hardware: cores was 512, is {os.cpu_count()}"]


def test_the_manifest_keeps_no_secrets_and_nothing_of_the_one_run(elsewhere: Path) -> None:
    agent: Any = {"command": "./agent", "env": {"OPENAI_API_KEY": "sk-1", "PLACE": "Oslo"}}
    values = {"agent": agent, "model": "m", "train_dataset": "t.jsonl", "api_key": "k", "run_dir": "r", "resume": True}
    values["trackers"] = ["tensorboard", {"name": "lines.py:Lines"}]
    found = kept(msgspec.convert(values, TrainConfig))
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
    assert "Go on:      agl train --resume --run-dir cut" in capsys.readouterr().out
    assert run(["train", "--resume", "--run-dir", "cut"]) == 0
    assert "step 3/3" in "".join(capsys.readouterr())
