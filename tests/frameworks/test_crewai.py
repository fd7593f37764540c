"""CrewAI: a crew of two, in an environment of its own and in the process of a runner that instruments it."""

from __future__ import annotations

import pytest

from tests.frameworks.conftest import Play
from tests.frameworks.policy import DRAFT, FINAL
from tests.frameworks.world import Outcome, assert_agents_chosen, assert_exact, assert_tools_told

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcome(played: Play, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv("CREWAI_DISABLE_TELEMETRY", "true")  # its own, which would wait for a server out there
        variables.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("crewai_data")))
        return played("crewai", "agent.py:write", "--instrument", "crewai", environment="crewai")


def test_every_call_is_recorded_exactly(outcome: Outcome) -> None:
    assert_exact(outcome)
    assert outcome.answers()[2:] == [DRAFT, FINAL]
    assert outcome.streamed() == [False, False, False, True]


def test_tools_are_known_to_have_worked_or_failed(outcome: Outcome) -> None:
    assert_tools_told(outcome)


def test_each_agent_can_be_trained_alone(outcome: Outcome) -> None:
    assert_agents_chosen(outcome, ["writer", "writer", "writer", "rewriter"])
