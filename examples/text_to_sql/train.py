"""Train the text-to-SQL team: writer and rewriter at once, each a model of its own; the checker
stays as it is."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from agent import ROLES
from demonstrations import make_start
from rich.console import Console
from spider import load_spider
from tasks import heldout_tasks, save_tasks, train_tasks

from agentlightning.cli.fit import fit, make_algorithm
from agentlightning.cli.run_file import load_config
from agentlightning.cli.training import show_fit
from agentlightning.config import FIELDS
from agentlightning.errors import AgentLightningError, ConfigError


def main(given: argparse.Namespace) -> None:
    out = given.out.resolve()
    if given.spider:
        if not given.model:
            raise ConfigError(
                "--spider needs --model: the tiny policy knows only the words of its own databases"
            )
        train, heldout = load_spider(given.spider, "train_spider"), load_spider(given.spider, "dev")
    else:
        train, heldout = (
            train_tasks(1500, given.seed, out / "databases"),
            heldout_tasks(128, out / "databases"),
        )
    start = (given.start or out / "start").resolve()
    flags = {
        "model": dict.fromkeys(ROLES, given.model or str(start)),
        "run_dir": str(out / "run"),
    }
    flags |= {"train_dataset": save_tasks(train, out / "train.jsonl"), "seed": given.seed}
    flags |= {"val_dataset": save_tasks(heldout, out / "heldout.jsonl")}
    settings = [
        one if re.split("[.=]", one)[0] in FIELDS else f"algorithm.{one}" for one in given.set
    ]
    run_file = given.run_file or Path(__file__).with_name(
        "llama.yaml" if given.model else "run.yaml"
    )
    config = load_config(run_file, settings, flags)
    # what is wrong with the settings is said before minutes are spent
    make_algorithm(config.algorithm)
    if not given.model and not given.start:
        make_start(start, out / "databases", given.seed)
    show_fit(Console(), fit(config, Console()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", dest="set", action="append", type="steps={}".format)
    parser.add_argument("--out", type=Path, default=Path("runs/text_to_sql"))
    policy = parser.add_mutually_exclusive_group()
    policy.add_argument(
        "--start", type=Path, metavar="FOLDER", help="a tiny policy that was made before"
    )
    policy.add_argument("--model", help="a Hugging Face id or a directory instead of a tiny policy")
    parser.add_argument(
        "--spider", type=Path, metavar="FOLDER", help="Spider instead of the made questions"
    )
    parser.add_argument("--only-writer", dest="set", action="append_const", const="agents=writer")
    parser.add_argument(
        "--set",
        action="append",
        metavar="KEY=VALUE",
        help="change run.yaml: steps=9 or lora.rank=8",
    )
    parser.add_argument("--run-file", type=Path, help="default run.yaml, with --model llama.yaml")
    parser.set_defaults(set=[])
    try:
        main(parser.parse_args())
    except AgentLightningError as error:
        sys.exit(f"error: {error}")
