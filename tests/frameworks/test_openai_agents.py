"""OpenAI Agents SDK: a program that OpenTelemetry's own launcher instruments, over both of OpenAI's protocols."""

from __future__ import annotations

import pytest

from tests.frameworks.conftest import Play
from tests.frameworks.policy import FINAL, tool_call
from tests.frameworks.world import Outcome, assert_agents_chosen, assert_exact, assert_tools_told

pytestmark = pytest.mark.slow


LAUNCHER = "env OPENAI_AGENTS_DISABLE_TRACING=0 opentelemetry-instrument"


@pytest.fixture(scope="module", params=["responses", "chat"])
def outcome(played: Play, request: pytest.FixtureRequest) -> Outcome:
    return played("openai_agents", "--command", f"{LAUNCHER} python agent.py {request.param}")


def test_every_call_is_recorded_exactly(outcome: Outcome) -> None:
    assert_exact(outcome)
    assert outcome.answers()[2:] == [tool_call("transfer_to_rewriter", "{}"), FINAL]
    assert outcome.streamed() == [True, True, True, True]


def test_tools_are_known_to_have_worked_or_failed(outcome: Outcome) -> None:
    assert_tools_told(outcome)


def test_each_agent_can_be_trained_alone(outcome: Outcome) -> None:
    assert_agents_chosen(outcome, ["writer", "writer", "writer", "rewriter"])
