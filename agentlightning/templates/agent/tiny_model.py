"""A tiny model made on the spot, so that the first training needs no download. Delete it when you
train a real one.

It begins with demonstrations of the right form that are right about half of the time. The rest is
for training."""

from __future__ import annotations

import json
import random
from pathlib import Path

from agent import TEAMS, prompt

from agentlightning.learner.tiny import Policy, make_policy

DEMONSTRATIONS = 4000
KNOWN = 0.4  # how often a demonstration knows the team; otherwise it guesses


def make(seed: int) -> Policy:
    """The model that training starts from; the same for the same seed."""
    lines = (Path(__file__).parent / "tasks.jsonl").read_text(encoding="utf-8").splitlines()
    tasks = [json.loads(line) for line in lines]
    generator = random.Random(seed)
    shown = [demonstrate(generator.choice(tasks), generator) for _ in range(DEMONSTRATIONS)]
    return make_policy(shown, seed=seed)


def demonstrate(task: dict, generator: random.Random) -> dict:
    team = task["team"] if generator.random() < KNOWN else generator.choice(TEAMS)
    return {"messages": [*prompt(task), {"role": "assistant", "content": team}]}
