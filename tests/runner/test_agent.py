"""The forms an agent may have, and how a wrong one is refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import ConfigError
from agentlightning.runner.agent import FunctionAgent, as_agent
from agentlightning.types import LLM, Attempt, AttemptedRollout, NamedResources, PromptTemplate

ATTEMPT = Attempt(rollout_id="R", attempt_id="A", sequence_id=1, start_time=0.0)
ROLLOUT = AttemptedRollout(rollout_id="R", input="task", start_time=0.0, attempt=ATTEMPT)
RESOURCES: NamedResources = {
    "policy": LLM(endpoint="http://host/v1", model="m"),
    "prompt_template": PromptTemplate(template="{x}"),
    "other": PromptTemplate(template="{y}"),
}


def test_parameters_are_filled_in_by_name_in_any_order() -> None:
    @agl.rollout
    def agent(task: str, rollout: Any, prompt_template: Any, resources: Any, llm: Any, extra: int = 7) -> Any:
        return task, rollout, prompt_template, resources, llm, extra

    given = agent.rollout("task", RESOURCES, ROLLOUT)
    assert given == ("task", ROLLOUT, RESOURCES["prompt_template"], RESOURCES, RESOURCES["policy"], 7)


def test_a_decorated_function_stays_the_plain_function() -> None:
    @agl.rollout
    def agent(question: str, llm: LLM | None = None) -> float:
        """Answer."""
        return float(len(question))

    assert agent("four") == 4.0
    assert (agent.__name__, agent.__doc__) == ("agent", "Answer.")
    assert isinstance(agent, agl.LitAgent)


@pytest.mark.anyio
async def test_async_functions_stay_awaitable_and_partials_are_seen_through() -> None:
    async def solve(task: str, llm: LLM, *, factor: float) -> float:
        return factor * len(task)

    agent = agl.rollout(functools.partial(solve, factor=2.0))
    entry_point = agent.entry_point("train")
    assert entry_point == agent.rollout_async
    assert await entry_point("ab", RESOURCES, ROLLOUT) == 4.0
    assert await agent("abc", RESOURCES["policy"]) == 6.0  # type: ignore[arg-type]


def test_signatures_that_cannot_be_called_are_refused_with_what_is_expected() -> None:
    def no_task() -> float:
        return 0.0

    def task_not_first(llm: LLM, task: str) -> float:
        return 0.0

    def misspelt(task: str, lmm: LLM) -> float:
        return 0.0

    def method(self: Any, task: str) -> float:
        return 0.0

    def generator(task: str) -> Any:
        yield 1.0

    for function, message in [
        (no_task, "first parameter"),
        (task_not_first, "first parameter"),
        (misspelt, "did you mean 'llm'"),
        (method, "subclass LitAgent"),
        (generator, "generator"),
    ]:
        with pytest.raises(ConfigError, match=message):
            agl.rollout(function)
    with pytest.raises(ConfigError, match=r"cannot be an agent|first parameter"):
        agl.rollout(5)  # type: ignore[arg-type]


def test_llm_and_prompt_rollout_want_their_parameter() -> None:
    def with_llm(task: str, llm: LLM) -> float:
        return 0.0

    assert isinstance(agl.llm_rollout(with_llm), FunctionAgent)
    with pytest.raises(ConfigError, match="no parameter 'prompt_template'"):
        agl.prompt_rollout(with_llm)


def test_a_resource_is_found_by_name_or_because_it_is_the_only_one_of_its_kind() -> None:
    @agl.rollout
    def agent(task: str, prompt_template: PromptTemplate) -> Any:
        return prompt_template

    assert agent.rollout("t", RESOURCES, ROLLOUT) is RESOURCES["prompt_template"]
    two: NamedResources = {name: PromptTemplate(template=name) for name in ("a", "b")}
    with pytest.raises(ConfigError, match="there are: a, b"):
        agent.rollout("t", two, ROLLOUT)
    with pytest.raises(ConfigError, match="none"):
        agent.rollout("t", {}, ROLLOUT)


def test_a_class_is_called_by_the_most_special_method_it_defines() -> None:
    class Both(agl.LitAgent[str]):
        def rollout(self, task: str, resources: Any, rollout: Any) -> float:
            return 0.0

        async def validation_rollout_async(self, task: str, resources: Any, rollout: Any) -> float:
            return 1.0

    agent = Both()
    assert agent.entry_point("train") == agent.rollout
    assert agent.entry_point("val") == agent.entry_point("test") == agent.validation_rollout_async


def test_what_is_no_agent_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a LitAgent"):
        as_agent(5)  # type: ignore[arg-type]
    agent = as_agent(lambda task: 1.0)
    assert as_agent(agent) is agent
