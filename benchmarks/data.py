"""From recorded spans to a training step: what each part costs.

    python benchmarks/data.py [--part store,step,long] [--rounds 1]
                              [--rollouts 1000]
                              [--levels transition,trajectory,tree] [--step-rollouts 8]

`store`: spans in SQLite → transitions → a packed batch, and the adapters of Agent Lightning 0.3
(`_store_to_batch.py`). `long`: one rollout of 100 calls (`_long_rollout.py`). `step`: a training
step at each level (`_training_step.py`). A part that is left out keeps its results."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "data.json"


def alone(*arguments: object) -> dict[str, Any]:
    """What this script measures in a process of its own, where memory and warm caches are nobody
    else's."""
    command = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", default="store,step,long")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--levels", default="transition,trajectory,tree")
    parser.add_argument("--step-rollouts", type=int, default=8)
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--one-stage", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--one-level", help=argparse.SUPPRESS)
    options = parser.parse_args()
    step = (options.step_rollouts, options.micro_batch_tokens, options.rounds)
    if options.one_level:
        import _training_step

        print(json.dumps(_training_step.measure(options.one_level, *step)))
        return
    import _store_to_batch

    if options.one_stage:
        stage, path = options.one_stage
        # the threads of the store and the loop take turns on one core
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        print(json.dumps(asyncio.run(_store_to_batch.MEASURED[stage](Path(path)))))
        return
    RESULTS.parent.mkdir(exist_ok=True)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    parts = options.part.split(",")
    if unknown := set(parts) - {"store", "step", "long"}:
        parser.error(f"--part is {', '.join(unknown)}; known: store, step, long")
    if "store" in parts:
        results["store_to_batch"] = _store_to_batch.run(
            options.rollouts, options.rounds, lambda stage, path: alone("--one-stage", stage, path)
        )
    if "step" in parts:
        import _training_step

        names = ("--step-rollouts", "--micro-batch-tokens", "--rounds")
        given = [f"{name}={value}" for name, value in zip(names, step, strict=True)]
        results["training_step"] = _training_step.run(
            options.levels, lambda level: alone("--one-level", level, *given)
        )
    if "long" in parts:
        import _long_rollout

        results["long_rollout"] = _long_rollout.run()
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
