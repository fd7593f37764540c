"""The agent: it reads a customer's message and says which team should answer.

It knows nothing of training. Replace `choose_team` by your own agent, in any framework, as long as
it calls the model at `llm.endpoint` with the key `llm.api_key`; replace `reward` by what you want
more of."""

from __future__ import annotations

import agentlightning as agl

TEAMS = ("billing", "technical", "shipping", "account")
SYSTEM = f"Which team should answer: {', '.join(TEAMS)}?"


def prompt(task: dict) -> list[dict]:
    """The chat messages that the model reads."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task["message"]}]


async def choose_team(task: dict, llm: agl.LLM) -> str:
    """Ask the model once."""
    # any other client works too: base_url=llm.endpoint, api_key=llm.api_key
    client = agl.openai_client(llm)
    completion = await client.chat.completions.create(model=llm.model, messages=prompt(task))
    return completion.choices[0].message.content or ""


def reward(task: dict, answer: str) -> float:
    """1 for the right team, else 0."""
    return agl.rewards.exact_match(answer, task["team"])


@agl.rollout
async def agent(task: dict, llm: agl.LLM) -> float:
    """One rollout: the number that is returned is what training makes larger."""
    return reward(task, await choose_team(task, llm))
