"""Scripted conversations for the warm start: right in form, poor in judgement.

The script knows every tool's format and copies what it has read, but it picks tools and operators
almost at random, is sloppy with every fifth argument and often gives up or answers too early.
Training on it gives a policy that can use every tool and has something left to discover."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

from calculator import MAX_CALLS, OPERATORS, PARAMETERS, SYSTEM, Calculator
from grading import grade
from tasks import RIGHT_FIRST_TOOL, operator_of, train_tasks

from agentlightning.learner.tiny import make_policy

DEMONSTRATIONS = 2000
KNOWS_TOOL = 0.35  # how often it picks the right tool, beyond chance
KNOWS_OPERATOR = 0.4  # how often it picks the right operator, beyond chance
SLOPPY = 0.2  # how often an argument is malformed
ANSWERS = 0.4  # how often a value in the last tool answer ends the conversation
GIVES_UP = 0.25  # how often it stops without an answer, after an error or a value
NOTHING = "?"  # the argument where the question has none


def demonstrations(n: int, seed: int) -> list[dict]:
    """`n` conversations on training tasks: `messages` as OpenAI clients send them, `kind`, `reward`
    and `calls`, of each tool call its name and whether it worked."""
    generator = random.Random(f"demonstrations/{seed}")
    return [demonstrate(task, generator) for task in train_tasks(n, seed)]


def demonstrate(task: dict, generator: random.Random) -> dict:
    """One conversation of the script on one task."""
    messages: list[dict] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task["question"]},
    ]
    calls: list[tuple[str, bool]] = []
    calculator, answer = Calculator(), ""
    for _ in range(MAX_CALLS):
        if (spoken := choose_answer(messages, generator)) is not None:
            answer = spoken
            messages.append({"role": "assistant", "content": answer})
            break
        name = choose_tool(task, calculator, generator)
        arguments = fill_arguments(task, name, generator)
        try:
            result = getattr(calculator, name)(**arguments)
        except ValueError as error:
            result = str(error)
        call = {"name": name, "arguments": json.dumps(arguments)}
        call_id = f"call_{len(calls)}"
        messages.append(
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": call_id, "type": "function", "function": call}],
            }
        )
        messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
        calls.append((name, not result.startswith("Error")))
    return {
        "kind": task["kind"],
        "messages": messages,
        "calls": calls,
        "reward": grade(task, answer),
    }


def choose_answer(messages: list[dict], generator: random.Random) -> str | None:
    """The final answer, or None to go on calling tools."""
    if messages[-1]["role"] != "tool":
        return None
    result = messages[-1]["content"]
    if not result.startswith("Error") and generator.random() < ANSWERS:
        return result
    return "unknown" if generator.random() < GIVES_UP else None


def choose_tool(task: dict, calculator: Calculator, generator: random.Random) -> str:
    """Mostly any tool; now and then the right one."""
    if generator.random() < KNOWS_TOOL:
        return "calculate" if calculator.known else RIGHT_FIRST_TOOL[task["kind"]]
    return generator.choice(sorted(PARAMETERS))


def fill_arguments(task: dict, name: str, generator: random.Random) -> dict[str, str]:
    """Arguments from what the question says of them, some of them spoiled."""
    arguments = {parameter: argument(task["question"], parameter) for parameter in PARAMETERS[name]}
    sloppy = generator.random() < SLOPPY
    if name == "calculate":
        right = operator_of(task)
        knows = right is not None and generator.random() < KNOWS_OPERATOR
        arguments["operator"] = str(right) if knows else generator.choice(sorted(OPERATORS))
        if sloppy:
            arguments["operator"] = NOTHING
    elif sloppy:  # the end is missing
        arguments = {key: re.split(r"[=)]", value)[0] for key, value in arguments.items()}
    return arguments


def argument(question: str, parameter: str) -> str:
    """What the question says of a parameter of a tool."""
    found = re.search(rf"\b{parameter} ([^ ,.:]+)", question)
    return found[1] if found else NOTHING


def tool_schemas() -> list[dict]:
    """The tools as a chat template sees them: their names and those of their parameters."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {"properties": {one: {} for one in parameters}},
            },
        }
        for name, parameters in PARAMETERS.items()
    ]


def make_start(folder: Path, seed: int) -> None:
    """Save the tiny policy that training begins with to `folder`; the same for the same seed."""
    print("making a tiny policy from demonstrations …", flush=True)
    shown = demonstrations(DEMONSTRATIONS, seed)
    make_policy(shown, tools=tool_schemas(), seed=seed).save(folder)
