"""Saves a model that adds small numbers now and then as the folder `tiny`, in two seconds."""

import random
from pathlib import Path

from agentlightning.learner.tiny import make_policy


def sum_of(draw: random.Random) -> dict:
    a, b = draw.randrange(3), draw.randrange(3)
    before = "".join(draw.choices('abcdefghijklmnopqrstuvwxyz {}":,.?', k=draw.randrange(40)))
    asked = {"role": "user", "content": f"{before} What is {a}+{b}?"}
    return {"messages": [asked, {"role": "assistant", "content": str(a + b)}]}


draw = random.Random(1)
make_policy([sum_of(draw) for _ in range(400)], seed=1, steps=40).save(Path("tiny"))
