"""Train the question answerer: by default on questions over WordNet, and from a tiny policy made on
the spot.

Settings are in run.yaml, or gpu.yaml with `--model`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from demonstrations import SHOWN, demonstrations, searching
from retriever import cached_index
from rich.console import Console
from tasks import load

from agentlightning.cli.fit import fit, make_algorithm
from agentlightning.cli.run_file import load_config
from agentlightning.cli.training import show_fit
from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.learner.tiny import make_policy

DEMONSTRATIONS = 10_000
STEPS = 400
VOCABULARY = 2048


def main(given: argparse.Namespace) -> None:
    out = given.out.resolve()
    if given.musique and not given.model:
        raise ConfigError("--musique needs --model: the tiny policy knows only words of WordNet")
    train, heldout, passages = load(given.musique, given.seed)
    index = cached_index(passages, dense=given.dense)
    start = given.model or str((given.start or out / "start").resolve())
    flags = {"model": start, "seed": given.seed, "run_dir": str(out / "run")}
    search = {"index": str(index), "search_options": search_options(given)}
    out.mkdir(parents=True, exist_ok=True)
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
    if not given.model and not given.start:
        print("making a tiny policy from demonstrations …", flush=True)
        shown = demonstrations(DEMONSTRATIONS, given.seed, searching(index))
        policy = make_policy(
            shown, seed=given.seed, vocabulary_size=VOCABULARY, steps=STEPS, layers=4, inner=512
        )
        policy.save(out / "start")
    show_fit(Console(), fit(config, Console()))


def search_options(given: argparse.Namespace) -> list[str]:
    """The options of server.py: a tiny policy reads one passage, cut short."""
    top, most = (3, 120) if given.model else (SHOWN["top"], SHOWN["most"])
    method = "dense" if given.dense else "bm25"
    return ["--top", str(top), "--words", str(most), "--method", method]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--steps", dest="set", action="append", type="algorithm.steps={}".format, default=[]
    )
    parser.add_argument("--out", type=Path, default=Path("runs/multi_hop_rag"))
    begin = parser.add_mutually_exclusive_group()
    begin.add_argument(
        "--start", type=Path, metavar="FOLDER", help="a tiny policy that was made before"
    )
    begin.add_argument("--model", help="a Hugging Face id or a directory instead of a tiny policy")
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
        sys.exit(f"error: {error}")
