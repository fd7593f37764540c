"""What is trained: the agent of `agent.py`, with a reward from `grading.py`.

The MCP servers of a process are shared by its rollouts, one for each index that tasks are about;
starting one takes a second, which is more than a rollout does."""

from __future__ import annotations

from pathlib import Path

from agent import Search, solve
from grading import grade

import agentlightning as agl

SEARCHES: dict[str, Search] = {}


@agl.rollout
async def question_answerer(task: dict, llm: agl.LLM) -> float:
    """A rollout whose server is lost fails as SearchLost; those after it have a new one."""
    search = SEARCHES.setdefault(
        task["index"], Search(Path(task["index"]), *task["search_options"])
    )
    text = await solve(task["question"], search, client=agl.openai_client(llm), model=llm.model)
    return grade(text, task["answers"])
