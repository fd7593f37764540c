"""Small agents for tests of the whole house: they speak to whatever endpoint they are given."""

from __future__ import annotations

import asyncio
import json
import math
import random
from urllib.request import Request, urlopen

import openai

import agentlightning as agl


async def ask(task: dict, llm: agl.LLM, turns: int = 1) -> str:
    """A conversation of `turns` questions; the last answer."""
    client = agl.openai_client(llm)
    messages: list = [{"role": "user", "content": f"{task['word']}"}]
    answer = ""
    for _ in range(turns):
        completion = await client.chat.completions.create(
            model=llm.model, messages=messages, max_tokens=6
        )
        answer = completion.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "go on"}]
    return answer


@agl.rollout
async def vowels(task: dict, llm: agl.LLM) -> float:
    """Two turns; rewarded by the share of vowels in the last answer."""
    answer = await ask(task, llm, turns=2)
    return sum(letter in "aeiou" for letter in answer) / max(1, len(answer))


@agl.rollout
async def slow_vowels(task: dict, llm: agl.LLM) -> float:
    await asyncio.sleep(0.2)
    return await vowels(task, llm)


@agl.rollout
async def raises(task: dict, llm: agl.LLM) -> float:
    await ask(task, llm)
    raise RuntimeError("the tool server is gone")


@agl.rollout
async def raises_on_odd(task: dict, llm: agl.LLM) -> float:
    reward = await vowels(task, llm)
    if task["index"] % 2:
        raise RuntimeError("odd")
    return reward


@agl.rollout
async def not_a_number(task: dict, llm: agl.LLM) -> float:
    await ask(task, llm)
    return math.nan


@agl.rollout
async def nonsense(task: dict, llm: agl.LLM) -> float:
    return "very good"  # type: ignore[return-value]


@agl.rollout
async def hangs(task: dict, llm: agl.LLM) -> float:
    await asyncio.Event().wait()
    return 1.0


@agl.rollout
async def never_calls(task: dict, llm: agl.LLM) -> float:
    return float(task["index"] % 2)


@agl.rollout
async def unrewarded(task: dict, llm: agl.LLM) -> None:
    await ask(task, llm)


def ask_without_sdk(llm: agl.LLM, text: str) -> None:
    """A call of which nothing tells the operation around it."""
    body = {"model": llm.model, "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    headers = {"content-type": "application/json", "authorization": f"Bearer {llm.api_key}"}
    with urlopen(Request(f"{llm.endpoint}/chat/completions", json.dumps(body).encode(), headers)):
        pass


@agl.rollout
async def rewards_side_by_side(task: dict, llm: agl.LLM) -> float:
    """Three sub-agents at once, each rewarded after its only call by 1, 2 or 3, which the call
    names."""
    both_asked = asyncio.Barrier(3)

    async def sub_agent(number: int) -> None:
        text = f"{task['word']} {'abc'[number]}"
        with agl.operation(name=text):
            if task["client"] == "agl":
                await ask({"word": text}, llm)
            elif task["client"] == "openai":
                client = openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
                messages: list = [{"role": "user", "content": text}]
                await asyncio.to_thread(
                    client.chat.completions.create, model=llm.model, messages=messages
                )
            else:
                await asyncio.to_thread(ask_without_sdk, llm, text)
            await both_asked.wait()
            agl.emit_reward(number + 1, final=False)

    await asyncio.gather(*map(sub_agent, range(3)))
    return random.random()
