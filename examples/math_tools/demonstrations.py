"""Scripted conversations for the warm start: right in form, poor in judgement.

The script works a problem out step by step as reasoning-gym does, but it mistakes operators and
numbers for others, writes what cannot be read, and ends too early. Training on it gives a policy
that can use the calculator and has something left to discover.

`python demonstrations.py --count 2000 --seed 1 --out FILE` writes conversations as JSON lines."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from calculator import SYSTEM, calculate
from tasks import numbers, train_tasks

from agentlightning.learner.tiny import make_policy

DEMONSTRATIONS = 8000
STEPS = 700
VOCABULARY = 3072  # with all numbers of up to three digits
MISTAKES = 0.35  # how often a step has a wrong number or a wrong operator
SLOPPY = 0.08  # how often it cannot be read
STOPS = 0.1  # how often it ends after a step, whether or not it is the last
TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": calculate.__doc__,
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


def demonstrations(n: int, seed: int) -> list[dict]:
    """`n` conversations on training problems: `messages` as OpenAI clients send them, and
    `tools`."""
    generator = random.Random(f"demonstrations/{seed}")
    return [
        {"messages": demonstrate(task, generator), "tools": [TOOL]} for task in train_tasks(n, seed)
    ]


def demonstrate(task: dict, generator: random.Random) -> list[dict]:
    """One conversation of the script on one task."""
    messages: list[dict] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task["question"]},
    ]
    seen = numbers(task["question"])
    results: dict[str, str] = {}  # by the result of a step that is right, what came of it here
    answer = ""
    for number, step in enumerate(task["steps"]):
        expression = spoiled([results.get(part, part) for part in step], seen, generator)
        try:
            answer = calculate(expression)
        except ValueError as error:
            result = str(error)
        else:
            result = answer
            results[calculate("".join(step))] = answer
            seen.append(answer)
        call_id = f"call_{number}"
        call = {"name": "calculate", "arguments": json.dumps({"expression": expression})}
        calls = [{"id": call_id, "type": "function", "function": call}]
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
        if generator.random() < STOPS:
            break
    return [*messages, {"role": "assistant", "content": answer or "unknown"}]


def spoiled(step: list[str], seen: list[str], generator: random.Random) -> str:
    """A step, which may have a mistake: another number that was seen, or another operator."""
    place = generator.randrange(len(step))
    if generator.random() < SLOPPY:
        step[place] += generator.choice("+-*/")
    elif generator.random() < MISTAKES:
        step[place] = generator.choice("+-*/" if place % 2 else seen)
    return "".join(step)


def make_start(folder: Path, seed: int) -> None:
    """Save the tiny policy that training begins with to `folder`; the same for the same seed."""
    print("making a tiny policy from demonstrations …", flush=True)
    shown = demonstrations(DEMONSTRATIONS, seed)
    make_policy(
        shown, seed=seed, vocabulary_size=VOCABULARY, steps=STEPS, layers=4, inner=512
    ).save(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=DEMONSTRATIONS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with options.out.open("w", encoding="utf-8") as file:
        for shown in demonstrations(options.count, options.seed):
            file.write(json.dumps(shown) + "\n")
