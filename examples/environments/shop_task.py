"""A task of Inspect: questions about the stock of a shop, a solver with one tool, and a scorer."""

import json
from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool


def rows(split: str) -> list[dict]:
    file = Path(__file__).parents[1] / "tutorial" / f"{split}.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


STOCK = {row["item"]: row["answer"] for split in ("tasks", "heldout") for row in rows(split)}


@tool
def stock() -> Tool:
    async def execute(item: str) -> str:
        """How many of an item are in stock.

        Args:
            item: The name of the item.
        """
        return str(STOCK.get(item, "no such item"))

    return execute


@task
def shop(split: str = "tasks") -> Task:
    samples = [
        Sample(id=index, input=row["question"], target=str(row["answer"]))
        for index, row in enumerate(rows(split))
    ]
    return Task(
        dataset=samples, solver=[use_tools(stock()), generate()], scorer=match(), message_limit=6
    )
