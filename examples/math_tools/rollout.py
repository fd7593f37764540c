"""What is trained: the assistant of `agent.py`, with a reward from `grading.py`."""

from __future__ import annotations

from agent import answer
from grading import grade

import agentlightning as agl


@agl.rollout
async def mathematician(task: dict, llm: agl.LLM) -> float:
    return grade(
        task, await answer(task["question"], client=agl.openai_client(llm), model=llm.model)
    )
