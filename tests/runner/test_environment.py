"""What an attempt's agent gets: resources of its own, and variables by which SDKs of any language
find them."""

from __future__ import annotations

import msgspec
import pytest

from agentlightning.errors import NotFoundError
from agentlightning.runner.environment import ResourceCache, agent_environment
from agentlightning.store.sql import SqlStore
from agentlightning.types import LLM, NamedResources, PromptTemplate

IDS = "R", "A"
POLICY = LLM(
    endpoint="http://gateway:8000/v1",
    model="policy",
    gateway=True,
    sampling_parameters={"temperature": 0.5},
)
JUDGE = LLM(endpoint="https://judge.example/v1", model="judge", api_key="its own")
PROMPT = PromptTemplate(template="{question}")
# it needs no key, and gets none
ANSWERER = LLM(endpoint="http://vllm.example:8000/v1", model="large")
RESOURCES: NamedResources = {"llm": POLICY, "judge": JUDGE, "answerer": ANSWERER, "prompt": PROMPT}


@pytest.mark.anyio
async def test_a_model_of_the_gateway_names_the_attempt_and_a_foreign_one_is_left_alone(
    store: SqlStore,
) -> None:
    update = await store.add_resources(RESOURCES)
    rollout = await store.start_rollout("task", resources_id=update.resources_id)
    view = await ResourceCache(store).bound_to(rollout)
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    llm = view["llm"]
    assert isinstance(llm, LLM)
    assert (
        llm.endpoint
        == llm.get_base_url(*ids)
        == "http://gateway:8000/rollout/{}/attempt/{}/v1".format(*ids)
    )
    bound = llm.api_key, llm.model, llm.sampling_parameters
    assert bound == (rollout.api_key, POLICY.model, POLICY.sampling_parameters)
    assert (view["judge"], view["answerer"], view["prompt"]) == (JUDGE, ANSWERER, PROMPT)
    assert ANSWERER.get_base_url(*ids) == ANSWERER.endpoint


@pytest.mark.anyio
async def test_a_rollout_keeps_the_version_it_names_and_others_get_the_latest(
    store: SqlStore,
) -> None:
    cache = ResourceCache(store)
    none = await store.start_rollout("task")
    assert await cache.bound_to(none) == {}
    with pytest.raises(NotFoundError, match="nowhere"):
        await cache.bound_to(msgspec.structs.replace(none, resources_id="nowhere"))
    old = await store.add_resources({"prompt": PromptTemplate(template="old")})
    named = await store.start_rollout("task", resources_id=old.resources_id)
    await cache.bound_to(named)
    await store.add_resources({"prompt": PROMPT})
    assert (await cache.bound_to(named))["prompt"] == PromptTemplate(template="old")
    assert (await cache.bound_to(await store.start_rollout("task")))["prompt"] == PROMPT


def test_every_url_names_the_attempt() -> None:
    llm = LLM(endpoint="http://host:1/rollout/R/attempt/A/v1", model="policy", api_key="agl-key")
    variables = agent_environment(llm, *IDS, "http://host:1", "agl-key")
    assert (
        variables["OPENAI_BASE_URL"]
        == variables["OPENAI_API_BASE"]
        == "http://host:1/rollout/R/attempt/A/v1"
    )
    # its SDK adds /v1
    assert variables["ANTHROPIC_BASE_URL"] == "http://host:1/rollout/R/attempt/A"
    assert variables["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://host:1/rollout/R/attempt/A"
    assert variables["GOOGLE_GEMINI_BASE_URL"] == variables["ANTHROPIC_BASE_URL"]  # /v1beta
    assert (
        variables["GEMINI_API_KEY"]
        == variables["OPENAI_API_KEY"]
        == variables["ANTHROPIC_API_KEY"]
        == "agl-key"
    )
    assert variables["OTEL_EXPORTER_OTLP_HEADERS"] == "authorization=Bearer%20agl-key"
    assert variables["AGL_MODEL"] == "policy"


def test_a_program_that_is_given_no_model_keeps_its_own_choice() -> None:
    llm = LLM(endpoint="http://host:1/v1", model="*", api_key="agl-key")
    variables = agent_environment(llm, *IDS, "http://host:1", "agl-key")
    assert variables["OPENAI_BASE_URL"] == "http://host:1/v1"
    assert not [name for name in variables if name.endswith("_MODEL")]


def test_a_model_elsewhere_gets_no_key_of_ours_and_what_is_not_there_has_no_variable() -> None:
    for key, sent in (("theirs", "theirs"), (None, "none")):
        llm = LLM(endpoint="https://hosted/v1", model="large", api_key=key)
        variables = agent_environment(llm, *IDS, "http://host:1", "agl-key")
        assert (variables["OPENAI_BASE_URL"], variables["OPENAI_API_KEY"]) == (
            "https://hosted/v1",
            sent,
        )
        assert "agl-key" in variables["OTEL_EXPORTER_OTLP_HEADERS"]
    assert agent_environment(None, *IDS, None, "agl-key") == {
        "AGL_ROLLOUT_ID": "R",
        "AGL_ATTEMPT_ID": "A",
    }
    assert "AGL_REWARD_URL" not in agent_environment(None, *IDS, "http://host:1", "agl-key")
    trusted = agent_environment(None, *IDS, "http://host:1/", "agl-key", reward_key="agl-reward")
    assert trusted["AGL_REWARD_URL"] == "http://host:1/rewards/agl-reward"
