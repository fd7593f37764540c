"""Train the calculating assistant: by default on problems of reasoning-gym, and from a tiny policy
that is made on the spot, or was made before (`--start`).

Settings are in run.yaml, or gpu.yaml with `--model`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from demonstrations import make_start
from rich.console import Console
from tasks import calc_x_tasks, held_out_tasks, train_tasks

from agentlightning.cli.fit import fit, make_algorithm
from agentlightning.cli.run_file import load_config
from agentlightning.cli.training import show_fit
from agentlightning.errors import AgentLightningError, ConfigError

# Automatic intermediate rewards: of each call, what becomes of the tools it asks for, beside the
# reward of the rollout.
AIR = [
    "algorithm.returns=air",
    # where all fail alike, tools that work are still worth something
    "algorithm.equal_rewards=true",
]


def main(given: argparse.Namespace) -> None:
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if given.calc_x:
        if not given.model:
            raise ConfigError(
                "--calc-x needs --model: the tiny policy knows only the words of its problems"
            )
        train, heldout = (
            calc_x_tasks(given.calc_x, "train"),
            calc_x_tasks(given.calc_x, "test")[:500],
        )
    else:
        train, heldout = train_tasks(3000, given.seed), held_out_tasks(120)
    flags = {
        "model": given.model or str((given.start or out / "start").resolve()),
        "seed": given.seed,
        "run_dir": str(out / "run"),
    }
    for key, tasks in (("train_dataset", train), ("val_dataset", heldout)):
        flags[key] = str(out / f"{key}.jsonl")
        Path(flags[key]).write_text(
            "".join(json.dumps(task) + "\n" for task in tasks), encoding="utf-8"
        )
    changed = (AIR if given.air else []) + given.set
    config = load_config(
        Path(__file__).with_name("gpu.yaml" if given.model else "run.yaml"), changed, flags
    )
    # what is wrong with the settings is said before minutes are spent
    make_algorithm(config.algorithm)
    if not (given.model or given.start):
        make_start(out / "start", given.seed)
    show_fit(Console(), fit(config, Console()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--steps", dest="set", action="append", type="algorithm.steps={}".format, default=[]
    )
    parser.add_argument("--out", type=Path, default=Path("runs/math_tools"))
    parser.add_argument("--air", action="store_true", help="reward tools that work")
    begin = parser.add_mutually_exclusive_group()
    begin.add_argument("--start", type=Path, metavar="DIR", help="a tiny policy made before")
    begin.add_argument(
        "--model", help="a Hugging Face id or a directory instead of the tiny policy"
    )
    parser.add_argument("--calc-x", metavar="FOLDER", help="problems of Calc-X, for a --model")
    parser.add_argument(
        "--set", action="append", metavar="KEY=VALUE", help="such as algorithm.returns=tree"
    )
    try:
        main(parser.parse_args())
    except AgentLightningError as error:
        sys.exit(f"error: {error}")
