"""The room-booking example, as a user runs it without a key."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "prompt_optimisation" / "optimise.py"


@pytest.mark.slow
def test_the_example_finds_a_better_prompt_offline(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--rounds", "1", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    before, after = (
        float(line.split(": ")[1].split()[0])
        for line in done.stdout.splitlines()
        if line.startswith("held-out reward")
    )
    assert after > before
    assert (tmp_path / "run" / "prompts" / "prompt.txt").read_text() in done.stdout
