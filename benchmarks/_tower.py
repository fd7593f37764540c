"""Trainings of examples/tower_of_hanoi, of twenty calls and more, that differ in how their reward
is divided: what `benchmarks/experiments.py` compares.

Each step has about as many sampled calls: 8 rollouts of a task, or 5 that are forked at call 8."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
EXAMPLE: Final = HERE.parent / "examples" / "tower_of_hanoi"
TOWERS: Final[dict[str, list[str]]] = {
    "tower grpo": ["name=grpo", "aggregation=rollout-mean"],
    "tower rloo": ["name=rloo"],
    "tower gigpo": ["name=grpo", "baseline=gigpo"],
    "tower air 0.05": ["name=rloo", "returns=air"],
    "tower fork": [
        "name=grpo",
        "returns=fork",
        "baseline=none",
        "group_size=5",
        "forks=[8]",
    ],
}


def train(name: str, seed: int, start: Path, directory: Path) -> None:
    """Train from the policy of this seed in `start`, which is made if it is not there."""
    if not start.exists():
        making = [sys.executable, "demonstrations.py", "--seed", str(seed), "--out", str(start)]
        subprocess.run(making, cwd=EXAMPLE, check=True)
    command = [sys.executable, "-m", "agentlightning.cli.main", "train", "run.yaml"]
    command += ["--model", str(start), "--seed", str(seed), "--run-dir", str(directory)]
    settings = [word for one in TOWERS[name] for word in ("--set", f"algorithm.{one}")]
    subprocess.run([*command, *settings], cwd=EXAMPLE, check=True)
