"""What is trained: the player of `agent.py`. Its states are positions, which `gigpo` compares.

The reward is `solved`, 1 or 0. The reward `progress`, the share of the shortest way that was made,
counts where the run file says so: `algorithm.reward: {weights: {solved: 1, progress: 0.5}}`."""

from __future__ import annotations

from agent import play
from tasks import solved
from tower import Tower, distance

import agentlightning as agl


@agl.rollout
async def player(task: dict, llm: agl.LLM) -> dict:
    tower = Tower(task["position"], task["goal"])
    await play(
        tower,
        client=agl.openai_client(llm),
        model=llm.model,
        before_call=lambda: agl.emit_annotation({"state": tower.state}),
    )
    left = distance(tower.position, tower.goal) / distance(task["position"], task["goal"])
    return {
        "solved": solved(task, tower.moves),
        "progress": max(0.0, 1 - left),
        "primary_key": "solved",
    }
