"""Conversations for the warm start: right in form, poor in judgement.

The script writes queries of the right shape and copies names and values as it should, and mostly
knows which comparison and which side of a join the words of a question mean. Of functions and
directions it hardly knows more than by chance. Its checker is right more often than not. A policy
trained on it answers four to five questions in ten, and has something left to discover."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

from agent import State, execute, prompt
from tasks import (
    DIRECTIONS,
    FUNCTIONS,
    KINDS,
    Question,
    Schema,
    make_question,
    schemas,
    write_instances,
)

from agentlightning.learner.tiny import make_policy

DEMONSTRATIONS = 2500
# How often the script knows what a word means, instead of guessing. Comparisons and keys of joins
# must be shown: reward teaches a small transformer nothing of what its warm start left no trace of.
KNOWS = {"function": 0.2, "operator": 0.9, "direction": 0.2, "key": 0.9}
ACCEPTED = {True: 0.9, False: 0.6}  # how often its checker lets a right and a wrong query pass
ROLES = ("writer", "writer", "rewriter", "rewriter", "checker")


def demonstrations(n: int, seed: int, folder: Path) -> list[dict]:
    """`n` conversations about training databases below `folder`: `messages` as OpenAI clients send
    them, and `kind`."""
    generator = random.Random(f"demonstrations/{seed}")
    known = schemas(heldout=False)
    files = {schema.name: write_instances(schema, folder)[0] for schema in known}
    made: list[dict] = []
    for index in range(n):
        schema = generator.choice(known)
        question = make_question(KINDS[index // len(ROLES) % len(KINDS)], schema, generator)
        made.append(
            demonstrate(ROLES[index % len(ROLES)], schema, question, files[schema.name], generator)
        )
    return made


def demonstrate(
    role: str, schema: Schema, question: Question, database: str, generator: random.Random
) -> dict:
    """One answer of one role."""
    draft = guess(question, schema, generator)
    state: State = {"question": question.text, "schema": schema.text, "query": draft.sql}
    state["result"] = execute(draft.sql, database)
    accepted = (
        not state["result"].startswith("error") and generator.random() < ACCEPTED[draft == question]
    )
    if role == "checker":
        spoken = "correct" if accepted else "wrong"
    else:
        state["verdict"] = "wrong"
        spoken = guess(question, schema, generator).sql
    return {
        "kind": question.kind,
        "messages": [*prompt(role, state), {"role": "assistant", "content": spoken}],
    }


def guess(question: Question, schema: Schema, generator: random.Random) -> Question:
    """The question as the script understands it."""

    def understood(slot: str, choices: list[str]) -> str:
        return (
            getattr(question, slot)
            if generator.random() < KNOWS[slot]
            else generator.choice(choices)
        )

    return dataclasses.replace(
        question,
        function=understood("function", list(FUNCTIONS)),
        operator=understood("operator", ["=", "!="] if "=" in question.operator else ["<", ">"]),
        direction=understood("direction", list(DIRECTIONS)),
        key=understood("key", [schema.parent.name, schema.child.name]),
    )


def make_start(folder: Path, databases: Path, seed: int) -> None:
    """Save the tiny policy that training begins with to `folder`; the same for the same seed."""
    print("making a tiny policy from demonstrations …", flush=True)
    shown = demonstrations(DEMONSTRATIONS, seed, databases)
    make_policy(shown, seed=seed).save(folder)
