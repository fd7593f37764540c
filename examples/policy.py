"""One tiny policy for three examples: text_to_sql, multi_hop_rag and math_tools.

It learns from the demonstrations of all of them, which show the form of each task with poor
judgement, and is what their trainings start from:

    python=.venv-experiments/bin/python  # has the packages of all three
    $python examples/policy.py --seed 1
    $python examples/math_tools/train.py --start runs/policy/seed-1/policy

A policy that is there is not made again. One whose making was interrupted goes on, to the same bits.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.learner.policy import Policy
from agentlightning.learner.tiny import chat_text, make_model, make_tokenizer, warm_start

EXAMPLES = Path(__file__).resolve().parent
TASKS = ("text_to_sql", "multi_hop_rag", "math_tools")
COUNT = 6000  # demonstrations of each task
STEPS = 500  # of the warm start, for each task
VOCABULARY = 8192
LAYERS = 6
INNER = 512


def make(tasks: list[str], seed: int, folder: Path, *, count: int, steps: int) -> Path:
    """The policy of these tasks in `folder`, made unless it is there. ConfigError if the folder has
    one of other settings."""
    policy = folder / "policy"
    sizes = {"vocabulary": VOCABULARY, "layers": LAYERS, "inner": INNER}
    told = {"tasks": tasks, "seed": seed, "count": count, "steps": steps}
    settings = json.dumps(told | sizes)
    made = folder / "settings.json"
    if (made.exists() or policy.exists()) and not holds(made, settings):
        raise ConfigError(
            f"{folder} has a policy of other settings; give another --out: {settings}"
        )
    if policy.exists():
        return policy
    folder.mkdir(parents=True, exist_ok=True)
    made.write_text(settings)
    shown: list[dict] = []
    for task in tasks:
        shown += demonstrations(task, count, seed, folder / f"{task}.jsonl")
    torch.set_num_threads(1)  # whose results do not depend on the machine's load
    texts = (chat_text(one["messages"], one.get("tools") or ()) for one in shown)
    tokenizer = make_tokenizer(texts, VOCABULARY)
    model = make_model(tokenizer, seed=seed, layers=LAYERS, inner=INNER)
    size = sum(weights.numel() for weights in model.parameters())
    print(f"{len(shown)} demonstrations, {size / 1e6:.1f} million parameters", flush=True)
    warm_start(
        model,
        tokenizer,
        shown,
        seed=seed,
        steps=steps * len(tasks),
        checkpoint=folder / "checkpoint.pt",
    )
    new = folder / "policy.new"
    Policy(model, tokenizer).save(new)
    return new.rename(policy)


def holds(file: Path, text: str) -> bool:
    return file.is_file() and file.read_text() == text


def demonstrations(task: str, count: int, seed: int, file: Path) -> Iterator[dict]:
    """The demonstrations of an example, which its own process writes to `file` unless they are
    there: the modules of all examples have the same names."""
    if not file.is_file():
        print(f"{task} shows {count} conversations …", flush=True)
        new = file.with_suffix(".new")
        script = EXAMPLES / task / "demonstrations.py"
        command = [sys.executable, script, "--count", count, "--seed", seed, "--out", new]
        if subprocess.run([str(word) for word in command], check=False).returncode:
            raise ConfigError(f"{script} failed: see above")
        new.rename(file)
    with file.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def tasks_of(text: str) -> list[str]:
    """`text_to_sql,math_tools`, in the order of `TASKS`."""
    chosen = text.split(",")
    if unknown := set(chosen) - set(TASKS):
        raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}; known: {', '.join(TASKS)}")
    return [task for task in TASKS if task in chosen]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=tasks_of, default=list(TASKS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=COUNT, help="demonstrations of each task")
    parser.add_argument("--steps", type=int, default=STEPS, help="of the warm start, for each task")
    parser.add_argument("--out", type=Path, help="default: runs/policy/seed-N, for three tasks")
    given = parser.parse_args()
    some = "" if len(given.tasks) == len(TASKS) else "-".join([*given.tasks, ""])
    folder = given.out or Path("runs/policy") / f"{some}seed-{given.seed}"
    try:
        print(make(given.tasks, given.seed, folder, count=given.count, steps=given.steps))
    except AgentLightningError as error:
        sys.exit(f"error: {error}")
