"""What is trained: the agent of `agent.py`, with a reward from `grading.py`.

The MCP servers of a process are shared by its rollouts, one for each index that tasks are about;
starting one takes a second, which is more than a rollout does.

The reward is `answer`. `recall`, the share of the passages on the right way that were read, does
not count unless the run file says so."""

from __future__ import annotations

from pathlib import Path

from agent import Search, read, run
from grading import grade, recall

import agentlightning as agl

SEARCHES: dict[str, Search] = {}


@agl.rollout
async def question_answerer(task: dict, llm: agl.LLM) -> dict:
    """A rollout whose server is lost fails as SearchLost; those after it have a new one."""
    search = SEARCHES.setdefault(
        task["index"], Search(Path(task["index"]), *task["search_options"])
    )
    text, items = await run(
        task["question"], search, client=agl.openai_client(llm), model=llm.model
    )
    rewards = {"answer": grade(text, task["answers"]), "primary_key": "answer"}
    if path := task.get("path"):
        rewards["recall"] = recall(read(items), path)
    return rewards
