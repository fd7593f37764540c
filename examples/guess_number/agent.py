"""Guess a number from 1 to 64 in ten tries. After each, the agent hears which numbers are left."""

from __future__ import annotations

import agentlightning as agl

HIGHEST, TRIES = 64, 10
QUESTION = f"Guess a number from 1 to {HIGHEST}"


def narrowed(low: int, high: int, said: int, secret: int) -> tuple[int, int]:
    """The numbers that are left after a wrong guess."""
    return (max(low, said + 1), high) if said < secret else (low, min(high, said - 1))


@agl.rollout
async def guess(task: dict, llm: agl.LLM) -> float:
    """1 for a number found at once, 0.1 less for each further try; 0 if it is not found in ten."""
    client = agl.openai_client(llm)
    messages: list[dict] = [{"role": "user", "content": QUESTION}]
    low, high = 1, HIGHEST
    for tried in range(TRIES):
        agl.emit_annotation({"state": [low, high]})
        completion = await client.chat.completions.create(model=llm.model, messages=messages)
        said = (completion.choices[0].message.content or "").strip()
        if not said.isdecimal():
            return 0.0
        if int(said) == task["secret"]:
            return 1.0 - tried / TRIES
        low, high = narrowed(low, high, int(said), task["secret"])
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"{low} to {high}"}]
    return 0.0
