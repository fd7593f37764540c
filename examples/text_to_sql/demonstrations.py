"""Conversations for the warm start: right in form, poor in judgement.

They have queries of the right shape, about the right columns, and copy values as they should. What
a word stands for (*average*, *above*, *having no*, *fewest* …) they often only guess. Their checker
is right more often than not. All are about training patterns.

`python demonstrations.py --count 9 --seed 1 --out FILE` writes them as JSON lines."""

from __future__ import annotations

import argparse
import dataclasses
import random
from itertools import islice
from pathlib import Path

from agent import State, execute, prompt
from tasks import PARTS, Question, patterns, questions, save_tasks

from agentlightning.learner.tiny import make_policy

DEMONSTRATIONS = 12_000
STEPS = 1200
VOCABULARY = 1024
# How often they know what a part of a question means, instead of guessing.
KNOWS = {"relation": 0.6, "filter": 0.8, "frame": 0.3}
ACCEPTED = {True: 0.9, False: 0.6}  # how often their checker lets a right and a wrong query pass
ROLES = ("writer", "writer", "rewriter", "rewriter", "checker")


def demonstrations(n: int, seed: int, folder: Path) -> list[dict]:
    """`n` conversations about databases below `folder`: `messages` as OpenAI clients send them."""
    generator = random.Random(f"demonstrations/{seed}")
    asked = questions(patterns(held_out=False), generator, folder)
    return [demonstrate(generator.choice(ROLES), *one, generator) for one in islice(asked, n)]


def demonstrate(
    role: str, question: Question, schema: str, paths: list[str], generator: random.Random
) -> dict:
    """One answer of one role."""
    draft = guess(question, generator).sql
    state: State = {"question": question.text, "schema": schema, "query": draft}
    state["result"] = execute(draft, paths[0])
    if role == "checker":
        accepted = generator.random() < ACCEPTED[draft == question.sql]
        spoken = "correct" if accepted else "wrong"
    else:
        state["verdict"] = "wrong"
        spoken = guess(question, generator).sql
    return {"messages": [*prompt(role, state), {"role": "assistant", "content": spoken}]}


def guess(question: Question, generator: random.Random) -> Question:
    """The question as the demonstrations understand it."""
    guessed = {
        part: generator.choice(meanings[getattr(question.pattern, part)])
        for part, meanings in PARTS.items()
        if generator.random() > KNOWS[part]
    }
    return dataclasses.replace(question, **guessed)


def make_start(folder: Path, databases: Path, seed: int) -> None:
    """Save the tiny policy that training begins with to `folder`; the same for the same seed."""
    print("making a tiny policy from demonstrations …", flush=True)
    shown = demonstrations(DEMONSTRATIONS, seed, databases)
    policy = make_policy(
        shown, seed=seed, vocabulary_size=VOCABULARY, steps=STEPS, layers=4, inner=512
    )
    policy.save(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=DEMONSTRATIONS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    folder = options.out.resolve().parent / "databases"
    save_tasks(demonstrations(options.count, options.seed, folder), options.out)
