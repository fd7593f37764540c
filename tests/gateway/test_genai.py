"""Google's SDK, as it is."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from agentlightning import semconv
from tests.frameworks.world import bin_of
from tests.gateway.talker import FOUND, PLAIN
from tests.gateway.world import World

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def test_googles_sdk_understands_the_answers(gateway_world: World) -> None:
    attempted = await gateway_world.attempt()
    url = (
        f"{gateway_world.url}/rollout/{attempted.rollout_id}/attempt/{attempted.attempt.attempt_id}"
    )
    process = await asyncio.create_subprocess_exec(
        bin_of("frameworks") / "python",
        Path(__file__).parent / "genai_client.py",
        env={
            "PATH": os.environ["PATH"],
            "GOOGLE_GEMINI_BASE_URL": url,
            "GEMINI_API_KEY": attempted.api_key or "EMPTY",
        },
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await asyncio.wait_for(process.communicate(), 120)
    told = json.loads(out.splitlines()[-1])
    assert (told["asked_for"], told["found"]) == (["sun"], FOUND)
    assert (told["streamed"], told["pieces"] > 2) == (PLAIN["hello"], True)
    assert told["tokens"] > told["counted"] > 0 and told["refused"] == "400 INVALID_ARGUMENT"
    spans = [span for span in await gateway_world.spans(attempted) if span.tokens]
    assert [semconv.CALL_FLAG in span.attributes for span in spans] == [False] * 3
