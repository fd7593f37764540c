"""LangGraph: two nodes of one graph, in a process that the runner keeps for the module and its client."""

from __future__ import annotations

import pytest

from tests.frameworks.conftest import Play
from tests.frameworks.policy import DRAFT, FINAL
from tests.frameworks.world import Outcome, assert_agents_chosen, assert_exact, assert_tools_told

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcome(played: Play) -> Outcome:
    return played("langgraph", "agent.py:write", "--isolation", "process")


def test_every_call_is_recorded_exactly(outcome: Outcome) -> None:
    assert_exact(outcome)
    assert outcome.answers()[2:] == [DRAFT, FINAL]
    assert outcome.streamed() == [True, True, True, True]


def test_tools_are_known_to_have_worked_or_failed(outcome: Outcome) -> None:
    assert_tools_told(outcome)


def test_each_agent_can_be_trained_alone(outcome: Outcome) -> None:
    assert_agents_chosen(outcome, ["writer", "writer", "writer", "rewriter"])
