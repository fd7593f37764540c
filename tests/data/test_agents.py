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
from agentlightning.tracing.steps import read_steps
from agentlightning.types import Rollout, Span
from tests.data.recordings import span

ROLLOUT = Rollout(rollout_id="r", input="task", start_time=0.0, status="succeeded")
MODEL, AGENT = semconv.GEN_AI_REQUEST_MODEL, semconv.GEN_AI_AGENT_NAME


def call(parent: str | None = None, **attributes: Any) -> Span:
    return span(
        "call", 1.0, 2.0, parent, **{semconv.CALL_ENDPOINT: "chat/completions", **attributes}
    )


def prompted(
    system: Any, role: str = "system", parent: str | None = None, **attributes: Any
) -> Span:
    messages = msgspec.json.encode([{"role": role, "content": system}]).decode()
    return call(parent, **{semconv.GEN_AI_INPUT_MESSAGES: messages, **attributes})


def name_of(made: Span, *others: Span) -> AgentName:
    (step,) = [step for step in read_steps([made, *others]) if step.kind == "call"]
    return agent_of(step)


IN_REQUEST = '{"system": [{"type": "text", "text": "You are the writer."}]}'
AROUND = span(
    "agent", 0.0, 3.0, **{"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "around"}
)


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (prompted("You are the writer. Use your tools."), "writer"),
        (prompted("You are a helpful assistant"), "helpful assistant"),
        (prompted("you are an editor, and strict"), "editor"),
        (prompted("\n  Critic \nfinds flaws"), "Critic"),
        (prompted([{"type": "text", "text": "You are writer: go"}]), "writer"),
        (
            prompted(
                "Your input fields are:\n"
                "1. `a`:\n" + "-" * 999 + "your objective is: \n"
                " You are the poet."
            ),
            "poet",
        ),
        (prompted(""), None),
        (prompted("x" * 100), "x" * 60),
        (prompted("You are the writer.", role="developer"), "writer"),
        (call(**{semconv.CALL_REQUEST: '{"system": "You are the writer."}'}), "writer"),
        (call(**{semconv.CALL_REQUEST: IN_REQUEST}), "writer"),
        (call(**{semconv.CALL_REQUEST: '{"instructions": "You are the writer."}'}), "writer"),
        # What is nearest to the program goes first.
        (prompted("You are a helpful assistant.", **{MODEL: "poet-model"}), "poet-model"),
        (prompted("Be brief.", **{MODEL: "poet-model"}), "poet-model"),
        (prompted("You are the poet.", **{MODEL: "poet-model", AGENT: "own"}), "own"),
        (prompted("You are the poet.", parent="agent", **{AGENT: "own"}), "around"),
    ],
)
def test_the_name_of_an_agent(made: Span, name: str | None) -> None:
    assert name_of(made, *([AROUND] if made.parent_id else [])).name == name


NAMES = {
    "role": prompted("You are a technical writer. Not a rewriter."),
    "role and model": prompted("You are the writer.", **{MODEL: "gpt-4o"}),
    "name and model": call(**{AGENT: "rewriter", MODEL: "small"}),
}


@pytest.mark.parametrize(
    ("named", "pattern", "matches"),
    [
        ("role", "writer", True),
        ("role", "Writer|rewriter", True),
        ("role", "rewriter", False),
        ("role", "writ", False),
        ("role", "wr.*", True),
        ("role", "technical", True),
        ("role and model", "writer", True),
        ("role and model", "gpt-4o", True),
        ("role and model", "rewriter", False),
        ("name and model", "rewriter", True),
        ("name and model", "small", True),
        ("name and model", "writer", False),
    ],
)
def test_agents_are_chosen_by_name_model_or_a_word_of_their_role(
    named: str, pattern: str, matches: bool
) -> None:
    assert chosen(agent_pattern(pattern), name_of(NAMES[named])) is matches


@given(st.text())
def test_any_system_prompt_gives_a_name_that_chooses_it(system: str) -> None:
    agent = name_of(prompted(system))
    if agent.name is not None:
        assert 0 < len(agent.name) <= 60
        assert chosen(re.compile(re.escape(agent.name)), agent)
    else:
        assert agent.words == ()
