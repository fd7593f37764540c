"""Which agent made a call, and how agents are chosen to be trained."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning import semconv
from agentlightning.data.agents import AgentName, agent_of, agent_pattern, chosen
from agentlightning.data.call_filter import CallFilter
from agentlightning.data.transitions import trace_rollout
from agentlightning.errors import ConfigError
from agentlightning.tracing.steps import read_steps
from agentlightning.types import Rollout, Span
from tests.tracing.recorded import WITH_AGENTS, recorded

ROLLOUT = Rollout(rollout_id="r", input="task", start_time=0.0, status="succeeded")


def call(**attributes: Any) -> Span:
    texts = {semconv.CALL_ENDPOINT: "chat/completions", semconv.GEN_AI_RESPONSE_MODEL: "policy"}
    return Span(
        rollout_id="r",
        attempt_id="a",
        sequence_id=1,
        trace_id="0" * 32,
        span_id="call",
        name="chat policy",
        start_time=1.0,
        end_time=2.0,
        attributes=texts | attributes,
    )


def told(system: Any, role: str = "system") -> Span:
    return call(**{semconv.GEN_AI_INPUT_MESSAGES: msgspec.json.encode([{"role": role, "content": system}]).decode()})


def name_of(span: Span, *others: Span) -> AgentName:
    (step,) = [step for step in read_steps([span, *others]) if step.kind == "call"]
    return agent_of(step)


@pytest.mark.parametrize("framework", WITH_AGENTS)
def test_the_names_that_a_framework_gives_its_agents_are_on_the_transitions(framework: str) -> None:
    names = [transition.agent for transition in trace_rollout(ROLLOUT, recorded(framework)).transitions]
    assert names == ["writer"] * (len(names) - 1) + ["rewriter"]


@pytest.mark.parametrize(
    ("system", "name"),
    [
        ("You are the writer. Use your tools.", "writer"),
        ("You are a helpful assistant", "helpful assistant"),
        ("you are an editor, and strict", "editor"),
        ("\n  Critic \nfinds flaws", "Critic"),
        ([{"type": "text", "text": "You are writer: go"}], "writer"),
        ("Your input fields are:\n1. `a` (str):\n" + "-" * 999 + "your objective is: \n    You are the poet.", "poet"),
        ("", None),
        ("x" * 100, "x" * 60),
    ],
)
def test_without_a_framework_the_first_line_of_the_system_prompt_names_the_agent(system: Any, name: str | None) -> None:
    assert name_of(told(system)).name == name


@pytest.mark.parametrize(
    "span",
    [
        told("You are the writer.", role="developer"),
        call(**{semconv.CALL_REQUEST: '{"system": "You are the writer."}'}),
        call(**{semconv.CALL_REQUEST: '{"system": [{"type": "text", "text": "You are the writer."}]}'}),
        call(
            **{semconv.CALL_REQUEST: '{"instructions": "You are the writer."}', semconv.GEN_AI_INPUT_MESSAGES: '"hi"'}
        ),
    ],
)
def test_every_protocol_has_a_place_for_the_system_prompt(span: Span) -> None:
    assert name_of(span).name == "writer"


def test_a_name_is_taken_from_what_is_nearest_to_the_program() -> None:
    prompt = {semconv.GEN_AI_INPUT_MESSAGES: '[{"role": "system", "content": "You are the poet."}]'}
    assert name_of(call(**prompt)).name == "poet"
    alias = prompt | {semconv.GEN_AI_REQUEST_MODEL: "poet-model"}
    assert str(name_of(call(**alias))) == "poet = poet-model"
    for unsaid in ("You are a helpful assistant.", "Be brief."):
        said = alias | {semconv.GEN_AI_INPUT_MESSAGES: f'[{{"role": "system", "content": "{unsaid}"}}]'}
        assert name_of(call(**said)).name == "poet-model"
    said = alias | {semconv.GEN_AI_AGENT_NAME: "said"}
    assert name_of(call(**said)).name == "said"
    around = msgspec.structs.replace(
        call(), span_id="agent", start_time=0.0, end_time=3.0,
        attributes={"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "around"},
    )  # fmt: skip
    assert name_of(msgspec.structs.replace(call(**said), parent_id="agent"), around).name == "around"


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("writer", True),
        ("Writer|rewriter", True),
        ("rewriter", False),
        ("writ", False),
        ("wr.*", True),
        ("technical", True),
    ],
)
def test_agents_are_chosen_by_name_or_by_a_word_of_their_role(pattern: str, matches: bool) -> None:
    assert chosen(agent_pattern(pattern), name_of(told("You are a technical writer. Not a rewriter."))) is matches


def test_an_agent_that_asks_for_a_model_by_a_name_of_its_own_is_chosen_by_that_or_by_its_role() -> None:
    """All agents of a program may ask for one model, which says nothing."""
    prompt = '[{"role": "system", "content": "You are the writer."}]'
    agent = name_of(call(**{semconv.GEN_AI_INPUT_MESSAGES: prompt, semconv.GEN_AI_REQUEST_MODEL: "gpt-4o"}))
    assert [chosen(agent_pattern(pattern), agent) for pattern in ("writer", "gpt-4o", "rewriter")] == [
        True,
        True,
        False,
    ]


def test_an_agent_that_has_a_name_is_not_chosen_by_its_prompt() -> None:
    named = name_of(call(**{semconv.GEN_AI_AGENT_NAME: "rewriter", semconv.GEN_AI_REQUEST_MODEL: "small"}))
    assert [chosen(agent_pattern(pattern), named) for pattern in ("rewriter", "small", "writer")] == [True, True, False]


def test_what_is_no_pattern_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match=re.escape("agents is 'writer|(', which is not a pattern")):
        agent_pattern("writer|(")


def test_only_the_chosen_agents_train_and_the_others_are_counted_and_named() -> None:
    traced = trace_rollout(ROLLOUT, recorded("langgraph"), calls=CallFilter(agents="writer"))
    assert [transition.agent for transition in traced.transitions] == ["writer"] * 3
    assert traced.excluded == {"other agent": 1}
    assert traced.other_agents == {"rewriter"}


@given(st.text())
def test_any_system_prompt_gives_a_name_that_chooses_it(system: str) -> None:
    agent = name_of(told(system))
    if agent.name is not None:
        assert 0 < len(agent.name) <= 60
        assert chosen(re.compile(re.escape(agent.name)), agent)
    else:
        assert agent.words == ()
