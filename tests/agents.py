"""Small agents for tests of the whole house: they speak to whatever endpoint they are given."""

from __future__ import annotations

import asyncio
import math

import agentlightning as agl


async def ask(task: dict, llm: agl.LLM, turns: int = 1) -> str:
    """A conversation of `turns` questions; the last answer."""
    client = agl.openai_client(llm)
    messages: list = [{"role": "user", "content": f"{task['word']}"}]
    answer = ""
    for _ in range(turns):
        completion = await client.chat.completions.create(model=llm.model, messages=messages, max_tokens=6)
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
