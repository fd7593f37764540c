"""`agl prompts`: what a program sends, from what is stored, and the candidate that is written."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from agentlightning.cli.main import run
from agentlightning.prompts.components import read_candidate
from agentlightning.prompts.replacing import Replacer
from agentlightning.server.server_process import in_production
from agentlightning.store.sql import SqlStore
from agentlightning.types import LLM, PromptCandidate, PromptText, Span
from tests.gateway.world import serving
from tests.prompts.world import call

STORE = "agentlightning.sqlite"
WRITER = "You are the writer. Answer in one short sentence."
DESK = "You are the desk, for the guest called {}.\nAnswer in one short sentence."


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def fill(*tasks: tuple[str, Sequence[Span]]) -> None:
    async def work() -> None:
        store = await SqlStore.open(STORE)
        for task, spans in tasks:
            rollout = await store.start_rollout(task)
            ids = (rollout.rollout_id, rollout.attempt.attempt_id)
            await store.add_many_spans(
                [
                    msgspec.structs.replace(span, rollout_id=ids[0], attempt_id=ids[1])
                    for span in spans
                ]
            )
        await store.close()

    asyncio.run(work())


def guests(*names: str) -> list[tuple[str, Sequence[Span]]]:
    return [(f"task of {name}", [call(WRITER), call(DESK.format(name))]) for name in names]


def test_texts_are_shown_by_agent_with_what_varies(capsys: pytest.CaptureFixture[str]) -> None:
    fill(*guests("Ann", "Bob", "Cyd"))
    assert run(["prompts", STORE]) == 0
    shown = capsys.readouterr()
    assert "writer.system  in 3 calls of writer\n  │ You are the writer." in shown.out
    assert "  │ You are the desk, for the guest called {hole1}.\n  │ Answer in one" in shown.out
    assert "{hole1}: 'Cyd', 'Bob', 'Ann'" in shown.out or "{hole1}: 'Ann'" in shown.out
    assert "3 rollouts, 2 texts, 2 of them can be replaced" in shown.err


def test_what_is_not_offered_is_shown_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    fill(*guests("Ann"))
    assert run(["prompts", STORE, "--write", "prompts.json"]) == 0
    assert capsys.readouterr().out.count("not offered: it was seen in one task only") == 2
    assert read_candidate("prompts.json").components == {}


def test_json_is_one_object_and_the_candidate_can_be_read_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fill(*guests("Ann", "Bob", "Cyd"))
    arguments = ["prompts", "--store", STORE, "--json", "--keep", "desk.*", "--write", "c.json"]
    assert run(arguments) == 0
    told = json.loads(capsys.readouterr().out)
    reasons = {each["name"]: each["reason"] for each in told["components"]}
    assert (told["rollouts"], reasons) == (
        3,
        {"desk.system": "it is to be kept", "writer.system": None},
    )
    assert list(read_candidate("c.json").components) == ["writer.system"]


def test_calls_under_a_candidate_show_what_the_program_sent(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = PromptText(place="system", sent=WRITER, text="SAY IT SHORT.")
    candidate = PromptCandidate(components={"writer.system": text})
    fields = {"messages": msgspec.Raw(json.dumps([{"role": "system", "content": WRITER}]).encode())}
    replaced = Replacer(candidate, "rs-1").replaced(fields)
    assert replaced is not None
    fill(*((task, [call("SAY IT SHORT.", replaced=replaced.record)]) for task in "ab"))
    assert run(["prompts", STORE, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["components"] == []  # whose candidate is not known

    async def add() -> None:
        store = await SqlStore.open(STORE)
        await store.add_resources({"prompts": candidate}, resources_id="rs-1")
        await store.close()

    asyncio.run(add())
    assert run(["prompts", STORE, "--json"]) == 0
    (component,) = json.loads(capsys.readouterr().out)["components"]
    assert (component["sent"], component["agents"]) == (WRITER, ["writer"])


def test_a_bad_candidate_stops_the_server_before_it_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("c.json").write_text('{"components": {"a": {"place": "system", "sent": "{hole1} x"}}}')
    handlers = list(logging.getLogger().handlers)
    assert run(["server", "--prompts", "c.json"]) == 1
    assert "c.json is no candidate" in capsys.readouterr().err
    assert run(["server", "--prompts", "elsewhere.json"]) == 1
    assert "there is no candidate at elsewhere.json" in capsys.readouterr().err
    assert not Path(STORE).exists()
    assert logging.getLogger().handlers == handlers  # it was refused before it set up its log


@pytest.mark.anyio
async def test_prompts_in_production_leave_the_latest_resources_as_they_were() -> None:
    candidate = PromptCandidate(
        components={"a": PromptText(place="system", sent=WRITER, text="SHORT.")}
    )
    store = await SqlStore.open(":memory:")
    llm = LLM(endpoint="/v1", model="policy", gateway=True)
    await store.add_resources({"llm": llm})
    for _ in range(2):  # a server starts twice
        assert await in_production(store, candidate) is not None
    latest = await store.get_latest_resources()
    versions = await store.query_resources()
    await store.close()
    assert latest is not None and latest.resources == {"llm": llm}
    assert [list(each.resources) for each in versions] == [["llm"], ["prompts"], ["llm"]]


AGENT = """
import os

from openai import OpenAI

def agent(task):
    messages = [{"role": "system", "content": "You are the clerk."}, {"role": "user", "content": task}]
    OpenAI().chat.completions.create(model=os.environ.get("OPENAI_MODEL", "any-name"), messages=messages)
    return 1.0
"""


@pytest.fixture
def unchanged() -> None:
    Path("agent.py").write_text(AGENT)
    Path("tasks.jsonl").write_text('"one"\n"two"\n"three"\n')


@pytest.mark.slow
@pytest.mark.anyio
async def test_an_agent_is_run_at_the_api_that_its_environment_names(
    unchanged: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def answer(request: Request) -> JSONResponse:
        asked.append((await request.json())["model"])
        choice = {"index": 0, "message": {"role": "assistant", "content": "Yes."}}
        return JSONResponse({"id": "c", "model": "m", "choices": [choice]})

    async with serving(Starlette(routes=[Route("/{path:path}", answer, methods=["POST"])])) as url:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{url}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "any")
        command = ["prompts", "agent.py:agent", "tasks.jsonl", "--write", "prompts.json"]
        assert await asyncio.to_thread(run, command) == 0
    assert asked == ["any-name"] * 3
    assert read_candidate("prompts.json").components.keys() == {"clerk.system"}
