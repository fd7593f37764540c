"""Frameworks that force a call or a form get it where nothing is trained."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from agentlightning import semconv
from agentlightning.learner.policy import Policy
from tests.frameworks.policy import make_policy
from tests.frameworks.world import bin_of
from tests.gateway.world import world

pytestmark = [pytest.mark.slow, pytest.mark.anyio]
PROGRAM = Path(__file__).parent / "forced_agents.py"
NAMES = ("smolagents", "pydantic_ai", "pydantic_ai_native", "dspy", "openai_responses")


@pytest.fixture(scope="module")
def policy() -> Policy:
    return make_policy()


@pytest.mark.parametrize("name", NAMES)
async def test_what_is_forced_comes_where_nothing_is_trained(
    policy: Policy, tmp_path: Path, name: str
) -> None:
    async with world(tmp_path, policy=policy, length=4096) as there:
        attempted = await there.attempt("test")
        client = there.client(attempted)
        process = await asyncio.create_subprocess_exec(
            bin_of("frameworks") / "python",
            PROGRAM,
            name,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(tmp_path),
                "OPENAI_BASE_URL": str(client.base_url),
                "OPENAI_API_KEY": client.api_key,
                "NO_PROXY": "127.0.0.1",
            },
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await process.communicate()
        spans = await there.spans(attempted)
    assert said or name == "dspy"  # which asks for some JSON object, and then misses a key in it
    assert spans[0].attributes[semconv.CALL_FLAG] == "constrained by a grammar"
    assert all(span.status.status_code != "ERROR" for span in spans)
