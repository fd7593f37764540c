"""Programs that walk the same calls again run in a folder of the same path."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from agentlightning.runner.own_folder import own_folder
from agentlightning.types import ForkSource, Rollout

FIRST = Rollout(rollout_id="first", input="task", start_time=0.0)
FORK = Rollout(
    rollout_id="fork",
    input="task",
    start_time=0.0,
    source=ForkSource(rollout_id="first", at=1),
)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def left(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name != ".lock"]


def test_attempts_one_after_another_have_the_same_path(folders: Path) -> None:
    with own_folder(FIRST) as folder:
        (folder / "notes").write_text("mine")
        first = folder
        with own_folder(FORK) as beside:  # while it is there
            assert beside != first
            assert left(beside) == []
    with own_folder(FORK) as folder:
        assert (folder, left(folder)) == (first, [])
    assert list(folders.iterdir()) == []


def test_what_a_killed_process_left_is_emptied(folders: Path) -> None:
    with own_folder(FIRST) as first:
        pass
    (first / "workspace").mkdir(parents=True)
    first.chmod(0o700)
    (first / "workspace" / "notes").write_text("old")
    (first / "link").symlink_to(folders / "elsewhere")
    (folders / "elsewhere").mkdir()
    (folders / "elsewhere" / "kept").touch()
    with own_folder(FIRST) as folder:
        assert (folder, left(folder)) == (first, [])
    assert left(folders / "elsewhere") == ["kept"]


@pytest.mark.parametrize("what", ["link", "file", "open to others"])
def test_a_path_that_somebody_else_took_is_not_used(folders: Path, what: str) -> None:
    with own_folder(FIRST) as first:
        pass
    (folders / "theirs").mkdir()
    if what == "link":
        first.symlink_to(folders / "theirs")
    elif what == "file":
        first.write_text("x")
    else:
        first.mkdir()
        first.chmod(0o777)
    with own_folder(FIRST) as folder:
        assert folder != first
    assert left(folders / "theirs") == []
