"""OpenAI's SDK alone, in a program that nothing instruments: prompts tell the agents, and messages how tools went."""

from __future__ import annotations

import pytest

from tests.frameworks.conftest import Play
from tests.frameworks.policy import DRAFT, FINAL
from tests.frameworks.world import Outcome, assert_agents_chosen, assert_exact, assert_tools_told

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcome(played: Play) -> Outcome:
    return played("openai", "--command", "python agent.py")


def test_every_call_is_recorded_exactly(outcome: Outcome) -> None:
    assert_exact(outcome)
    assert outcome.answers()[2:] == [DRAFT, FINAL]
    assert outcome.streamed() == [False, False, False, True]


def test_what_the_model_is_told_of_tools_says_how_they_went(outcome: Outcome) -> None:
    assert_tools_told(outcome, by_spans=False)


def test_each_agent_can_be_trained_alone(outcome: Outcome) -> None:
    assert_agents_chosen(outcome, ["writer", "writer", "writer", "rewriter"])
