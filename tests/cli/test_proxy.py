"""`agl server --backend`, between an agent and a server: it records, and keeps each side's key from
the other."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from pathlib import Path

import openai
import pytest
from openai import AsyncOpenAI
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from agentlightning import semconv
from agentlightning.store.sql import SqlStore
from agentlightning.types import UNATTRIBUTED
from tests.gateway.talker import user
from tests.gateway.upstream import DONE, GOOD, Upstream, chunk
from tests.gateway.world import serving

pytestmark = pytest.mark.anyio

BACKEND_KEY, KEY = "sk-backend-0123456789abcdefghij", "the proxy's own key"
HOSTED = [chunk({"index": 0, "delta": {"content": "Hi!"}, "finish_reason": "stop"}), DONE]


async def start(directory: Path, *arguments: str, **environment: str) -> asyncio.subprocess.Process:
    variables = {name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")}
    program = (
        sys.executable,
        "-m",
        "agentlightning.cli.main",
        "server",
        "--store",
        str(directory / "store.sqlite"),
    )
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *program, *arguments, env=variables | environment, stdout=pipe, stderr=pipe
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vllm", "openai"])
async def test_calls_are_recorded_and_each_sides_key_stays_on_its_side(
    tmp_path: Path, kind: str
) -> None:
    server = Upstream(GOOD if kind == "vllm" else HOSTED)
    version = Route(
        "/version", lambda _: JSONResponse({"version": "0.11.0"}, 200 if kind == "vllm" else 404)
    )
    keys = {"AGL_KEY": KEY, "AGL_BACKEND_KEY" if kind == "vllm" else "OPENAI_API_KEY": BACKEND_KEY}
    async with serving(
        Starlette(routes=[Route("/v1/chat/completions", server.answer, methods=["POST"]), version])
    ) as url:
        process = await start(tmp_path, "--port", "0", "--json", "--backend", f"{url}/v1", **keys)
        assert process.stderr is not None
        greeting = (
            await asyncio.wait_for(process.stderr.readuntil(b"your_agent.py\n"), 60)
        ).decode()
        found = re.search(r"OPENAI_BASE_URL=(\S+)/v1", greeting)
        assert found, greeting
        asked = {"model": "m", "messages": user("hello")}
        async with AsyncOpenAI(
            base_url=f"{found[1]}/v1", api_key="another", max_retries=0
        ) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(**asked)
            client.api_key = KEY
            await client.chat.completions.create(**asked)
            server.status, server.error = (
                401,
                {"error": {"message": f"Incorrect API key provided: {BACKEND_KEY}"}},
            )
            with pytest.raises(
                openai.InternalServerError, match="refused the gateway's key"
            ) as caught:
                await client.chat.completions.create(**asked)
        process.send_signal(signal.SIGTERM)
        out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0 and b"Traceback" not in err
    begun, ended = map(json.loads, out.splitlines())
    assert begun == {
        "url": found[1],
        "backend": f"{url}/v1",
        "kind": kind,
        "store": str(tmp_path / "store.sqlite"),
    }
    assert ended == {"calls": 2, "recorded": 2}
    store = await SqlStore.open(tmp_path / "store.sqlite")
    spans = await store.query_spans(UNATTRIBUTED)
    await store.close()
    assert [span.attributes.get(semconv.CALL_TRAINABLE) for span in spans] == [kind == "vllm"] * 2
    assert [headers["authorization"] for headers in server.headers] == [f"Bearer {BACKEND_KEY}"] * 2
    shown = caught.value.response.text + greeting + repr(spans) + (out + err).decode()
    assert (
        KEY not in repr(server.headers) + repr(server.asked)
        and BACKEND_KEY not in shown
        and KEY not in shown
    )
