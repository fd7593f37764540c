"""Scripted conversations for the warm start: right in form, poor in judgement.

The script copies well: it searches for what the last passage names in a relation, and answers with
that. But which of the question's relations it follows, and when it answers, it decides almost at
random. Training on it gives a policy that can search and answer, and has left to discover which hop
is next and which is the last.

    python demonstrations.py --count 10000 --seed 1 --out demonstrations.jsonl"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from tasks import is_heldout, train_tasks
from wordnet import RELATIONS, passages

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

SHOWN = {"top": 1, "most": 16}  # passages of a search, and words of each, that a tiny policy reads
TASKS = 10_000  # most there are: a policy that reads many words learns to copy any
KNOWS_RELATION = 0.3  # how often it knows which relation is next, beyond chance
ANSWERS_AT_END = 0.6  # how often it answers once it has read the last passage of the way
ANSWERS_TOO_EARLY = 0.15  # and after any other
FIELD = re.compile(rf"\b({'|'.join(RELATIONS)}): ([^,.]+)[^.]*\. ?")

Search = Callable[[str], str]


def demonstrations(n: int, seed: int, search: Search) -> list[dict]:
    """`n` conversations on training questions, with `messages` as OpenAI clients send them, and
    `tools`. None shows a passage that a held-out question may need."""
    made = attempts(seed, search)
    return [next(made) for _ in range(n)]


def attempts(seed: int, search: Search) -> Iterator[dict]:
    generator = random.Random(f"demonstrations/{seed}")
    tasks = train_tasks(TASKS, seed)
    while True:
        for task in tasks:
            messages = demonstrate(task, generator, search)
            read = [one["content"] for one in messages if one["role"] == "tool"]
            if not any(is_heldout(passage.partition(": ")[0]) for passage in read):
                yield {"messages": messages, "tools": TOOLS}


def demonstrate(task: dict, generator: random.Random, search: Search) -> list[dict]:
    """One conversation of the script on one question."""
    messages: list[dict] = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": task["question"]},
    ]
    query = task["start"]
    for turn in range(MAX_TURNS - 1):
        function = {"name": "search", "arguments": json.dumps({"query": query})}
        call = {"id": f"call_{turn}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": search(query)})
        fields = fields_of(messages[-1]["content"])
        if not fields:
            break
        relation = choose_relation(task["relations"], turn, list(fields), generator)
        at_end = turn == len(task["relations"]) - 1
        if generator.random() < (ANSWERS_AT_END if at_end else ANSWERS_TOO_EARLY):
            text = f"answer ({relation}): {fields[relation]}"
            messages.append({"role": "assistant", "content": text})
            break
        query = f"{relation}: {fields[relation]}"
    return messages


def fields_of(passage: str) -> dict[str, str]:
    """The relations with which a passage begins, and the first word that each names."""
    fields: dict[str, str] = {}
    end = passage.find(": ") + 2
    while found := FIELD.match(passage, end):
        fields[found[1]] = found[2]
        end = found.end()
    return fields


def choose_relation(
    relations: list[str], turn: int, there: list[str], generator: random.Random
) -> str:
    """One of the question's, if the passage has any; now and then the one that is next."""
    known = [relation for relation in relations if relation in there]
    if relations[turn:] and relations[turn] in there and generator.random() < KNOWS_RELATION:
        return relations[turn]
    return generator.choice(known or there)


def searching(index: Path) -> Search:
    """A search as the tiny policy sees it, in this process."""
    from retriever import Index, answer

    opened = Index(index)
    return cache(lambda query: answer(opened, query, **SHOWN))


def main() -> None:
    from retriever import cached_index

    parser = argparse.ArgumentParser(description="Write demonstrations as JSON lines.")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    try:
        shown = demonstrations(options.count, options.seed, searching(cached_index(passages())))
        lines = (json.dumps(one) + "\n" for one in shown)
        options.out.write_text("".join(lines), encoding="utf-8")
    except (OSError, ValueError) as error:
        sys.exit(f"demonstrations.py: {error}")


if __name__ == "__main__":
    main()
