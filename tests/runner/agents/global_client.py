"""An agent as many are: its client is made when its module is imported, and knows nothing of
rollouts."""

from __future__ import annotations

import openai

client = openai.OpenAI(max_retries=0)
async_client = openai.AsyncOpenAI(max_retries=0)


def _messages(task: str) -> list:
    return [{"role": "user", "content": task}]


def asks(task: str) -> float:
    answer = client.chat.completions.create(model="policy", messages=_messages(task))
    return float(bool(answer.choices[0].message.content))


async def asks_async(task: str) -> float:
    answer = await async_client.chat.completions.create(model="policy", messages=_messages(task))
    return float(bool(answer.choices[0].message.content))
