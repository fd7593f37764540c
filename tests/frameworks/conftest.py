from __future__ import annotations

from collections.abc import Callable

import pytest

from agentlightning.learner.policy import Policy
from tests.frameworks.policy import make_policy
from tests.frameworks.world import Outcome, bin_of, play

Play = Callable[..., Outcome]


@pytest.fixture(scope="session")
def policy() -> Policy:
    return make_policy()


@pytest.fixture(scope="session")
def played(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Play:
    """`played("autogen", "agent.py:agent", "--instrument", "autogen")`: the outcome of the example of that name. With
    `environment="crewai"` it runs in `.venv-crewai`."""

    def run(example: str, *arguments: str, environment: str = "frameworks") -> Outcome:
        return play(policy, tmp_path_factory.mktemp(example), example, bin_of(environment), *arguments)

    return run
