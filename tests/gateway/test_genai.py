"""Google's SDK, as it is."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from agentlightning import semconv
from agentlightning.types import AttemptedRollout
from tests.frameworks.world import bin_of
from tests.gateway.talker import FOUND, PLAIN
from tests.gateway.world import World

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

HERE = Path(__file__).parent


async def run(there: World, attempted: AttemptedRollout, *command: str | Path, **more: Any) -> tuple[int | None, str]:
    """How a program ended that finds the attempt by its environment, and what it printed."""
    variables = {
        "GOOGLE_GEMINI_BASE_URL": f"{there.url}/rollout/{attempted.rollout_id}/attempt/{attempted.attempt.attempt_id}",
        "GEMINI_API_KEY": attempted.api_key or "EMPTY",
    }
    process = await asyncio.create_subprocess_exec(
        *command,
        env={"PATH": os.environ["PATH"], **variables, **more.pop("env", {})},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        **more,
    )
    out, _ = await asyncio.wait_for(process.communicate(), 120)
    return process.returncode, out.decode()


async def test_googles_sdk_understands_the_answers(gateway_world: World) -> None:
    attempted = await gateway_world.attempt()
    code, out = await run(gateway_world, attempted, bin_of("frameworks") / "python", HERE / "genai_client.py")
    assert code == 0, out
    told = json.loads(out.splitlines()[-1])
    assert (told["asked_for"], told["found"]) == (["sun"], FOUND)
    assert (told["streamed"], told["pieces"] > 2) == (PLAIN["hello"], True)
    assert told["tokens"] > told["counted"] > 0 and told["refused"] == "400 INVALID_ARGUMENT"
    spans = [span for span in await gateway_world.spans(attempted) if span.tokens]
    assert [semconv.CALL_FLAG in span.attributes for span in spans] == [False] * 3
