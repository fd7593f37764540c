"""`agl init` makes a project; docs/install.md, as its test runs it, trains it and runs its
tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentlightning.cli.main import run


def test_the_project_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["init", str(tmp_path / "mine")]) == 0
    assert "agl train" in capsys.readouterr().out
    project = tmp_path / "mine"
    names = {path.relative_to(project).as_posix() for path in project.rglob("*") if path.is_file()}
    assert names == {
        *(
            "agent.py",
            "tiny_model.py",
            "run.yaml",
            "tasks.jsonl",
            "heldout.jsonl",
            "README.md",
            ".gitignore",
        ),
        "tests/test_agent.py",
    }
    train, heldout = (
        set((project / f"{name}.jsonl").read_text().splitlines()) for name in ("tasks", "heldout")
    )
    assert not train & heldout


def test_a_folder_with_something_in_it_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("mine")
    assert run(["init"]) == 1
    refused = capsys.readouterr().err
    assert refused.startswith("error: ") and "not an empty folder" in refused
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert run(["init", "notes.txt"]) == 1
