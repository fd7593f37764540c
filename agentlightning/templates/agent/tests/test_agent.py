"""Checks before training: the data fit the agent, and the reward says what is meant. Run with `pytest`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from aiohttp import web

import agentlightning as agl

FOLDER = Path(__file__).parents[1]
sys.path.insert(0, str(FOLDER))
from agent import TEAMS, agent, reward  # noqa: E402 - found by the line above


@pytest.mark.parametrize("name", ["tasks.jsonl", "heldout.jsonl"])
def test_every_task_has_a_message_and_a_team_that_exists(name: str) -> None:
    tasks = [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]
    assert tasks
    assert all(task["message"] and task["team"] in TEAMS for task in tasks)


def test_only_the_right_team_is_rewarded() -> None:
    task = {"message": "Parcel gone.", "team": "shipping"}
    assert [reward(task, answer) for answer in ("shipping", " Shipping.", "billing", "")] == [1.0, 1.0, 0.0, 0.0]


def test_the_agent_asks_the_model_and_rewards_its_answer() -> None:
    assert asyncio.run(rollout_of({"message": "Parcel gone.", "team": "shipping"}, answer="shipping")) == 1.0
    assert asyncio.run(rollout_of({"message": "Parcel gone.", "team": "shipping"}, answer="billing")) == 0.0


async def rollout_of(task: dict, answer: str) -> float | None:
    """The agent's reward where the model, a server on this machine, says the same whatever it is asked."""

    async def respond(request: web.Request) -> web.Response:
        choice = {"index": 0, "message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        )

    server = web.Application()
    server.router.add_post("/v1/chat/completions", respond)
    http = web.AppRunner(server)
    await http.setup()
    await web.TCPSite(http, "127.0.0.1", 0).start()
    store = await agl.SqlStore.open(":memory:")
    try:
        llm = agl.LLM(endpoint=f"http://127.0.0.1:{http.addresses[0][1]}/v1", model="m", api_key="any")
        rollout = await agl.Runner(store, agent).run_one(task, {"llm": llm})
        return agl.find_final_reward(await store.query_spans(rollout.rollout_id))
    finally:
        await store.close()
        await http.cleanup()
