"""Training that is killed at any moment and started again by the same command ends where it would
have ended."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

PROGRAM = """
import sys
from pathlib import Path
from agentlightning.algorithm.directory import MARK
from tests import agents
from tests.test_trainer import TASKS, algorithm, trainer

run, settings = Path(sys.argv[1]), eval(sys.argv[2])
chosen = algorithm(steps=6, checkpoint_every=2, minibatches=2, **settings)
trainer(run.parent, run_dir=run, algorithm=chosen, deterministic=not settings).fit(
    agents.vowels, TASKS, TASKS[:2], resume=(run / MARK).is_file()
)
"""


def start(run: Path, settings: str = "{}") -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(run), settings],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        start_new_session=True,
    )


def finish(run: Path, settings: str = "{}") -> None:
    process = start(run, settings)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors.decode()


def kill_at(run: Path, seconds: float, settings: str = "{}") -> None:
    """Kill the run so long after its weights were made."""
    process = start(run, settings)
    while not (run / "store.sqlite").exists() and process.poll() is None:
        time.sleep(0.01)
    time.sleep(seconds)
    with contextlib.suppress(ProcessLookupError):  # a machine with less to do got it done
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stderr is not None
    process.stderr.close()


def weights(run: Path) -> str:
    return hashlib.sha256(
        (run / "checkpoints" / "step-000006" / "model.safetensors").read_bytes()
    ).hexdigest()


def lineage(run: Path) -> dict[int, list[str]]:
    """The rollouts that each step trained on: of one that was done again, what it was done with
    last."""
    lines = (run / "batches.jsonl").read_text().splitlines()
    return {
        line["step"]: [name for group in line["groups"] for name in group]
        for line in map(json.loads, lines)
    }


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A whole run, and how long it took from its first write on."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    finish(run)
    began = (run / "run.json").stat().st_mtime
    return run, (run / "checkpoints" / "step-000006" / "loop.json").stat().st_mtime - began


@pytest.mark.parametrize(
    "moment",
    [*range(3), *(pytest.param(number, marks=pytest.mark.soak) for number in range(3, 100))],
)
def test_a_run_killed_at_any_moment_ends_with_the_same_weights(
    tmp_path: Path, undisturbed: tuple[Path, float], moment: int
) -> None:
    whole, seconds = undisturbed
    run = tmp_path / whole.name
    kill_at(run, random.Random(moment).uniform(0, seconds))
    finish(run)
    assert weights(run) == weights(whole)


@pytest.mark.parametrize(
    "moment", [0, *(pytest.param(number, marks=pytest.mark.soak) for number in range(1, 20))]
)
def test_an_overlapping_run_killed_at_any_moment_trains_no_group_twice(
    tmp_path: Path, undisturbed: tuple[Path, float], moment: int
) -> None:
    run, settings = tmp_path / "run", "{'max_staleness': 2}"
    kill_at(run, random.Random(moment).uniform(0, undisturbed[1]), settings)
    finish(run, settings)
    trained = lineage(run)
    assert sorted(trained) == [1, 2, 3, 4, 5, 6]
    assert max(Counter(name for names in trained.values() for name in names).values()) == 1
