"""Scripted conversations for the warm start: right in form, poor in judgement.

The script knows every tool's format and copies what it has read, but it picks tools almost at
random: only slightly more often than chance does it begin with the right one. Training on it gives
a policy that can use every tool and has something left to discover."""

from __future__ import annotations

import json
import random
import re

from agent import MAX_TURNS, SYSTEM, TOOLS, grade, use_tool
from tasks import train_tasks

TOOL_NAMES = [tool["function"]["name"] for tool in TOOLS]
# What the script begins with: the weights of memory, search and calculator.
FIRST_TOOL_WEIGHTS = {"cancelled": (36, 32, 32), "origin_given": (22, 56, 22), "sum": (22, 22, 56)}
SEARCHES_AFTER_MEMORY = 0.5  # how often it knows what memory is good for, beyond chance
# how often a flight or a result in the last tool answer ends the conversation
ANSWERS_AFTER_VALUE = 0.4
GIVES_UP = 0.5  # how often it stops without an answer, except right after looking into memory


def demonstrations(n: int, seed: int) -> list[dict]:
    """`n` conversations on training tasks: `messages` as OpenAI clients send them, `kind`, `reward`
    and `calls`."""
    generator = random.Random(f"demonstrations/{seed}")
    return [demonstrate(task, generator) for task in train_tasks(n, seed)]


def demonstrate(task: dict, generator: random.Random) -> dict:
    """One conversation of the script on one task."""
    messages: list[dict] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task["question"]},
    ]
    calls: list[str] = []
    answer = ""
    for _ in range(MAX_TURNS):
        if (spoken := choose_answer(messages, generator)) is not None:
            answer = spoken
            messages.append({"role": "assistant", "content": answer})
            break
        name = choose_tool(task, calls, generator)
        arguments = json.dumps(
            fill_arguments(task, name, known=task["kind"] == "origin_given" or "memory" in calls)
        )
        call = {
            "id": f"call_{len(calls)}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append(
            {"role": "tool", "tool_call_id": call["id"], "content": use_tool(task, name, arguments)}
        )
        calls.append(name)
    return {
        "kind": task["kind"],
        "messages": messages,
        "calls": calls,
        "reward": grade(task, answer, calls),
    }


def choose_answer(messages: list[dict], generator: random.Random) -> str | None:
    """The final answer, or None to go on calling tools."""
    if messages[-1]["role"] != "tool":
        return None
    result = messages[-1]["content"]
    value = result.startswith(("flight", "result"))
    if value and generator.random() < ANSWERS_AFTER_VALUE:
        return result
    return "unknown" if not result.startswith("from") and generator.random() < GIVES_UP else None


def choose_tool(task: dict, calls: list[str], generator: random.Random) -> str:
    """Mostly any tool; now and then the right one to begin with, or a search after memory."""
    if not calls:
        return generator.choices(TOOL_NAMES, FIRST_TOOL_WEIGHTS[task["kind"]])[0]
    if calls[-1] == "memory" and generator.random() < SEARCHES_AFTER_MEMORY:
        return "search"
    return generator.choice(TOOL_NAMES)


def fill_arguments(task: dict, name: str, *, known: bool) -> dict:
    """Arguments from what the conversation has shown so far; `known` says whether it has shown home
    and budget."""
    if name == "memory":
        return {"query": "home"}
    if name == "search":
        destination = re.search(r" to (\w+)", task["question"])
        return {
            "from": task["home"] if known else "here",
            "to": destination[1] if destination else "there",
            "max": task["budget"] if known else 0,
        }
    expression = re.search(r"\d+\+\d+", task["question"])
    return {"expression": expression[0] if expression else "1+1"}
