"""`agl init` makes a project whose tests pass and that trains at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

AGL = [sys.executable, "-m", "agentlightning.cli.main"]


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=240, check=False, env=environment
    )


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workplace")
    made = run(folder, *AGL, "init", "mine")
    assert made.returncode == 0, made.stderr
    assert "cd mine" in made.stdout and "agl train" in made.stdout
    return folder / "mine"


@pytest.mark.slow
def test_the_project_is_whole_and_its_tests_pass(project: Path) -> None:
    names = {path.relative_to(project).as_posix() for path in project.rglob("*") if path.is_file()}
    assert names == {
        *("agent.py", "tiny_model.py", "run.yaml", "tasks.jsonl", "heldout.jsonl", "README.md", ".gitignore"),
        "tests/test_agent.py",
    }
    train, heldout = (set((project / f"{name}.jsonl").read_text().splitlines()) for name in ("tasks", "heldout"))
    assert not train & heldout
    tested = run(project, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert "3 passed" in tested.stdout, tested.stdout + tested.stderr


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    refused = run(tmp_path, *AGL, "init")
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: ") and "not an empty folder" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert run(tmp_path, *AGL, "init", "notes.txt").returncode == 1


@pytest.mark.slow
def test_the_project_trains_at_once_and_gets_better(project: Path) -> None:
    trained = run(project, *AGL, "train", "--steps", "20", "--json")
    assert trained.returncode == 0, trained.stderr
    reward = json.loads(trained.stdout)["reward"]
    assert reward["after"] > reward["before"] + 0.2
