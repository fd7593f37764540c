"""Agents written for Agent Lightning 0.3 run as they are; what has no counterpart says what to
use."""

from __future__ import annotations

import importlib
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

import agentlightning as agl
from agentlightning.data.references import load_reference
from agentlightning.errors import ConfigError, InvalidError
from agentlightning.learner.policy import Policy
from agentlightning.learner.tiny import make_model, make_tokenizer
from agentlightning.types import LLM, Mode, PromptTemplate, Span
from agentlightning.v03 import Refused
from tests.runner.conftest import endpoint, store
from tests.runner.world import Endpoint

__all__ = ["endpoint", "store"]
pytestmark = pytest.mark.anyio
FOLDER = Path(__file__).parent / "agents"
ROOT = Path(__file__).parents[2]
# which is what the endpoint says
PARIS = {"input": "What is the capital of France?", "output": "hello"}

# Everything that `from agentlightning import *` gave in 0.3.0.
NAMES_OF_0_3 = """
APO Adapter AgentLightningClient AgentLightningServer AgentOpsTracer Algorithm Attempt AttemptStatus AttemptedRollout
AttributeValue Attributes Baseline ClientServerExecutionStrategy CollectionBasedLightningStore Dataset DevTaskLoader
DummyTracer EnqueueRolloutRequest Event ExecutionEvent ExecutionStrategy FastAlgorithm FilterField FilterOptions
GenericResponse Hook InMemoryLightningStore LLM LLMProxy LegacyAgentRunner LightningEnvVar LightningStore
LightningStoreCapabilities LightningStoreClient LightningStoreServer LightningStoreStatistics LightningStoreThreaded
Link LitAgent LitAgentRunner LlmProxyTraceToTriplet MultiprocessingEvent NamedResources OtelResource OtelTraceAdapter
OtelTracer PaginatedResult ParallelWorkerBase PromptTemplate ProxyLLM Resource ResourceUnion ResourcesUpdate Rollout
RolloutConfig RolloutLegacy RolloutMode RolloutRawResult RolloutRawResultLegacy RolloutStatus Runner
SharedMemoryExecutionStrategy SortOptions Span SpanAttributeNames SpanContext SpanCoreFields SpanLike SpanNames
SpanRecordingContext StatusCode Task TaskIfAny TaskInput ThreadingEvent TraceAdapter TraceState TraceStatus
TraceToMessages TraceToTripletBase Tracer TracerTraceToTriplet Trainer Triplet VERL Worker WorkerStatus algo
build_component clear_active_tracer configure_logger emit_annotation emit_exception emit_message emit_object emit_reward
find_final_reward find_reward_spans get_active_tracer get_message_value get_object_value get_reward_value
get_rewards_from_span is_reward_span lightning_cli llm_rollout operation prompt_rollout resolve_bool_env_var
resolve_int_env_var resolve_str_env_var reward rollout set_active_tracer setup_logging setup_module_logging
""".split()  # noqa: SIM905 - a list of this length would fill a page


def agent(reference: str) -> Any:
    return load_reference(f"{FOLDER}/{reference}")


async def spans_of(
    store: agl.SqlStore, agent: Any, resources: dict[str, Any], mode: Mode = "train", **options: Any
) -> list[Span]:
    rollout = await agl.Runner(store, agent, **options).run_one(PARIS, resources, mode=mode)
    assert rollout.status == "succeeded"
    return await store.query_spans(rollout.rollout_id)


@pytest.mark.parametrize("name", ["capitals", "with_rollout"])
async def test_function_agents_call_the_model_they_are_given(
    store: agl.SqlStore, endpoint: Endpoint, name: str
) -> None:
    spans = await spans_of(
        store,
        agent(f"capitals.py:{name}"),
        {"llm": LLM(endpoint=endpoint.url, model="policy", gateway=True)},
    )
    assert agl.find_final_reward(spans) == 1.0
    assert sum(endpoint.calls.values()) == 1
    assert all("/rollout/" in path for path, _ in endpoint.calls)


async def test_emitters_operations_and_several_rewards(
    store: agl.SqlStore, endpoint: Endpoint
) -> None:
    spans = await spans_of(
        store,
        agent("capitals.py:with_a_proxy"),
        {"main_llm": LLM(endpoint=endpoint.url, model="m", gateway=True)},
    )
    assert [span.name.removeprefix("agentlightning.") for span in spans] == [
        "operation",
        *["annotation"] * 3,
    ]
    assert spans[0].attributes["step"] == "answer"
    assert spans[1].attributes == {"kind": "capital", "nested.depth": 1}
    assert spans[2].attributes["agentlightning.tag.0"] == "guessed"
    assert agl.get_rewards_from_span(spans[3]) == [("right", 1.0), ("length", 0.5)]
    assert agl.find_final_reward(spans) == 1.0


async def test_prompts_are_filled_reward_functions_emit_and_exceptions_are_survived(
    store: agl.SqlStore,
) -> None:
    resources = {"main_prompt": PromptTemplate(template="hello, {question}", engine="f-string")}
    spans = await spans_of(store, agent("capitals.py:with_a_prompt"), resources)
    # once emitted, once returned
    assert [agl.get_reward_value(span) for span in spans] == [1.0, 1.0]
    spans = await spans_of(store, agent("capitals.py:survives"), {})
    assert [span.name.removeprefix("agentlightning.") for span in spans] == [
        "operation",
        "exception",
        "annotation",
    ]
    assert agl.find_final_reward(spans) == 0.75


@pytest.mark.parametrize(("mode", "temperature"), [("train", 0.5), ("val", 0.0)])
async def test_a_class_agent_finds_main_llm_mode_and_tracer(
    store: agl.SqlStore, endpoint: Endpoint, mode: Mode, temperature: float
) -> None:
    sql_agent = agent("sql_agent.py:LitSQLAgent")(val_temperature=0.0)
    llm = LLM(endpoint=endpoint.url, model="policy", gateway=True)
    rollout = await agl.Runner(store, sql_agent).run_one(
        {"query": "SELECT 1"}, {"llm": llm}, mode=mode
    )
    noted, rewarded = await store.query_spans(rollout.rollout_id)
    assert agl.get_reward_value(rewarded) == 1.0
    assert f"/rollout/{rollout.rollout_id}/attempt/" in str(noted.attributes["url"])
    assert (noted.attributes["temperature"], noted.attributes["callbacks"]) == (temperature, 0)


async def test_training_and_validation_methods_and_hooks(store: agl.SqlStore) -> None:
    two_minded, notes = agent("sql_agent.py:TwoMinded"), agent("sql_agent.py:Notes")
    assert agl.find_final_reward(await spans_of(store, two_minded(), {})) == 1.0
    noted, rewarded = await spans_of(store, two_minded(), {}, "val", hooks=[notes()])
    assert agl.get_reward_value(rewarded) == 0.5
    assert noted.attributes["spans"] == 0


def test_agents_that_were_selected_on_the_agent_are_told_where_that_is_done_now() -> None:
    with pytest.warns(DeprecationWarning, match="give the algorithm agents"):
        agent("sql_agent.py:LitSQLAgent")(trained_agents="write")


@pytest.mark.slow
async def test_a_function_algorithm_meets_the_runners_in_the_store(
    tmp_path: Path, endpoint: Endpoint
) -> None:
    found: list[Any] = []

    @agl.algo
    async def search(
        *,
        store: agl.LightningStore,
        train_dataset: Any,
        val_dataset: Any,
        initial_resources: agl.NamedResources,
    ) -> None:
        for template in ("what?", "say hello, {question}"):
            tried = await store.add_resources({"prompt": PromptTemplate(template=template)})
            rollout = await store.enqueue_rollout(
                input=train_dataset[0], mode="train", resources_id=tried.resources_id
            )
            await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=20)
            found.append(agl.find_final_reward(await store.query_spans(rollout.rollout_id)))
        found.append((sorted(initial_resources), val_dataset))

    initial = {
        "prompt": PromptTemplate(template="hm"),
        "llm": LLM(endpoint=endpoint.url, model="m", api_key="k"),
    }
    trainer = agl.Trainer(
        algorithm=search, n_runners=2, initial_resources=initial, run_dir=tmp_path / "run"
    )
    result = await trainer.fit_async(agent("capitals.py:with_a_prompt"), [PARIS])
    assert found == [0.0, 1.0, (["llm", "prompt"], [])]
    assert result.stopped_because == "done"


async def test_a_function_algorithm_gets_the_trainers_adapter(tmp_path: Path) -> None:
    seen: list[Any] = []

    @agl.algo
    async def look(adapter: Any) -> None:
        seen.append(adapter)

    mine = agl.TraceToMessages()
    for number, given in enumerate((None, {"agent_match": "write"}, mine)):
        trainer = agl.Trainer(algorithm=look, adapter=given, run_dir=tmp_path / str(number))
        await trainer.fit_async(agent("capitals.py:survives"), [PARIS])
    assert [one.agent_match for one in seen[:2]] == [None, "write"]
    assert seen[2] is mine


def test_an_adapter_that_would_change_nothing_is_refused() -> None:
    for adapter in (
        {"agent_macth": "write"},
        "agentlightning.adapter.TraceToMessages",
        agl.TraceToMessages(),
    ):
        for algorithm in (None, agl.GRPO()):
            with pytest.raises(ConfigError, match="adapter"):
                agl.Trainer(model="m", algorithm=algorithm, adapter=adapter)  # type: ignore[arg-type]
    apo = agl.APO[Any](AsyncOpenAI(api_key="k"))  # which needed it in 0.3
    assert agl.Trainer(algorithm=apo, adapter=agl.TraceToMessages()).algorithm is apo


def test_a_function_algorithm_that_cannot_be_run_is_refused() -> None:
    def search(store: Any) -> None: ...

    async def proxied(store: Any, llm_proxy: Any) -> None: ...

    with pytest.raises(ConfigError, match="is not `async def`"):
        agl.algo(search)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'llm_proxy', which nothing fills"):
        agl.algo(proxied)


@pytest.mark.parametrize("name", NAMES_OF_0_3)
def test_every_name_of_0_3_is_there_or_says_what_to_use(name: str) -> None:
    found = getattr(agl, name)
    if isinstance(found, Refused):
        with pytest.raises(
            ConfigError, match=f"agentlightning.{name} of Agent Lightning 0.3 does not exist here: "
        ):
            found()
    assert f"`{name}`" in (ROOT / "docs" / "reference" / "compatibility.md").read_text(
        encoding="utf-8"
    )


def test_the_page_that_a_message_names_is_a_file() -> None:
    with pytest.raises(
        ConfigError, match=re.escape(f"{ROOT / 'docs' / 'reference' / 'compatibility.md'} says")
    ):
        agl.TraceState()


def test_links_are_written_as_in_0_3() -> None:
    written = agl.make_link_attributes({"gen_ai.response.id": "r1"})
    assert written == {
        "agentlightning.link.0.key_match": "gen_ai.response.id",
        "agentlightning.link.0.value_match": "r1",
    }
    with pytest.raises(InvalidError, match="give a str"):
        agl.make_link_attributes({"step": 3})


def test_modules_of_0_3_are_imported_and_refuse_where_a_name_is_used() -> None:
    module = importlib.import_module("tests.v03.agents.imports")
    assert not any(isinstance(one, Refused) for one in module.SERVED)
    for use in (*module.REFUSED, module.Proxy, module.attributes, module.from_the_environment):
        with pytest.raises(ConfigError, match=r"of Agent Lightning 0\.3 does not exist here"):
            use()
    # the module of that name is called like the decorator that it hides
    assert agl.reward(lambda: 1.0) is not None


async def test_a_trainer_of_0_3_runs_a_class_by_name_and_answers_to_any_model(
    tmp_path: Path, endpoint: Endpoint
) -> None:
    llm = LLM(endpoint=endpoint.url, model="m", api_key="k")
    for name, told in (("asks_by_a_name_of_its_own", 5.0), ("ByResources", 0.5)):
        trainer = agl.Trainer(
            n_workers=1, initial_resources={"main_llm": llm}, run_dir=tmp_path / name
        )
        (task,) = await trainer.dev_async(f"{FOLDER}/imports.py:{name}", train_dataset=[PARIS])
        assert (task.rollout.status, task.reward) == ("succeeded", told)
    assert [body["model"] for body in endpoint.bodies] == ["m", "m"]
    with pytest.raises(ConfigError, match=r"imports.py:Parametrised cannot be made: .*turns"):
        await trainer.dev_async(f"{FOLDER}/imports.py:Parametrised", [PARIS])


@pytest.mark.slow
async def test_an_agent_of_1_0_finds_task_model_and_reward_in_its_environment(
    tmp_path: Path,
) -> None:
    agent_of_1_0 = agl.command(
        f"{sys.executable} of_1_0.py", env={"QUESTION": "{task[input]}"}, cwd=str(FOLDER)
    )
    tokenizer = make_tokenizer([PARIS["input"]] * 3, 300)
    policy = Policy(make_model(tokenizer, seed=0), tokenizer)
    trainer = agl.Trainer(model=policy, run_dir=tmp_path / "run", max_sequence_length=256)
    (task,) = await trainer.dev_async(agent_of_1_0, [PARIS])
    assert (task.rollout.status, task.reward) == ("succeeded", 1.0)
    assert len(task.traced.transitions) == 2


def test_loggers_are_configured_as_asked() -> None:
    assert agl.configure_logger(logging.DEBUG, name="of_an_agent") is logging.getLogger(
        "of_an_agent"
    )
    agl.setup_logging("WARNING", submodule_levels={"agentlightning.runner": "ERROR"})
    levels = [
        logging.getLogger(name).level
        for name in ("of_an_agent", "agentlightning", "agentlightning.runner")
    ]
    assert levels == [logging.DEBUG, logging.WARNING, logging.ERROR]
    agl.setup_logging("NOTSET", submodule_levels={"agentlightning.runner": "NOTSET"})
