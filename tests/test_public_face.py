"""`import agentlightning` is quick, light and complete."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import agentlightning as agl


def test_every_public_name_is_there_and_an_unknown_one_lists_them() -> None:
    for name in agl.__all__:
        assert getattr(agl, name) is not None
    with pytest.raises(AttributeError, match="emit_reward"):
        _ = agl.emit_rewards  # type: ignore[attr-defined]


def test_the_namesake_of_another_maker_is_reported_at_import(tmp_path: Path) -> None:
    information = tmp_path / "agentlightning-0.3.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: agentlightning\nVersion: 0.3.0\n")
    command = [sys.executable, "-c", "import agentlightning"]
    beside = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert "two distributions provide the package 'agentlightning'" in beside.stderr
    assert "pip uninstall" in beside.stderr
    assert subprocess.run(command, capture_output=True, text=True).stderr == ""
