"""Multi-hop questions: the retriever, the MCP server, and the agent against a scripted endpoint.

Run where bm25s, faiss, mcp and the OpenAI Agents SDK are: `make .venv-experiments/.setup`."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
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

hop = load_example("multi_hop_rag", "tasks", "demonstrations", "retriever", "agent", "rollout")
Index, answer = hop.retriever.Index, hop.retriever.answer
PASSAGES = [
    "lion: kind: big cat. group: Panthera. large gregarious cat of Africa and India",
    "big cat: kind: feline. group: Felidae. any of several large cats able to roar",
    "liger: kind: big cat. offspring of a male lion and a female tiger",
    "Panthera: kind: mammal genus. group: Felidae. lions, leopards, snow leopards and jaguars",
    "feline: kind: carnivore. any of various lithe-bodied mammals",
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world") / "index"
    hop.retriever.build_index(PASSAGES, folder, dense="hashed")
    return folder


# --- retriever ---


def test_a_query_for_a_title_finds_its_passage_before_those_that_name_it(world: Path) -> None:
    index = Index(world)
    assert set(index.search("kind: big cat", 3)[1:]) == {PASSAGES[0], PASSAGES[2]}
    assert index.search("kind: big cat") == [PASSAGES[1]]
    assert index.search("offspring of a lion") == [PASSAGES[2]]


def test_embeddings_rank_too(world: Path) -> None:
    assert Index(world, "dense").search("male lion and female tiger") == [PASSAGES[2]]


@pytest.mark.parametrize(
    ("query", "result"),
    [
        ("", "Error: the query is empty; search for a word or a description"),
        (" \n", "Error: the query is empty; search for a word or a description"),
        ("\u043b\u0435\u0432", "nothing found"),  # another script
        ("?!", "nothing found"),
        ("xyz", "nothing found"),
        ("roar " * 200_000, "big cat: kind: feline. …"),
    ],
)
def test_odd_queries_have_an_answer(world: Path, query: str, result: str) -> None:
    assert answer(Index(world), query, most=4) == result


@pytest.mark.parametrize("name", ["data.csc.index.npy", "corpus.jsonl", "vocab.index.json"])
@pytest.mark.parametrize("left", [None, 0, 0.5])
def test_a_broken_index_is_reported(
    tmp_path: Path, world: Path, name: str, left: float | None
) -> None:
    broken = shutil.copytree(world, tmp_path / "index")
    if left is None:
        (broken / name).unlink()
    else:
        os.truncate(broken / name, int(left * (broken / name).stat().st_size))
    with pytest.raises(ValueError, match=r"is broken .*delete the folder"):
        Index(broken)


def test_a_missing_index_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no bm25 index in "):
        Index(tmp_path)


def test_processes_that_make_one_index_side_by_side_leave_one_that_works(tmp_path: Path) -> None:
    script = f"import retriever; print(retriever.cached_index({PASSAGES!r}))"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    folder = Path(hop.agent.__file__).parent
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    (made,) = {Path(process.communicate(timeout=120)[0].strip()) for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert list(made.parent.iterdir()) == [made]
    assert Index(made).search("lion") == PASSAGES[:1]


@pytest.mark.skipif(
    not Path("/usr/share/wordnet/data.noun").exists(),
    reason="WordNet is missing: apt install wordnet-base",
)
def test_the_searches_of_questions_over_wordnet_find_what_they_need() -> None:
    index = Index(hop.retriever.cached_index(hop.tasks.passages()))
    tasks = hop.tasks.heldout_tasks(120)
    asked = [(title, f"kind: {title}") for task in tasks for title in task["path"]]
    described = [(task["path"][0], task["start"]) for task in hop.tasks.train_tasks(900, 1)]
    described = [(title, start) for title, start in described if start.startswith("thing: ")]
    for queries, share in ((asked, 0.98), (described, 0.8)):
        found = [index.search(query)[0].startswith(f"{title}: ") for title, query in queries]
        assert sum(found) / len(found) >= share


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
                yield partial(hop.agent.run, search=search, client=client), requests
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
    script = (
        calling("search", {"query": "word: lion"}),
        calling("search", {"query": "kind: big cat"}, 2),
    )
    async with searching(world, *script, {"content": "answer: feline"}) as (solve, requests):
        text, items = await solve("kind of kind of word: lion")
    assert (text, hop.agent.read(items)) == ("answer: feline", PASSAGES[:2])
    messages = requests[-1]["messages"]
    assert [message["role"] for message in messages] == [
        "system",
        "user",
        *["assistant", "tool"] * 2,
    ]
    told = [message["content"][0]["text"] for message in messages if message["role"] == "tool"]
    assert told == PASSAGES[:2]
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
    asked = ["{}", "nonsense", {"query": [1]}, {"query": ""}, {"query": "xyz"}]
    script = [calling("search", arguments, number) for number, arguments in enumerate(asked)]
    async with searching(world, *script, {"content": "answer: none"}) as (solve, requests):
        assert (await solve("?"))[0] == "answer: none"
    told = [message["content"] for message in requests[-1]["messages"] if message["role"] == "tool"]
    assert all("error" in str(one).lower() for one in told[:4])
    assert "nothing found" in str(told[4])


@pytest.mark.anyio
async def test_one_server_process_serves_all_and_after_its_death_another_does(world: Path) -> None:
    script, before = (
        (calling("search", {"query": "lion"}), {"content": "answer: yes"}),
        children(),
    )
    async with searching(world, *script) as (solve, _):
        answers = await asyncio.gather(*map(solve, "?" * 8))
        assert [text for text, _ in answers] == ["answer: yes"] * 8
        (server,) = children() - before
        os.kill(server, signal.SIGKILL)
        outcomes = await asyncio.gather(*map(solve, "?" * 8), return_exceptions=True)
        lost = [one for one in outcomes if isinstance(one, hop.agent.SearchLost)]
        assert lost and all(
            isinstance(one, hop.agent.SearchLost) or one[0] == "answer: yes" for one in outcomes
        )
        assert str(lost[0]).startswith("the search server was lost: ")
        assert (await solve("?"))[0] == "answer: yes"
        assert len(children() - before) == 1


def test_the_agent_needs_nothing_of_agent_lightning() -> None:
    script = (
        "import agent, server, sys; sys.exit(any(name.startswith('agentlightning') for name in "
        "sys.modules))"
    )
    folder = Path(hop.agent.__file__).parent
    assert subprocess.run([sys.executable, "-c", script], cwd=folder, timeout=240).returncode == 0
