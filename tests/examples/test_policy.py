"""The policy that three examples share."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.examples.loading import EXAMPLES

SMALL = """
import sys
from pathlib import Path
import policy

policy.LAYERS, policy.INNER = 2, 32
try:
    policy.make(["math_tools"], int(sys.argv[2]), Path(sys.argv[1]), count=40, steps=60)
except policy.ConfigError as error:
    sys.exit(str(error))
"""


def making(folder: Path, seed: int = 1) -> subprocess.Popen[str]:
    """A process that makes a small policy."""
    command = [sys.executable, "-c", SMALL, folder, str(seed)]
    return subprocess.Popen(command, cwd=EXAMPLES, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_policy_whose_making_was_killed_has_the_same_bits(tmp_path: Path) -> None:
    with making(tmp_path / "killed") as process:
        while not (tmp_path / "killed" / "checkpoint.pt").exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    made = []
    for folder in (tmp_path / "killed", tmp_path / "whole"):
        assert not (folder / "policy").exists()
        with making(folder) as process:
            assert process.wait() == 0
        made.append((folder / "policy" / "model.safetensors").read_bytes())
    assert made[0] == made[1]
    with making(tmp_path / "whole", seed=2) as process:
        _, said = process.communicate()
    assert (process.returncode, "other settings" in said) == (1, True)


def test_a_folder_that_another_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    with making(tmp_path) as process:
        _, said = process.communicate()
    assert (process.returncode, "other settings" in said) == (1, True)


def test_a_task_without_demonstrations_is_named() -> None:
    command = [sys.executable, EXAMPLES / "policy.py", "--tasks", "hanoi"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no hanoi; known: text_to_sql, multi_hop_rag, math_tools" in done.stderr
