"""The tasks of the travel desk, three kinds in balance, split into train and held-out by a stable
hash.

- `cancelled`: only the destination is known; home and budget must be looked up in memory before the
  search.
- `origin_given`: everything a search needs is in the question.
- `sum`: the calculator is the tool.

A task is a plain JSON object: `id`, `kind`, `question`, `answer`, and `home` and `budget`, which
only memory tells."""

from __future__ import annotations

import hashlib
import random

from agent import best_flight

KINDS = ("cancelled", "origin_given", "sum")
RIGHT_FIRST_TOOL = {"cancelled": "memory", "origin_given": "search", "sum": "calculator"}
HELDOUT_SHARE = 10  # one combination in ten is never trained on
CITIES = [
    *(
        "Athens",
        "Bergen",
        "Berlin",
        "Dublin",
        "Geneva",
        "Lisbon",
        "Lyon",
        "Madrid",
        "Milan",
        "Munich",
    ),
    *("Naples", "Oslo", "Paris", "Porto", "Prague", "Rome", "Turin", "Vienna", "Warsaw", "Zurich"),
]


def is_heldout(key: str) -> bool:
    """Which side of the split a combination is on: the same in every process and on every
    machine."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % HELDOUT_SHARE == 0


_HELDOUT_SUMS = sum(
    is_heldout(f"{left}+{right}") for left in range(10, 40) for right in range(10, 40)
)


def make_task(kind: str, generator: random.Random, heldout: bool) -> dict:
    """One random task of a kind from one side of the split."""
    while True:
        home, destination = generator.sample(CITIES, 2)
        budget = 100 * generator.randrange(2, 10)
        left, right = generator.randrange(10, 40), generator.randrange(10, 40)
        key = f"{left}+{right}" if kind == "sum" else f"{home}/{destination}/{budget}"
        if is_heldout(key) == heldout:
            break
    question, answer = {
        "cancelled": (
            f"My flight to {destination} was cancelled.",
            best_flight(home, destination, budget),
        ),
        "origin_given": (
            f"Find a flight from {home} to {destination}, max {budget} euro.",
            best_flight(home, destination, budget),
        ),
        "sum": (f"Evaluate the expression {left}+{right}.", str(left + right)),
    }[kind]
    return {
        "id": f"{kind}:{key}",
        "kind": kind,
        "question": question,
        "answer": answer,
        "home": home,
        "budget": budget,
    }


def make_tasks(n: int, generator: random.Random, heldout: bool) -> list[dict]:
    """`n` tasks whose kinds take turns, each trio in random order."""
    order: list[str] = []
    while len(order) < n:
        order += generator.sample(KINDS, len(KINDS))
    return [make_task(kind, generator, heldout) for kind in order[:n]]


def train_tasks(n: int = 3000, seed: int = 1) -> list[dict]:
    """`n` training tasks; the same seed gives the same list."""
    return make_tasks(n, random.Random(f"train/{seed}"), heldout=False)


def heldout_tasks(n: int = 180) -> list[dict]:
    """The first `n` held-out tasks, each different: none of their combinations is ever in
    `train_tasks`. ValueError for more than there are."""
    if n > len(KINDS) * _HELDOUT_SUMS:
        raise ValueError(f"there are at most {len(KINDS) * _HELDOUT_SUMS} held-out tasks, not {n}")
    generator, found = random.Random("heldout"), {}
    while len(found) < n:
        kind = KINDS[len(found) % len(KINDS)]
        task = make_task(kind, generator, heldout=True)
        found.setdefault(task["id"], task)
    return list(found.values())
