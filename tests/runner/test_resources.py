"""What an agent sees of the resources."""

from __future__ import annotations

import msgspec
import pytest

from agentlightning.errors import NotFoundError
from agentlightning.runner.environment import ResourceCache
from agentlightning.store.sql import SqlStore
from agentlightning.types import LLM, NamedResources, PromptTemplate

pytestmark = pytest.mark.anyio

POLICY = LLM(endpoint="http://gateway:8000/v1", model="policy", gateway=True, sampling_parameters={"temperature": 0.5})
JUDGE = LLM(endpoint="https://judge.example/v1", model="judge", api_key="its own")
PROMPT = PromptTemplate(template="{question}")
ANSWERER = LLM(endpoint="http://vllm.example:8000/v1", model="large")  # it needs no key, and gets none
RESOURCES: NamedResources = {"llm": POLICY, "judge": JUDGE, "answerer": ANSWERER, "prompt": PROMPT}


async def test_a_model_of_the_gateway_names_the_attempt_and_a_foreign_one_is_left_alone(store: SqlStore) -> None:
    update = await store.add_resources(RESOURCES)
    rollout = await store.start_rollout("task", resources_id=update.resources_id)
    view = await ResourceCache(store).bound_to(rollout)
    path = f"/rollout/{rollout.rollout_id}/attempt/{rollout.attempt.attempt_id}/v1"
    llm = view["llm"]
    assert isinstance(llm, LLM)
    assert (llm.endpoint, llm.api_key) == (f"http://gateway:8000{path}", rollout.api_key)
    assert (llm.model, llm.sampling_parameters) == (POLICY.model, POLICY.sampling_parameters)
    assert llm.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id) == llm.endpoint
    assert (view["judge"], view["answerer"]) == (JUDGE, ANSWERER)
    assert ANSWERER.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id) == ANSWERER.endpoint
    assert view["prompt"] == PROMPT


async def test_a_rollout_keeps_the_version_it_names_and_others_get_the_latest(store: SqlStore) -> None:
    old = await store.add_resources({"prompt": PromptTemplate(template="old")})
    cache = ResourceCache(store)
    named = await store.start_rollout("task", resources_id=old.resources_id)
    await cache.bound_to(named)
    await store.add_resources({"prompt": PROMPT})
    assert (await cache.bound_to(named))["prompt"] == PromptTemplate(template="old")
    assert (await cache.bound_to(await store.start_rollout("task")))["prompt"] == PROMPT


async def test_no_resources_at_all_are_an_empty_view_and_an_unknown_id_is_an_error(store: SqlStore) -> None:
    rollout = await store.start_rollout("task")
    assert await ResourceCache(store).bound_to(rollout) == {}
    with pytest.raises(NotFoundError, match="nowhere"):
        await ResourceCache(store).bound_to(msgspec.structs.replace(rollout, resources_id="nowhere"))
