"""The travel desk: its tasks, its tools, its grading, and an episode over real HTTP."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from openai import AsyncOpenAI

from tests.examples.endpoint import calling, scripted
from tests.examples.loading import load_example

flight = load_example("flight", "agent", "tasks")
agent, heldout_tasks, train_tasks = (
    flight.agent,
    flight.tasks.heldout_tasks,
    flight.tasks.train_tasks,
)

CANCELLED = next(task for task in train_tasks(30, seed=1) if task["kind"] == "cancelled")
SUM = next(task for task in train_tasks(30, seed=1) if task["kind"] == "sum")


@pytest.mark.anyio
async def test_an_episode_of_memory_search_and_answer_earns_the_full_reward() -> None:
    destination = CANCELLED["question"].split(" to ")[1].split(" ")[0]
    search = {"from": CANCELLED["home"], "to": destination, "max": CANCELLED["budget"]}
    script = calling("memory", {"query": "home"}), calling("search", search)
    with scripted(*script, {"content": f"You fly {CANCELLED['answer']}."}) as (url, requests):
        async with AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
            episode = await agent.run(CANCELLED, client=client)
    assert episode.reward == 1.0
    assert episode.calls == ["memory", "search"]
    assert [message["role"] for message in episode.messages[2:]] == [
        *["assistant", "tool"] * 2,
        "assistant",
    ]
    assert requests[1]["messages"][-1]["tool_call_id"] == "call_1"
    assert {tool["function"]["name"] for tool in requests[0]["tools"]} == {
        "memory",
        "search",
        "calculator",
    }


@pytest.mark.anyio
async def test_nonsense_from_the_model_becomes_error_results_and_ends_after_five_turns() -> None:
    nonsense = [
        calling("teleport", "{}"),
        calling("search", "not json"),
        calling("search", '{"from": "Oslo"}'),
        calling("calculator", '{"expression": "__import__(\'os\')"}'),
        calling("memory", '{"query": "1+1"}'),
    ]
    with scripted(*nonsense) as (url, _):
        async with AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
            episode = await agent.run(SUM, client=client)
    assert episode.reward == 0.0
    assert [message["content"] for message in episode.messages if message["role"] == "tool"] == [
        "error"
    ] * 5


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("23+17", "result: 40"),
        ("2*(3-1)", "result: 4"),
        ("1/0", "error"),
        ("9**9", "error"),
        ("(" * 90, "error"),
    ],
)
def test_the_calculator_knows_arithmetic_and_nothing_else(expression: str, result: str) -> None:
    assert agent.use_tool(SUM, "calculator", json.dumps({"expression": expression})) == result


def test_a_right_answer_loses_a_little_for_each_needless_call() -> None:
    answer = f"result: {SUM['answer']}"
    assert agent.grade(SUM, answer, ["calculator"]) == 1.0
    assert agent.grade(SUM, answer, ["memory", "calculator"]) == pytest.approx(0.85)
    assert agent.grade(SUM, "result: 1", ["calculator"]) == 0.0
    assert agent.grade(SUM, "", []) == 0.0


def test_the_three_kinds_are_in_balance_and_no_heldout_task_is_trained_on() -> None:
    heldout = heldout_tasks(240)
    trained = {task["id"] for task in train_tasks(6000, seed=1)}
    assert set(Counter(task["kind"] for task in heldout).values()) == {80}
    assert len({task["id"] for task in heldout}) == 240
    with pytest.raises(ValueError, match="at most 264"):
        heldout_tasks(265)
    assert not trained & {task["id"] for task in heldout}
    assert heldout[:30] == heldout_tasks(30)
    assert train_tasks(9, seed=1) == train_tasks(9, seed=1) != train_tasks(9, seed=2)
