"""Sums of three numbers, `chain_sum` of reasoning-gym, for the part `sums` of `benchmarks/rl.py`:
tasks in files that both trainers read, and demonstrations, of which half are wrong."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Final

GENERATOR: Final = {
    "reasoning_gym": "chain_sum",
    "min_terms": 2,
    "max_terms": 3,
    "min_digits": 1,
    "max_digits": 1,
}
RIGHT: Final = 0.5  # of the demonstrations
OFF: Final = (-3, -2, -1, 1, 2, 3)


def grade(task: dict[str, Any], answer: str) -> float:
    return float(answer.strip() == task["answer"])


def opening(task: dict[str, Any]) -> list[dict[str, str]]:
    return [{"role": "user", "content": task["question"]}]


def made(size: int, seed: int) -> list[dict[str, Any]]:
    from agentlightning.rewards.reasoning_gym import reasoning_gym_tasks

    return [
        {"question": task["question"], "answer": task["answer"]}
        for task in reasoning_gym_tasks(GENERATOR | {"size": size, "seed": seed})
    ]


def write(folder: str, name: str, some: list[dict[str, Any]]) -> None:
    (Path(folder) / f"{name}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in some))


def read(folder: str, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(folder) / f"{name}.jsonl").read_text().splitlines()]


def demonstrations(size: int, seed: int) -> list[dict[str, Any]]:
    generator = random.Random(seed)
    shown: list[dict[str, Any]] = []
    for task in made(size, seed):
        wrong = 0 if generator.random() < RIGHT else generator.choice(OFF)
        answer = {"role": "assistant", "content": str(int(task["answer"]) + wrong)}
        shown.append({"messages": [*opening(task), answer]})
    return shown
