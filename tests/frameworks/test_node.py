"""OpenAI's SDK for Node, in a program that knows nothing of us: the models it asks for tell its agents apart, and what
it tells the model of its tools tells how they went."""

from __future__ import annotations

import shutil

import pytest

from tests.frameworks.conftest import Play
from tests.frameworks.policy import DRAFT, FINAL
from tests.frameworks.world import EXAMPLES, Outcome, assert_agents_chosen, assert_exact, assert_tools_told
from tests.node import NODE, installed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcome(played: Play, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    example = EXAMPLES / "node"
    folder = tmp_path_factory.mktemp("node")
    shutil.copy(example / "agent.mjs", folder)
    (folder / "node_modules").symlink_to(installed(example / "package.json") / "node_modules")
    return played("node", "--command", f"{NODE} {folder / 'agent.mjs'}")


def test_every_call_is_recorded_exactly(outcome: Outcome) -> None:
    assert_exact(outcome)
    assert outcome.answers()[2:] == [DRAFT, FINAL]
    assert outcome.streamed() == [False, False, False, True]


def test_tools_are_known_to_have_worked_or_failed(outcome: Outcome) -> None:
    assert_tools_told(outcome, by_spans=False)


def test_each_agent_can_be_trained_alone(outcome: Outcome) -> None:
    assert_agents_chosen(outcome, ["writer", "writer", "writer", "rewriter"])
