"""Train the question answerer: by default on a world of facts made here, and from a tiny policy
made on the spot.

Settings are in run.yaml, or gpu.yaml with `--model`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from demonstrations import make_start
from retriever import build_index
from rich.console import Console
from tasks import load

from agentlightning.cli.fit import fit, make_algorithm
from agentlightning.cli.run_file import load_config
from agentlightning.cli.training import show_fit
from agentlightning.errors import AgentLightningError, ConfigError


def main(given: argparse.Namespace) -> None:
    out = given.out.resolve()
    if given.musique and not given.model:
        raise ConfigError(
            "--musique needs --model: the tiny policy knows only the words of the world made here"
        )
    train, heldout, passages = load(given.musique, given.seed)
    build_index(passages, out / "index", dense=given.dense)
    options = [
        "--top",
        "4" if given.musique else "1",
        "--method",
        "dense" if given.dense else "bm25",
    ]
    search = {"index": str(out / "index"), "search_options": options}
    flags = {
        "model": given.model or str(out / "start"),
        "seed": given.seed,
        "run_dir": str(out / "run"),
    }
    for key, tasks in (("train_dataset", train), ("val_dataset", heldout)):
        flags[key] = str(out / f"{key}.jsonl")
        Path(flags[key]).write_text(
            "".join(json.dumps(task | search) + "\n" for task in tasks), encoding="utf-8"
        )
    config = load_config(
        Path(__file__).with_name("gpu.yaml" if given.model else "run.yaml"), given.set, flags
    )
    # what is wrong with the settings is said before minutes are spent
    make_algorithm(config.algorithm)
    if not given.model:
        make_start(out, given.seed)
    show_fit(Console(), fit(config, Console()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--steps", dest="set", action="append", type="algorithm.steps={}".format, default=[]
    )
    parser.add_argument("--out", type=Path, default=Path("runs/multi_hop_rag"))
    parser.add_argument(
        "--model", help="a Hugging Face id or a directory instead of the tiny policy"
    )
    parser.add_argument(
        "--musique", type=Path, metavar="FOLDER", help="MuSiQue's questions, for a --model"
    )
    parser.add_argument(
        "--dense", metavar="ENCODER", help="search by cosine: hashed, or a Hugging Face id"
    )
    parser.add_argument(
        "--set", action="append", metavar="KEY=VALUE", help="such as algorithm.returns=air"
    )
    try:
        main(parser.parse_args())
    except (AgentLightningError, OSError, ValueError) as error:
        sys.exit(f"train.py: {error}")
