"""The programs of examples/frameworks, which know nothing of us, as their run files have them
run."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentlightning.cli.run_file import load_config
from agentlightning.config import CommandConfig, make_algorithm
from agentlightning.learner.policy import Policy
from tests.frameworks.policy import DRAFT, FINAL, make_policy, tool_call
from tests.frameworks.world import (
    EXAMPLES,
    Outcome,
    assert_agents_chosen,
    assert_exact,
    assert_tools_told,
    bin_of,
    play,
)
from tests.node import NODE, installed

pytestmark = pytest.mark.slow

LAST_STREAMED = (False, False, False, True)
OVER_CHAT = (
    'from agents import set_default_openai_api\n\nset_default_openai_api("chat_completions")\n'
)


@dataclass(frozen=True)
class Case:
    """`spans`: whether tools have spans, or only what the model is told tells of them; `before` is
    put before the program."""

    example: str
    streamed: Sequence[bool] = LAST_STREAMED
    spans: bool = True
    draft: str = DRAFT
    environment: str = "frameworks"
    before: str = ""


HANDOFF = tool_call("transfer_to_rewriter", "{}")
CASES = {
    "agent_framework": Case("agent_framework", (True,) * 4),
    "anthropic": Case("anthropic"),
    "autogen": Case("autogen"),
    "crewai": Case("crewai", environment="crewai"),
    "langchain": Case("langchain"),
    "langgraph": Case("langgraph", (True,) * 4),
    "node": Case("node", spans=False),
    "openai": Case("openai", spans=False),
    "openai_agents": Case("openai_agents", (True,) * 4, draft=HANDOFF),
    "openai_agents over chat": Case("openai_agents", (True,) * 4, draft=HANDOFF, before=OVER_CHAT),
}


@pytest.fixture(scope="session")
def policy() -> Policy:
    return make_policy()


@pytest.fixture(scope="module", params=CASES)
def played(
    request: pytest.FixtureRequest, policy: Policy, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Case, Outcome]:
    case, folder = CASES[request.param], tmp_path_factory.mktemp("example")
    shutil.copytree(EXAMPLES / case.example, folder, dirs_exist_ok=True)
    if case.before:
        program = folder / "agent.py"
        program.write_text(case.before + program.read_text())
    with pytest.MonkeyPatch.context() as variables:
        if case.example == "node":
            (folder / "node_modules").symlink_to(
                installed(folder / "package.json") / "node_modules"
            )
            variables.setenv("PATH", str(NODE.parent), prepend=":")
        # its own, which would wait for a server out there
        variables.setenv("CREWAI_DISABLE_TELEMETRY", "true")
        variables.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("crewai_data")))
        data = tmp_path_factory.mktemp("store")
        return case, play(
            policy, data, folder, bin_of(case.environment), *as_run_file_says(case.example)
        )


def as_run_file_says(example: str) -> list[str]:
    """The arguments by which `agl runner` runs what `agl train run.yaml` trains."""
    config = load_config(EXAMPLES / example / "run.yaml")
    make_algorithm(config.algorithm)
    agent = ["run.yaml" if isinstance(config.agent, CommandConfig) else "rollout.py:rollout"]
    return agent if config.instrument is None else [*agent, "--instrument", config.instrument]


def test_every_call_is_recorded_exactly(played: tuple[Case, Outcome]) -> None:
    case, outcome = played
    assert_exact(outcome)
    assert outcome.answers()[2:] == [case.draft, FINAL]
    assert outcome.streamed() == list(case.streamed)


def test_tools_are_known_to_have_worked_or_failed(played: tuple[Case, Outcome]) -> None:
    case, outcome = played
    assert_tools_told(outcome, by_spans=case.spans)


def test_each_agent_can_be_trained_alone(played: tuple[Case, Outcome]) -> None:
    assert_agents_chosen(played[1], ["writer", "writer", "writer", "rewriter"])


@pytest.mark.parametrize(
    "folder",
    sorted(path.parent for path in EXAMPLES.glob("*/run.yaml")),
    ids=lambda path: path.name,
)
def test_a_program_knows_nothing_of_us(folder: Path) -> None:
    (program,) = folder.glob("agent.*")
    assert "agentlightning" not in program.read_text()
