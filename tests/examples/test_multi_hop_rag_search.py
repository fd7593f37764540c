"""Multi-hop questions: the retriever, the MCP server, and the agent against a scripted endpoint.

Run where bm25s, faiss, mcp and the OpenAI Agents SDK are: `make .venv-experiments/.setup`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

for package in ("bm25s", "faiss", "mcp", "agents"):
    pytest.importorskip(package)

from openai import AsyncOpenAI  # noqa: E402

from tests.examples.endpoint import calling, scripted  # noqa: E402
from tests.examples.loading import load_example  # noqa: E402

hop = load_example("multi_hop_rag", "tasks", "demonstrations", "retriever", "agent")
Index = hop.retriever.Index
FACTS = hop.tasks.facts()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world") / "index"
    hop.retriever.build_index(hop.tasks.passages(), folder, dense="hashed")
    return folder


# --- retriever ---


@pytest.mark.parametrize("method", ["bm25", "dense"])
def test_a_query_of_entity_and_relation_finds_its_fact_and_a_question_no_answer(
    world: Path, method: str
) -> None:
    index = Index(world, method)
    for (entity, relation), value in FACTS.items():
        assert index.search(f"{entity} {relation}") == [f"{entity} {relation}: {value}"]
    for task in hop.tasks.heldout_tasks(300):
        assert task["answers"][0] not in index.search(task["question"])[0]


# --- agent ---


@asynccontextmanager
async def searching(
    index: Path, *script: dict[str, Any]
) -> AsyncIterator[tuple[Callable[[str], Any], list[Any]]]:
    """Asks the agent, whose model answers by the script; and the requests of the model."""
    search = hop.agent.Search(index)
    try:
        with scripted(*script) as (url, requests):
            async with AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
                yield partial(hop.agent.solve, search=search, client=client), requests
    finally:
        await search.close()


def children() -> set[int]:
    """Processes that this one has started."""
    return {
        int(one)
        for file in Path("/proc/self/task").glob("*/children")
        for one in file.read_text().split()
    }


@pytest.mark.anyio
async def test_the_agent_follows_hops_until_the_model_answers(world: Path) -> None:
    film = hop.tasks.entities()[0][0]
    artist = FACTS[film, "director"]
    script = (
        calling("search", {"query": f"{film} director"}),
        calling("search", {"query": f"{artist} home"}, 2),
    )
    async with searching(world, *script, {"content": "answer: there"}) as (solve, requests):
        assert await solve(f"home of director of {film}") == "answer: there"
    messages = requests[-1]["messages"]
    assert [message["role"] for message in messages] == [
        "system",
        "user",
        *["assistant", "tool"] * 2,
    ]
    told = [message["content"][0]["text"] for message in messages if message["role"] == "tool"]
    assert told == [f"{film} director: {artist}", f"{artist} home: {FACTS[artist, 'home']}"]
    (tool,) = (one["function"] for one in requests[0]["tools"])
    (shown,) = (one["function"] for one in hop.demonstrations.TOOLS)
    assert (tool["name"], list(tool["parameters"]["properties"])) == ("search", ["query"])
    assert (shown["name"], list(shown["parameters"]["properties"])) == ("search", ["query"])
    assert messages[0]["content"] == hop.demonstrations.INSTRUCTIONS
    assert hop.agent.MAX_TURNS == hop.demonstrations.MAX_TURNS


@pytest.mark.anyio
async def test_the_model_is_told_of_calls_that_make_no_sense_and_what_is_not_found(
    world: Path,
) -> None:
    asked = ["{}", "nonsense", {"query": [1]}, {"query": "xyz"}]
    script = [calling("search", arguments, number) for number, arguments in enumerate(asked)]
    async with searching(world, *script, {"content": "answer: none"}) as (solve, requests):
        assert await solve("?") == "answer: none"
    told = [message["content"] for message in requests[-1]["messages"] if message["role"] == "tool"]
    assert all("error" in str(one).lower() for one in told[:3])
    assert "nothing found" in str(told[3])


@pytest.mark.anyio
async def test_one_server_process_serves_all_and_after_its_death_another_does(world: Path) -> None:
    script, before = (
        (calling("search", {"query": "director"}), {"content": "answer: yes"}),
        children(),
    )
    async with searching(world, *script) as (solve, _):
        assert await asyncio.gather(*map(solve, "?" * 8)) == ["answer: yes"] * 8
        (server,) = children() - before
        os.kill(server, signal.SIGKILL)
        outcomes = await asyncio.gather(*map(solve, "?" * 8), return_exceptions=True)
        lost = [one for one in outcomes if isinstance(one, hop.agent.SearchLost)]
        assert lost and all(
            isinstance(one, hop.agent.SearchLost) or one == "answer: yes" for one in outcomes
        )
        assert str(lost[0]).startswith("the search server was lost: ")
        assert await solve("?") == "answer: yes"
        assert len(children() - before) == 1


def test_the_agent_needs_nothing_of_agent_lightning() -> None:
    import subprocess

    script = (
        "import agent, server, sys; sys.exit(any(name.startswith('agentlightning') for name in "
        "sys.modules))"
    )
    folder = Path(hop.agent.__file__).parent
    assert subprocess.run([sys.executable, "-c", script], cwd=folder, timeout=240).returncode == 0
