"""`agl server --backend`, between an agent and a server: it records, and keeps each side's key from the other."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentlightning import semconv
from agentlightning.store.sql import SqlStore
from agentlightning.types import UNATTRIBUTED, Span
from tests.gateway.talker import user
from tests.gateway.upstream import DONE, GOOD, Upstream, chunk
from tests.gateway.world import serving

pytestmark = pytest.mark.anyio

BACKEND_KEY = "sk-backend-0123456789abcdefghij"
AGENT_KEY = "sk-agent-0123456789abcdefghij"
HOSTED = [chunk({"index": 0, "delta": {"content": "Hi!"}, "finish_reason": "stop"}), DONE]
EMBEDDED = {"object": "list", "data": [{"object": "embedding", "index": 0, "embedding": [0.5]}], "model": "e"}


class Server(Upstream):
    """Stands in for vLLM, which tells its version, or else for a hosted API."""

    def __init__(self, *, vllm: bool) -> None:
        super().__init__(GOOD if vllm else HOSTED)
        self.vllm = vllm

    @asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        routes = [
            Route("/v1/chat/completions", self.answer, methods=["POST"]),
            Route("/v1/embeddings", self.embed, methods=["POST"]),
            Route("/v1/models", self.models),
        ]
        if self.vllm:
            routes.append(Route("/version", lambda request: JSONResponse({"version": "0.11.0"})))
        async with serving(Starlette(routes=routes)) as url:
            yield f"{url}/v1"

    async def embed(self, request: Request) -> Response:
        self.headers.append(dict(request.headers))
        return JSONResponse(EMBEDDED)

    async def models(self, request: Request) -> Response:
        self.headers.append(dict(request.headers))
        return JSONResponse({"object": "list", "data": [{"id": "m", "object": "model", "created": 1, "owned_by": "x"}]})


@dataclass
class Proxy:
    url: str
    greeting: str
    store: Path
    process: asyncio.subprocess.Process
    said: str = ""

    def client(self, **options: Any) -> AsyncOpenAI:
        return AsyncOpenAI(**{"base_url": f"{self.url}/v1", "api_key": AGENT_KEY, "max_retries": 0, **options})

    async def stop(self) -> list[Span]:
        """End it as a service manager does; what is in its store then."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.stderr is not None
        self.said = (await asyncio.wait_for(self.process.stderr.read(), 60)).decode()
        assert await self.process.wait() == 0 and "Traceback" not in self.said, self.said
        store = await SqlStore.open(self.store)
        try:
            return await store.query_spans(UNATTRIBUTED)
        finally:
            await store.close()


async def start(directory: Path, *arguments: str, **environment: str) -> asyncio.subprocess.Process:
    variables = {name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")}
    program = [sys.executable, "-m", "agentlightning.cli.main", "server"]
    return await asyncio.create_subprocess_exec(
        *(*program, "--store", str(directory / "store.sqlite"), *arguments),
        env=variables | environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@asynccontextmanager
async def proxy(directory: Path, *arguments: str, **environment: str) -> AsyncIterator[Proxy]:
    process = await start(directory, "--port", "0", *arguments, **environment)
    try:
        assert process.stderr is not None
        greeting = (await asyncio.wait_for(process.stderr.readuntil(b"your_agent.py\n"), 60)).decode()
        found = re.search(r"OPENAI_BASE_URL=(\S+)/v1", greeting)
        assert found, greeting
        yield Proxy(found[1], greeting, directory / "store.sqlite", process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.slow
async def test_calls_of_an_agent_to_vllm_are_recorded_with_their_ids(tmp_path: Path) -> None:
    server = Server(vllm=True)
    async with server.served() as url, proxy(tmp_path, "--backend", url) as front, front.client() as client:
        assert f"calls to {url} (vllm) are recorded in" in front.greeting
        assert [model.id for model in (await client.models.list()).data] == ["m"]
        answer = await client.chat.completions.create(model="m", messages=user("hello"), temperature=0.3)
        stream = await client.chat.completions.create(model="m", messages=user("hello"), stream=True)
        text = "".join([part.choices[0].delta.content or "" async for part in stream if part.choices])
        judged = {semconv.FROZEN_HEADER: "true"}
        await client.chat.completions.create(model="m", messages=user("good?"), extra_headers=judged)
        *spans, judge = await front.stop()
    assert text == answer.choices[0].message.content == "Hi!"
    assert "calls: 3, recorded: 3" in front.said
    assert judge.attributes[semconv.CALL_TRAINABLE] is False  # whoever asks says so
    for span in spans:
        assert span.tokens is not None and span.tokens.prompt_token_ids == (1, 2, 3)
        assert span.tokens.choices[0].token_ids == (4, 5, 6)
        assert span.attributes[semconv.CALL_TRAINABLE] is True
        assert json.loads(str(span.attributes[semconv.GEN_AI_INPUT_MESSAGES])) == user("hello")
    first, second, _ = server.asked
    assert first["temperature"] == 0.3 and "temperature" not in second  # nothing is decided on the way


@pytest.mark.slow
@pytest.mark.parametrize("vllm", [True, False])
async def test_each_sides_key_stays_on_its_side(tmp_path: Path, vllm: bool) -> None:
    server = Server(vllm=vllm)
    environment = {"AGL_BACKEND_KEY" if vllm else "OPENAI_API_KEY": BACKEND_KEY}
    async with server.served() as url, proxy(tmp_path, "--backend", url, **environment) as front:
        received = ""
        for keys in ({"authorization": f"Bearer {AGENT_KEY}"}, {"x-api-key": AGENT_KEY}, {"api-key": AGENT_KEY}):
            async with aiohttp.ClientSession(headers={**keys, "cookie": AGENT_KEY}) as http:
                body = {"model": "m", "messages": user("hello"), "input": "hello"}
                for path in ("chat/completions", "embeddings"):
                    async with http.post(f"{front.url}/v1/{path}", json=body) as answer:
                        assert answer.status == 200
                        received += repr(answer.headers) + await answer.text()
                async with http.get(f"{front.url}/v1/models") as answer:
                    received += repr(answer.headers) + await answer.text()
        server.status, server.error = 401, {"error": {"message": f"Incorrect API key provided: {BACKEND_KEY}"}}
        async with front.client() as client:
            with pytest.raises(openai.InternalServerError, match="refused the gateway's key") as caught:
                await client.chat.completions.create(model="m", messages=user("hello"))
        received += caught.value.response.text
        spans = await front.stop()
    assert len(server.headers) == 10 and len(spans) == 7
    assert all(headers["authorization"] == f"Bearer {BACKEND_KEY}" for headers in server.headers)
    assert AGENT_KEY not in repr(server.headers) and AGENT_KEY not in repr(server.asked)
    assert BACKEND_KEY not in received
    for key in (AGENT_KEY, BACKEND_KEY):
        assert key not in repr(spans) and key not in front.greeting and key not in front.said


@pytest.mark.slow
async def test_a_proxy_with_a_key_serves_nobody_else(tmp_path: Path) -> None:
    server = Server(vllm=True)
    async with server.served() as url, proxy(tmp_path, "--backend", url, "--json", AGL_KEY="its key") as front:
        async with front.client() as client:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model="m", messages=user("hello"))
        async with front.client(api_key="its key") as client:
            await client.chat.completions.create(model="m", messages=user("hello"))
        assert len(await front.stop()) == 1
        assert front.process.stdout is not None
        begun, ended = map(json.loads, (await front.process.stdout.read()).splitlines())
    assert begun == {"url": front.url, "backend": url, "kind": "vllm", "store": str(front.store)}
    assert ended == {"calls": 1, "recorded": 1}
    assert len(server.asked) == 1 and "authorization" not in server.headers[0]


async def test_a_server_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    process = await start(tmp_path, "--backend", "http://127.0.0.1:1/v1")
    _, told = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1 and b"nothing answers at" in told and b"--kind" in told
