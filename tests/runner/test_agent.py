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


@pytest.mark.anyio
async def test_parameters_are_filled_in_by_name_in_any_order_and_the_function_stays_itself() -> (
    None
):
    @agl.rollout
    def agent(
        task: str,
        rollout: Any,
        prompt_template: Any = 1,
        resources: Any = 2,
        llm: Any = 3,
        more: int = 7,
    ) -> Any:
        """Answer."""
        return task, rollout, prompt_template, resources, llm, more

    filled = ("task", ROLLOUT, RESOURCES["prompt_template"], RESOURCES, RESOURCES["policy"], 7)
    assert agent.rollout("task", RESOURCES, ROLLOUT) == filled
    assert agent("mine", None) == ("mine", None, 1, 2, 3, 7)
    assert (agent.__name__, agent.__doc__) == ("agent", "Answer.") and isinstance(
        agent, agl.LitAgent
    )

    async def solve(task: str, llm: LLM, *, factor: float) -> float:
        return factor * len(task)

    partial = agl.rollout(functools.partial(solve, factor=2.0))
    entry_point = partial.entry_point("train")
    assert entry_point == partial.rollout_async
    assert await entry_point("ab", RESOURCES, ROLLOUT) == 4.0
    assert await partial("abc", RESOURCES["policy"]) == 6.0  # type: ignore[arg-type]


def test_signatures_that_cannot_be_called_are_refused_with_what_is_expected() -> None:
    def misspelt(task: str, lmm: LLM) -> float:
        return 0.0

    def method(self: Any, task: str) -> float:
        return 0.0

    def generator(task: str) -> Any:
        yield 1.0

    wrong: list[tuple[Any, str]] = [
        (lambda: 0.0, "first parameter"),
        (lambda llm, task: 0.0, "first parameter"),
        (misspelt, "did you mean 'llm'"),
        (method, "subclass LitAgent"),
        (generator, "generator"),
        (5, "cannot be an agent|first parameter"),
    ]
    for function, message in wrong:
        with pytest.raises(ConfigError, match=message):
            agl.rollout(function)
    assert isinstance(agl.llm_rollout(lambda task, llm: 0.0), FunctionAgent)
    with pytest.raises(ConfigError, match="no parameter 'prompt_template'"):
        agl.prompt_rollout(lambda task, llm: 0.0)
    with pytest.raises(ConfigError, match="expected a LitAgent"):
        as_agent(5)  # type: ignore[arg-type]
    agent = as_agent(lambda task: 1.0)
    assert as_agent(agent) is agent


def test_a_resource_is_found_by_name_or_because_it_is_the_only_one_of_its_kind() -> None:
    agent = agl.rollout(lambda task, prompt_template: prompt_template)
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
