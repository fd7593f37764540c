"""Trainings of examples/tower_of_hanoi, of twenty calls and more, that differ in how their reward
is divided: what `benchmarks/experiments.py` compares.

Each step has about as many sampled calls: 8 rollouts of a task, or 5 that are forked at call 8."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
EXAMPLE: Final = HERE.parent / "examples" / "tower_of_hanoi"
# at first, all games of most puzzles are lost
REWARD: Final = "reward={weights: {solved: 1, progress: 0.5}}"
AGL: Final = [sys.executable, "-m", "agentlightning.cli.main"]
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
    "tower discounted": ["name=rloo", "returns=discounted"],
    "tower tree": ["name=grpo", "returns=tree", "baseline=none"],
    "tower air 0.2": ["name=rloo", "returns=air", "returns_options={alpha: 0.2}"],
    "tower asynchronous": ["name=rloo", "max_staleness=4"],
    "tower transition": ["name=rloo", "level=transition"],
    "tower trajectory": ["name=rloo", "level=trajectory"],
}


def train(name: str, seed: int, start: Path, directory: Path) -> dict[str, float]:
    """Train from the policy of this seed in `start`, which is made if it is not there. Return the
    held-out rewards `before` and `after`, of eight games of each puzzle, and the `cpu_seconds` of
    training."""
    if not start.exists():
        making = [sys.executable, "demonstrations.py", "--seed", str(seed), "--out", str(start)]
        subprocess.run(making, cwd=EXAMPLE, check=True)
    known = start.with_suffix(".json")
    if not known.exists():
        known.write_text(json.dumps(held_out(start, directory.with_name("before"))))
    settings = [word for one in (REWARD, *TOWERS[name]) for word in ("--set", f"algorithm.{one}")]
    command = [*AGL, "train", "run.yaml", "--model", start, "--seed", str(seed), *settings]
    before = children()
    subprocess.run([*command, "--run-dir", directory], cwd=EXAMPLE, check=True)
    took = children() - before
    newest = max((directory / "checkpoints").glob("step-*"))
    after = held_out(newest, directory.with_name("after"))
    return {"before": json.loads(known.read_text()), "after": after, "cpu_seconds": took}


def children() -> float:
    """The CPU seconds of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def held_out(model: Path, directory: Path) -> float:
    command = [*AGL, "eval", "run.yaml", "--model", model, "--run-dir", directory]
    command += ["--samples", "8", "--json"]
    told = subprocess.run(command, cwd=EXAMPLE, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(told.stdout.splitlines()[-1])["estimates"]["reward"]["value"]
