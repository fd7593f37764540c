"""Trains examples/tower_of_hanoi as its run file says, for `cpu_time.py`, and prints what it took.

python benchmarks/_tower_load.py START STEPS SEED OUT"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path

from rich.console import Console

from agentlightning.cli.fit import fit
from agentlightning.cli.run_file import load_config
from agentlightning.engine.engine import Engine

TOWER = Path(__file__).resolve().parent.parent / "examples" / "tower_of_hanoi"


class Engines:
    """The engines that a training makes, to read their counts when it has ended."""

    def __init__(self) -> None:
        self.made: list[Engine] = []
        make = Engine.__init__

        def noted(engine: Engine, *arguments: object, **options: object) -> None:
            make(engine, *arguments, **options)  # type: ignore[arg-type]
            self.made.append(engine)

        Engine.__init__ = noted  # type: ignore[method-assign]


def main(start: str, steps: str, seed: str, out: str) -> None:
    os.chdir(TOWER)
    sys.path.insert(0, str(TOWER))
    engines = Engines()
    flags = {"model": start, "seed": int(seed), "run_dir": out}
    config = load_config(TOWER / "run.yaml", [f"algorithm.steps={steps}"], flags)
    began = time.monotonic()
    fit(config, Console(stderr=True))
    counts = [one.statistics for one in engines.made]
    report = {
        "seconds": time.monotonic() - began,
        "tokens sampled": sum(one.generated_tokens for one in counts),
        "prompt tokens computed": sum(one.prompt_tokens for one in counts),
        "prompt tokens found cached": sum(one.reused_tokens for one in counts),
        "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
