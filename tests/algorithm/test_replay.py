"""A recorded step is trained again without engine or agents, bit for bit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentlightning.algorithm.rl.batch import RecordedBatch, recorded_batches
from agentlightning.cli.main import run
from tests import agents
from tests.test_trainer import TASKS, algorithm, policy, trainer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with a checkpoint after each, of which the last two were kept."""
    directory = tmp_path_factory.mktemp("replay")
    policy().save(directory / "model")
    settings: dict[str, Any] = {"model": directory / "model", "seed": 3}
    three = algorithm(steps=3, checkpoint_every=1, minibatches=2, reference=True)
    trainer(directory, algorithm=three, **settings).fit(agents.vowels, TASKS)
    return directory / "run"


def summary(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.slow
def test_all_steps_from_the_first_weights_in_another_process_give_them_too(finished: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "agentlightning.cli.main",
        "replay",
        str(finished),
        "--steps",
        "1-3",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "starting from the weights before the first step" in done.stdout
    assert f"bit for bit those of {finished / 'checkpoints' / 'step-000003'}" in done.stdout


def test_other_bits_are_reported(finished: Path, tmp_path: Path, capsys: Any) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    weights = copy / "checkpoints" / "step-000003" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    assert run(["replay", str(copy)]) == 1
    assert "but those of" in capsys.readouterr().out


def test_a_record_that_was_cut_short_is_passed_over(tmp_path: Path) -> None:
    lines = [
        msgspec.json.encode(RecordedBatch(step, step, (("ro-1", "ro-2"),))) for step in (1, 2, 3)
    ]
    (tmp_path / "batches.jsonl").write_bytes(b"\n".join([lines[0], lines[1][:20], lines[2], b""]))
    assert sorted(recorded_batches(tmp_path)) == [1, 3]
