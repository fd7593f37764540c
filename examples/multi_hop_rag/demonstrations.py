"""Scripted conversations for the warm start: right in form, poor in judgement.

The script copies well: it searches for a relation of the last entity it has read of, and answers
with that entity. But which of the question's relations it searches for, and when it answers, it
decides almost at random. Training on it gives a policy that can search and answer, and has left to
discover which hop is next and which is the last."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

from grading import grade
from tasks import facts, train_tasks

from agentlightning.learner.tiny import make_policy

# The agent's, which a test compares; importing them would need its framework.
INSTRUCTIONS = "Search fact by fact, then reply: answer, kind in parentheses, colon, name."
MAX_TURNS = 6
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Find the passage that fits the query best.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}},
                "required": ["query"],
            },
        },
    }
]

DEMONSTRATIONS = 2000
KNOWS_RELATION = 0.3  # how often it knows which relation is next, beyond chance
ANSWERS_AT_END = 0.6  # how often it answers once it has followed the last relation
ANSWERS_TOO_EARLY = 0.15  # and after any other


def demonstrations(n: int, seed: int, search: Callable[[str], str]) -> list[dict]:
    """`n` conversations on training questions: `messages` as OpenAI clients send them, `kind` and
    `reward`."""
    generator = random.Random(f"demonstrations/{seed}")
    return [demonstrate(task, generator, search) for task in train_tasks(n, seed)]


def demonstrate(task: dict, generator: random.Random, search: Callable[[str], str]) -> dict:
    """One conversation of the script on one question."""
    messages: list[dict] = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": task["question"]},
    ]
    entity, followed, text = task["entity"], "", ""
    for turn in range(MAX_TURNS):
        at_end = followed == task["relations"][-1]
        if turn > 0 and generator.random() < (ANSWERS_AT_END if at_end else ANSWERS_TOO_EARLY):
            kind, name = entity.split()
            text = f"answer ({kind}): {name}"
            messages.append({"role": "assistant", "content": text})
            break
        query = f"{entity} {choose_relation(task, entity, generator)}"
        function = {"name": "search", "arguments": json.dumps({"query": query})}
        call = {"id": f"call_{turn}", "type": "function", "function": function}
        passage = search(query)
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": passage})
        fact, _, entity = passage.partition(": ")
        followed = fact.split()[-1]
    return {"kind": task["kind"], "messages": messages, "reward": grade(text, task["answers"])}


def choose_relation(task: dict, entity: str, generator: random.Random) -> str:
    """One of the question's; now and then the one that this entity has."""
    own = [relation for relation in task["relations"] if (entity, relation) in facts()]
    return generator.choice(
        own if own and generator.random() < KNOWS_RELATION else task["relations"]
    )


def make_start(out: Path, seed: int) -> None:
    """Save the tiny policy that training begins with, warm-started on demonstrations over the index
    in `out`."""
    from retriever import Index

    index = Index(out / "index")
    shown = demonstrations(DEMONSTRATIONS, seed, lambda query: "".join(index.search(query)))
    print("making a tiny policy from demonstrations …", flush=True)
    make_policy(shown, tools=TOOLS, seed=seed).save(out / "start")
