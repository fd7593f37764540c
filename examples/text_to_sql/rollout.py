"""One rollout of the team: its models are those of the attempt, its reward is that of the last
query."""

from __future__ import annotations

import asyncio

from agent import ROLES, Team, answer
from grading import grade
from langchain_openai import ChatOpenAI

import agentlightning as agl

CHAT = ChatOpenAI(model="policy", api_key="none")


@agl.rollout
async def text_to_sql(task: dict, resources: dict) -> float:
    team: Team = {role: chat_model(resources[role]) for role in ROLES}
    state = await answer(task["question"], task["schema"], task["databases"][0], team)
    return await asyncio.to_thread(grade, task, state["query"])


def chat_model(llm: agl.LLM) -> ChatOpenAI:
    """LangChain's, over connections that all rollouts share: to make one anew takes longer than a
    call."""
    client = agl.openai_client(llm)
    return CHAT.model_copy(
        update={
            "model_name": llm.model,
            "root_async_client": client,
            "async_client": client.chat.completions,
        }
    )
