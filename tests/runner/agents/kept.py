"""Agents that keep something between calls, where one rollout's may meet another's, and agents of
every kind."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import openai

import agentlightning as agl

together: Any = None  # what makes rollouts overlap, where a test sets it


class Keeper(agl.LitAgent):
    """As a published agent may be: client, history and environment are its own; so are tools bound
    to it."""

    def __init__(self) -> None:
        self.client: openai.AsyncOpenAI | None = None
        self.history: list[dict[str, str]] = []
        self.environment = {"asked": []}
        self.tools = {"ask": self.ask}
        self.lock = threading.Lock()
        self.index = bytes(2 << 20)

    async def ask(self, question: str) -> str:
        assert self.client is not None
        self.history.append({"role": "user", "content": question})
        self.environment["asked"].append(question)
        answer = await self.client.chat.completions.create(model="policy", messages=self.history)
        return answer.choices[0].message.content or ""

    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
        llm = resources["main_llm"]
        if self.client is None:
            self.client = openai.AsyncOpenAI(
                base_url=llm.endpoint, api_key=llm.api_key, max_retries=0
            )
        if together is not None:
            await together.wait()
        await self.tools["ask"](task)
        await asyncio.sleep(0.01)
        await self.tools["ask"](task)
        await self.client.close()
        agl.emit_object({"index": id(self.index), "lock": id(self.lock)})
        return float(self.environment["asked"] == [task, task] and len(self.history) == 2)


keeper = Keeper()
shared: openai.AsyncOpenAI | None = None


async def first_comes(task: str, llm: agl.LLM) -> float:
    """Makes its client once, of the first rollout's `llm`, and survives what goes wrong."""
    global shared
    if shared is None:
        shared = openai.AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    if together is not None:
        await together.wait()
    try:
        await shared.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": task}]
        )
    except Exception:  # noqa: BLE001
        return 0.0
    return 1.0


def function(task: Any, resources: Any) -> float:
    return 1.0


@agl.rollout
async def decorated(task: Any, rollout: Any, resources: Any) -> float:
    return 1.0


def plain(task: Any) -> float:
    return 1.0
