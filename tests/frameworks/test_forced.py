"""Frameworks that force a call or a form: they get it where nothing is trained; in training their calls are free."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from agentlightning import semconv
from agentlightning.learner.policy import Policy
from agentlightning.types import Mode, Span
from tests.frameworks.policy import make_policy
from tests.frameworks.world import bin_of
from tests.gateway.world import world

pytestmark = [pytest.mark.slow, pytest.mark.anyio]
PROGRAM = Path(__file__).parent / "forced_agents.py"
WISHES = {
    "smolagents": "tool_choice",
    "pydantic_ai": "tool_choice",
    "pydantic_ai_native": "response_format",
    "dspy": "response_format",
    "openai_parse": "response_format",
    "openai_responses": "response_format",
}


@pytest.fixture(scope="module")
def policy() -> Policy:
    return make_policy()


async def ran(policy: Policy, directory: Path, name: str, mode: Mode) -> tuple[str, list[Span]]:
    """What the program printed, and the spans of its calls."""
    async with world(directory, policy=policy, length=4096) as there:
        attempted = await there.attempt(mode)
        client = there.client(attempted)
        process = await asyncio.create_subprocess_exec(
            bin_of("frameworks") / "python", PROGRAM, name,
            env={"PATH": os.environ["PATH"], "HOME": str(directory), "OPENAI_BASE_URL": str(client.base_url),
                 "OPENAI_API_KEY": client.api_key, "NO_PROXY": "127.0.0.1"},
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        said, _ = await process.communicate()
        return said.decode(), await there.spans(attempted)


@pytest.mark.parametrize("name", WISHES)
async def test_what_is_forced_comes_where_nothing_is_trained(policy: Policy, tmp_path: Path, name: str) -> None:
    said, spans = await ran(policy, tmp_path, name, "test")
    assert said or name == "dspy"  # which asks for some JSON object, and then misses a key in it
    assert spans[0].attributes[semconv.CALL_FLAG] == "constrained by a grammar"
    assert all(span.status.status_code != "ERROR" for span in spans)


@pytest.mark.parametrize("name", WISHES)
async def test_in_training_it_is_free_noted_and_trained(policy: Policy, tmp_path: Path, name: str) -> None:
    _, spans = await ran(policy, tmp_path, name, "train")
    assert WISHES[name] in spans[0].attributes[semconv.CALL_DROPPED]
    assert semconv.CALL_FLAG not in spans[0].attributes
    assert all(span.status.status_code != "ERROR" for span in spans)
