"""What is trained: the player of `agent.py`. Its states are positions, which `gigpo` compares."""

from __future__ import annotations

from agent import play
from tasks import solved
from tower import Tower

import agentlightning as agl


@agl.rollout
async def player(task: dict, llm: agl.LLM) -> float:
    tower = Tower(task["position"], task["goal"])
    await play(
        tower,
        client=agl.openai_client(llm),
        model=llm.model,
        before_call=lambda: agl.emit_annotation({"state": tower.state}),
    )
    return solved(task, tower.moves)
