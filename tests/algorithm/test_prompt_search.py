"""Prompt optimisation: a real store, runner and HTTP endpoint; the editing model is a
script."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import agentlightning as agl
from agentlightning.algorithm.budget import Budget, OutOfBudget, Spending
from agentlightning.algorithm.prompt_search.tunable import placeholders
from agentlightning.errors import ConfigError, TrainingError
from agentlightning.prompts.components import read_candidate
from agentlightning.rewards import chat_completion
from agentlightning.store.sql import SqlStore
from agentlightning.types import PromptCandidate, PromptTemplate, PromptText
from tests.gateway.world import serving

TASKS = [{"number": number} for number in range(8)]
SEED = "Say {number}."


def speak(prompt: str) -> None:
    """What an instrumented client reports of a call: a critic needs to see one."""
    said = {
        name: json.dumps([{"role": role, "content": prompt}])
        for name, role in (("input", "user"), ("output", "assistant"))
    }
    agl.emit_annotation(
        {"gen_ai.operation.name": "chat"}
        | {f"gen_ai.{name}.messages": text for name, text in said.items()}
    )


@agl.rollout
async def counts_good(task: dict, prompt_template: agl.PromptTemplate) -> float:
    """A prompt is worth a tenth for each GOOD in it."""
    speak(prompt_template.template)
    return min(1.0, prompt_template.format(number=task["number"]).count("GOOD") / 10)


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_completion, "WAITS", (0.0, 0.0))


class Optimizer:
    """Answers a critique with `critique`, an edit with what `edit` makes of the prompt and the
    number of the call."""

    def __init__(self) -> None:
        self.critique = "say GOOD more often"
        self.edit: Callable[[str, int], str] = lambda prompt, number: (
            f"<prompt>{prompt} GOOD{number}</prompt>"
        )
        self.status = 200
        self.asked: list[str] = []
        self.requests: list[list[dict]] = []
        self.delay = 0.0

    async def answer(self, request: Request) -> JSONResponse:
        body = await request.json()
        prompt = body["messages"][0]["content"]
        self.asked.append(body["model"])
        self.requests.append(body["messages"])
        number = len(self.asked)
        await asyncio.sleep(self.delay)
        text = self.critique
        if "between <prompt>" in prompt:
            text = self.edit(re.split(r'<prompt name="[\w.-]+">\n|\n</prompt>', prompt)[1], number)
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": text},
        }
        usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
        body = {
            "id": "c",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "usage": usage,
        }
        return JSONResponse(body | {"choices": [choice]}, self.status)


@asynccontextmanager
async def optimizer(script: Optimizer | None = None) -> AsyncIterator[tuple[Optimizer, str]]:
    script = script or Optimizer()
    async with serving(
        Starlette(routes=[Route("/{path:path}", script.answer, methods=["POST"])])
    ) as url:
        yield script, url


async def measures(run: Path) -> list[str]:
    """What each rollout of a run measured: a candidate on a task."""
    store = await SqlStore.open(run / "store.sqlite")
    try:
        return [json.dumps(rollout.metadata["measure"]) for rollout in await store.query_rollouts()]
    finally:
        await store.close()


def apo(url: str, **changes: Any) -> agl.APO:
    settings: dict[str, Any] = {
        "beam_width": 2,
        "branch_factor": 2,
        "beam_rounds": 2,
        "val_batch_size": 4,
    }
    return agl.APO(
        agl.LLM(endpoint=f"{url}/v1", model="m"),
        **(settings | {"gradient_batch_size": 2} | changes),
    )


def trainer(tmp_path: Path, algorithm: agl.APO, **changes: Any) -> agl.Trainer:
    resources = {"prompt": PromptTemplate(template=SEED)}
    settings = {
        "initial_resources": resources,
        "run_dir": tmp_path / "run",
        "n_runners": 16,
        "algorithm": algorithm,
    }
    return agl.Trainer(**(settings | changes))


@pytest.mark.parametrize(
    ("engine", "text", "names"),
    [
        ("f-string", "{a} {b.c} {d[0]:>4} {{e}}", {"a", "b", "d"}),
        ("jinja", "{{ a }} {% for x in xs %}{{ x.y }}{% endfor %}", {"a", "xs"}),
        ("poml", '<p>{{ x.y }} {{ a }} {{ "text" }}</p>', {"x", "a"}),
    ],
)
def test_placeholders_of_each_template_language(engine: Any, text: str, names: set[str]) -> None:
    assert placeholders(PromptTemplate(template=text, engine=engine)) == names


def test_a_budget_begins_no_batch_that_does_not_fit() -> None:
    spending = Spending(Budget(rollouts=4, usd=1.0), {"m": (1.0, 2.0)})
    spending.add_rollout("a", {"m-2026-01-31": (100_000, 100_000)})
    assert spending.metrics["usd"] == pytest.approx(0.3)
    spending.require(2)
    with pytest.raises(OutOfBudget, match=r"budget is \$1: 0\.30 are spent"):
        spending.require(3)
    with pytest.raises(OutOfBudget, match="is 4 rollouts: 1 are done, the next need 4"):
        spending.require(4)
    spending.add_call({"mini": (1, 1)})
    with pytest.raises(ConfigError, match="price of 'mini' is unknown"):
        spending.require()
    with pytest.raises(OutOfBudget, match="is 1,000 tokens: 200,000 are used"):
        Spending(Budget(tokens=1_000), agents=spending.agents).require()
    with pytest.raises(OutOfBudget, match="hours: they are over"):
        Spending(Budget(hours=0.5), began=time.monotonic() - 1_801).require()


@pytest.mark.anyio
async def test_a_search_finds_a_better_prompt_and_keeps_its_lineage(tmp_path: Path) -> None:
    algorithm_store = await SqlStore.open(tmp_path / "store.sqlite")
    async with optimizer() as (script, url):
        algorithm = apo(url, gradient_model="critic", apply_edit_model="editor")
        result = await trainer(tmp_path, algorithm, store=algorithm_store).fit_async(
            counts_good, TASKS, TASKS
        )
    assert result.stopped_because == "the search is over"
    before, after = (evaluation.reward for evaluation in result.evaluations)
    assert before == 0 and after == pytest.approx(0.2)
    best = algorithm.get_best_prompt()
    assert best.template.count("GOOD") == 2 and best.template.startswith(SEED)
    assert (tmp_path / "run" / "prompts" / "prompt.txt").read_text() == best.template
    assert set(script.asked) == {"critic", "editor"}
    shown = script.requests[0][0]["content"]
    assert 'task: {"number":' in shown and "reward: 0" in shown

    versions = {update.resources_id: update for update in await algorithm_store.query_resources()}
    latest = await algorithm_store.get_latest_resources()
    assert latest is not None and latest.resources["prompt"] == best
    assert latest.metadata["round"]["final"]
    leader = versions[latest.parent_id or ""]
    candidate = leader.metadata["candidate"]
    assert (candidate["changed"], candidate["critique"]) == ("prompt", script.critique)
    assert f"+{best.template}" in leader.metadata["diff"]
    parent = versions[leader.parent_id or ""]
    assert parent.metadata["candidate"]["name"] == candidate["parent"]
    rounds = [
        update.metadata["round"] for update in versions.values() if "round" in update.metadata
    ]
    assert [one["number"] for one in rounds] == [0, 1, 2, 3]
    assert rounds[2]["scores"][candidate["name"]]["mean"] == pytest.approx(0.2)
    await algorithm_store.close()


@pytest.mark.anyio
async def test_several_templates_are_changed_in_turn(tmp_path: Path) -> None:
    @agl.rollout
    async def two(task: dict, resources: agl.NamedResources) -> float:
        speak("two")
        texts = [resources[name].template for name in ("planner", "writer")]  # type: ignore[union-attr]
        return sum(min(1, text.count("GOOD")) for text in texts) / 2

    resources = {
        "planner": PromptTemplate(template="Plan {{ number }}", engine="jinja"),
        "writer": PromptTemplate(template="Write"),
        "fixed": PromptTemplate(template="Never"),
    }
    async with optimizer() as (_, url):
        algorithm = apo(url, templates=("planner", "writer"))
        await trainer(tmp_path, algorithm, initial_resources=resources).fit_async(two, TASKS, TASKS)
    assert "GOOD" in algorithm.get_best_prompt("planner").template
    assert "GOOD" in algorithm.get_best_prompt("writer").template
    assert algorithm.get_best_prompt("planner").engine == "jinja"


@pytest.mark.anyio
async def test_a_search_that_was_interrupted_goes_on_from_the_store(tmp_path: Path) -> None:
    async with optimizer() as (script, url):
        first = await trainer(tmp_path, apo(url, budget=agl.Budget(rollouts=24))).fit_async(
            counts_good, TASKS, TASKS
        )
        assert first.stopped_because.startswith("the budget is 24 rollouts: ")
        asked = len(script.asked)
        # An agent that would fail: what was measured is not measured again.
        second = apo(url)
        result = await trainer(tmp_path, second).fit_async(counts_good, TASKS, TASKS, resume=True)
        # 2 rounds of 4 critiques and 4 edits, none of them twice
        assert len(script.asked) == 16 > asked
    assert result.stopped_because == "the search is over"
    assert second.get_best_prompt().template.count("GOOD") == 2
    assert len(found := await measures(tmp_path / "run")) == len(set(found))


@pytest.mark.anyio
@pytest.mark.parametrize("own_client", [True, False])
async def test_a_client_or_an_endpoint_can_be_the_optimiser(
    tmp_path: Path, own_client: bool
) -> None:
    settings: dict[str, Any] = {
        "beam_rounds": 1,
        "beam_width": 1,
        "branch_factor": 1,
        "val_batch_size": 16,
    }
    async with (
        optimizer() as (script, url),
        AsyncOpenAI(base_url=f"{url}/v1", api_key="k") as client,
    ):
        algorithm = (
            agl.APO(client, **settings) if own_client else agl.APO(endpoint=f"{url}/v1", **settings)
        )
        # fewer than a batch
        result = await trainer(tmp_path, algorithm).fit_async(counts_good, TASKS[:1], TASKS[:3])
    assert script.asked == ["gpt-5-mini", "gpt-4.1-mini"]
    assert algorithm.get_best_prompt().template.count("GOOD") == 1
    assert [one.rollout.mode for one in result.evaluations[-1].tasks] == ["test"]


def gepa(url: str, **changes: Any) -> agl.GEPA:
    settings: dict[str, Any] = {"proposals": 2, "reflection_minibatch_size": 2}
    return agl.GEPA(agl.LLM(endpoint=f"{url}/v1", model="m"), **(settings | changes))


@pytest.mark.anyio
async def test_gepa_finds_better_prompts_within_its_budget(tmp_path: Path) -> None:
    async with optimizer() as (_, url):
        algorithm = gepa(url, budget=agl.Budget(rollouts=60))
        result = await trainer(tmp_path, algorithm).fit_async(counts_good, TASKS, TASKS)
    assert result.stopped_because.startswith("the budget is 60 rollouts")
    before, after = (evaluation.reward for evaluation in result.evaluations)
    assert before == 0 and after > 0.15
    assert algorithm.get_best_prompt().template.count("GOOD") == round(after * 10)
    assert len(found := await measures(tmp_path / "run")) == len(set(found)) <= 60


@pytest.mark.anyio
async def test_a_prompt_that_repeats_a_task_is_flagged(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told = "one two three four five six seven eight nine"
    tasks = [task | {"answers": [told]} for task in TASKS]
    async with optimizer() as (script, url):
        script.edit = lambda prompt, number: f"<prompt>{prompt} GOOD {told.upper()}</prompt>"
        algorithm = gepa(url, budget=agl.Budget(rollouts=30))
        await trainer(tmp_path, algorithm).fit_async(counts_good, tasks, tasks)
    assert "an edit of prompt repeats words of a task: 'one two three" in capfd.readouterr().err
    store = await SqlStore.open(tmp_path / "run" / "store.sqlite")
    copied = [
        one.metadata["candidate"]["copied"]
        for one in await store.query_resources()
        if "candidate" in one.metadata
    ]
    await store.close()
    assert None in copied and "one two three four five six seven eight" in copied


@pytest.mark.anyio
async def test_gepa_ends_when_nothing_new_is_found(tmp_path: Path) -> None:
    async with optimizer() as (script, url):
        script.edit = lambda prompt, number: "<prompt>Say {number} GOOD.</prompt>"
        result = await trainer(tmp_path, gepa(url)).fit_async(counts_good, TASKS, TASKS)
    assert result.stopped_because == "the search is over"
    assert result.evaluations[-1].reward == pytest.approx(0.1)


@pytest.mark.anyio
@pytest.mark.parametrize("make", [apo, gepa])
async def test_a_search_that_is_interrupted_walks_the_same_way_and_pays_nothing_twice(
    tmp_path: Path, make: Callable[..., Any]
) -> None:
    def searching(where: str, rollouts: int) -> tuple[Any, agl.Trainer]:
        algorithm = make(url, budget=agl.Budget(rollouts=rollouts), report_share=0.0)
        return algorithm, trainer(tmp_path / where, algorithm)

    async with optimizer() as (script, url):
        script.edit = lambda prompt, number: f"<prompt>{prompt} GOOD{len(prompt) % 7}</prompt>"
        whole, uninterrupted = searching("whole", 60)
        await uninterrupted.fit_async(counts_good, TASKS, TASKS)
        asked = len(script.asked)
        for rollouts in (20, 41, 60):
            parts, interrupted = searching("parts", rollouts)
            await interrupted.fit_async(counts_good, TASKS, TASKS, resume=rollouts > 20)
    assert len(script.asked) == 2 * asked
    assert parts.get_best_prompt() == whole.get_best_prompt() != PromptTemplate(template=SEED)
    measured = await measures(tmp_path / "parts" / "run")
    assert sorted(measured) == sorted(await measures(tmp_path / "whole" / "run"))
    assert len(measured) == len(set(measured))


WRITER, EDITOR = (
    "You are the writer. Be nice.",
    "You are the editor. Today is {day}. Always be nice.",
)


@agl.rollout
async def unchanged(task: dict, llm: agl.LLM) -> float:
    """Two sub-agents with texts of their own: a tenth for each GOOD in what they say."""
    client = agl.openai_client(llm)
    said = ""
    for prompt in (WRITER, EDITOR.format(day=f"May {task['number'] + 1}")):
        messages: list[Any] = [
            {"role": "system", "content": prompt},
            {"role": "user", "content": f"Number {task['number']} {said}"},
        ]
        answer = await client.chat.completions.create(model=llm.model, messages=messages)
        said = answer.choices[0].message.content or ""
    return said.count("GOOD") / 10


class HostedModel(Optimizer):
    """Repeats what it reads; and edits prompts."""

    async def answer(self, request: Request) -> JSONResponse:
        messages = (await request.json())["messages"]
        if "between <prompt>" in messages[0]["content"]:
            return await super().answer(request)
        text = " ".join(message["content"] for message in messages)
        choice = {"index": 0, "message": {"role": "assistant", "content": text}}
        return JSONResponse({"id": "c", "model": "m", "choices": [choice]})


@pytest.mark.anyio
@pytest.mark.parametrize("interrupted", [False, True])
async def test_the_texts_of_an_unchanged_program_are_improved(
    tmp_path: Path, interrupted: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    async with optimizer(HostedModel()) as (script, url):
        llm = agl.LLM(endpoint=f"{url}/v1", model="m")
        for rollouts in (40, 100) if interrupted else (100,):
            algorithm = gepa(url, budget=agl.Budget(rollouts=rollouts))
            result = await trainer(tmp_path, algorithm, initial_resources={"llm": llm}).fit_async(
                unchanged, TASKS, TASKS, resume=rollouts == 100 and interrupted
            )
    before, after = (evaluation.reward for evaluation in result.evaluations)
    assert before == 0 and after > 0.25
    assert "texts that may change: editor.system, writer.system" in capfd.readouterr().err
    found = read_candidate(tmp_path / "run").components
    assert found.keys() == {"writer.system", "editor.system"}
    assert found["editor.system"].sent == "You are the editor. Today is {hole1}. Always be nice."
    best = algorithm.get_best_prompt("editor.system").template
    assert found["editor.system"].text == best and "{hole1}" in best
    changed = sum(component.text.count("GOOD") for component in found.values())
    assert changed == round(after * 10)
    shown = script.requests[0][0]["content"]
    assert "keep these" in shown and "<other_prompt" in shown
    assert len(measured := await measures(tmp_path / "run")) == len(set(measured)) <= 100


@pytest.mark.anyio
async def test_a_search_begins_with_the_prompts_of_another(tmp_path: Path) -> None:
    rewards: list[float] = []
    given: dict[str, Any] = {}
    async with optimizer(HostedModel()) as (_, url):
        given["llm"] = agl.LLM(endpoint=f"{url}/v1", model="m")
        for name in ("first", "second"):
            search = gepa(url, budget=agl.Budget(rollouts=80))
            run = trainer(tmp_path / name, search, initial_resources=given)
            result = await run.fit_async(unchanged, TASKS, TASKS)
            rewards += [evaluation.reward for evaluation in result.evaluations]
            given["prompts"] = read_candidate(tmp_path / name / "run")
        before, between, again, after = rewards
        assert before < between == again < after
        assert given["prompts"].components["editor.system"].sent == EDITOR.format(day="{hole1}")
        strange = PromptCandidate(
            components={"clerk": PromptText(place="system", sent="You are the clerk.", text="Go.")}
        )
        with pytest.raises(ConfigError, match="does not send 'clerk' as the candidate has it"):
            await trainer(
                tmp_path / "strange", gepa(url), initial_resources={**given, "prompts": strange}
            ).fit_async(unchanged, TASKS, TASKS)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("", "no prompt between"),
        ("I would say GOOD.", "no prompt between"),
        ("<prompt>Say GOOD.</prompt>", r"lost the placeholder {number}"),
        ("<prompt>Say {number} {x}.</prompt>", r"has the placeholder {x}"),
        ("<prompt>Say {number.</prompt>", "not a valid f-string template"),
    ],
)
async def test_an_unusable_edit_is_sent_back_once_then_rejected_with_the_reason(
    tmp_path: Path, answer: str, reason: str
) -> None:
    async with optimizer() as (script, url):
        script.edit = lambda prompt, number: answer
        algorithm = apo(url, beam_rounds=1)
        result = await trainer(tmp_path, algorithm).fit_async(counts_good, TASKS, TASKS)
    assert algorithm.get_best_prompt().template == SEED
    assert result.metrics[1].values["rejected"] == 4
    repairs = [messages[-1]["content"] for messages in script.requests if len(messages) == 3]
    assert len(repairs) == 4 and all(repair.startswith("That cannot be used") for repair in repairs)
    store = await SqlStore.open(tmp_path / "run" / "store.sqlite")
    recorded = [
        update.metadata["round"]
        for update in await store.query_resources()
        if "round" in update.metadata
    ]
    assert all(reason.replace("\\", "") in why for why in recorded[1]["rejected"].values())
    await store.close()


@pytest.mark.anyio
async def test_an_optimiser_that_fails_ends_the_run_and_loses_nothing(tmp_path: Path) -> None:
    async with optimizer() as (script, url):
        script.status = 503
        with pytest.raises(TrainingError, match=r"failed all 4 times in round 1.*503.*resume"):
            await trainer(tmp_path, apo(url)).fit_async(counts_good, TASKS, TASKS)
        assert len(script.asked) == 4 * 3  # each was tried three times
        script.delay = 1.0
        with pytest.raises(TrainingError, match=r"gave no answer within 0\.05 s"):
            await trainer(tmp_path, apo(url, model_timeout=0.05)).fit_async(
                counts_good, TASKS, TASKS, resume=True
            )
        script.delay = 0.0
        script.status = 200
        algorithm = apo(url)
        await trainer(tmp_path, algorithm).fit_async(counts_good, TASKS, TASKS, resume=True)
    assert algorithm.get_best_prompt().template.count("GOOD") == 2


@pytest.mark.anyio
async def test_edits_that_come_to_the_same_are_one_candidate(tmp_path: Path) -> None:
    async with optimizer() as (script, url):
        # every branch the same
        script.edit = lambda prompt, number: f"<prompt>{prompt} GOOD</prompt>"
        result = await trainer(tmp_path, apo(url, beam_rounds=1)).fit_async(
            counts_good, TASKS, TASKS
        )
    assert result.metrics[1].values["candidates"] == 2


@pytest.mark.anyio
async def test_rollouts_that_hang_are_cancelled_and_count_nothing(tmp_path: Path) -> None:
    @agl.rollout
    async def hangs_on_good(task: dict, prompt_template: agl.PromptTemplate) -> float:
        speak("hangs")
        if "GOOD" in prompt_template.template:
            await asyncio.sleep(60)
        return 0.5

    async with optimizer() as (_, url):
        algorithm = apo(
            url, beam_rounds=1, beam_width=1, branch_factor=1, rollout_batch_timeout=0.5
        )
        await trainer(tmp_path, algorithm).fit_async(hangs_on_good, TASKS, TASKS)
    assert algorithm.get_best_prompt().template == SEED


@pytest.mark.anyio
async def test_a_seed_that_earns_nothing_is_explained(tmp_path: Path) -> None:
    @agl.rollout
    async def asks_for_more(task: dict, prompt_template: agl.PromptTemplate) -> float:
        prompt_template.format()
        return 1.0

    async with optimizer() as (script, url):
        with pytest.raises(TrainingError, match="cannot fill the prompt template"):
            await trainer(tmp_path, apo(url)).fit_async(asks_for_more, TASKS, TASKS)
        assert not script.asked
        broken = {"prompt": PromptTemplate(template="Say {number")}
        with pytest.raises(
            ConfigError,
            match="template 'prompt' cannot be used: it is not a valid f-string template",
        ):
            await trainer(tmp_path / "b", apo(url), initial_resources=broken).fit_async(
                counts_good, TASKS, TASKS
            )


def test_settings_that_cannot_be_are_refused(tmp_path: Path) -> None:
    llm = agl.LLM(endpoint="http://127.0.0.1:1/v1", model="m")
    with pytest.raises(ConfigError, match="beam_width is 0"):
        agl.APO(llm, beam_width=0)
    with pytest.raises(ConfigError, match="no prompt template 'promt'; did you mean 'prompt'"):
        trainer(tmp_path / "a", agl.APO(llm, templates=("promt",))).fit(counts_good, TASKS, TASKS)
    with pytest.raises(ConfigError, match="give an AsyncOpenAI"):
        trainer(tmp_path / "b", agl.APO(OpenAI(api_key="k"))).fit(counts_good, TASKS, TASKS)
    with pytest.raises(TrainingError, match="the agent takes 'prompt_template'"):
        trainer(tmp_path / "c", agl.APO(llm), initial_resources={}).fit(counts_good, TASKS, TASKS)
    with pytest.raises(ConfigError, match="held-out tasks"):
        trainer(tmp_path / "d", agl.APO(llm)).fit(counts_good, TASKS)
    with pytest.raises(ConfigError, match=r"price of 'gpt-4\.1-mini' is unknown"):
        trainer(tmp_path / "e", agl.APO(llm, budget=agl.Budget(usd=1.0))).fit(
            counts_good, TASKS, TASKS
        )
