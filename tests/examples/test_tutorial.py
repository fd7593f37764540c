"""The tutorial: its page shows the files as they are, and its steps, shortened, run in order and
teach the agent."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "examples" / "tutorial"


def tasks(name: str) -> list[dict]:
    return [json.loads(line) for line in (TUTORIAL / name).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", ["agent.py", "rewarded.py", "run.yaml"])
def test_the_page_shows_the_files_as_they_are(name: str) -> None:
    page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    assert (TUTORIAL / name).read_text(encoding="utf-8") in page


def test_the_agent_knows_nothing_of_training_and_its_tool_knows_every_answer() -> None:
    text = (TUTORIAL / "agent.py").read_text(encoding="utf-8")
    assert "agentlightning" not in text and "agl" not in text
    (stock,) = (
        node.value
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and "STOCK" in ast.dump(node)
    )
    known = ast.literal_eval(stock)
    train, heldout = tasks("tasks.jsonl"), tasks("heldout.jsonl")
    assert all(
        known[task["item"]] == task["answer"] and task["item"] in task["question"]
        for task in train + heldout
    )
    assert {task["item"] for task in train} == set(known)
    assert not {task["question"] for task in train} & {task["question"] for task in heldout}
