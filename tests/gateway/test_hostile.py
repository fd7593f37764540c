"""Clients that send anything: what cannot be used is refused in the protocol's own form, and nobody else notices."""

from __future__ import annotations

import asyncio
import http.client
import json
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from anyio.from_thread import start_blocking_portal
from hypothesis import HealthCheck, Phase, given, settings
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agentlightning.gateway.app import Gateway
from agentlightning.gateway.backends.http import HttpBackend
from agentlightning.gateway.models import ModelEntry, ModelTable
from agentlightning.store.sql import SqlStore
from tests.gateway.full_requests import FULL_REQUESTS, requests
from tests.gateway.talker import PLAIN, user
from tests.gateway.upstream import DONE, chunk
from tests.gateway.world import GREEDY, World, serving, talking, world

ENDPOINTS = list(FULL_REQUESTS)
ANTHROPICS = ("messages", "messages/count_tokens")
# What each server answers: the embedded engine, one like vLLM, and hosted ones that are asked in the agent's protocol.
MODELS = ("policy", "vllm", "openai", "anthropic")
EXAMPLES = 40


async def anything(request: Request) -> Response:
    """A server that answers whatever it is asked."""
    asked = await request.json()
    end = {"finish_reason": "stop", "token_ids": [4], "logprobs": {"content": [{"token": "?", "logprob": -0.5}]}}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "input_tokens": 1, "output_tokens": 1}
    indices = range(asked["n"]) if isinstance(asked.get("n"), int) else range(1)
    if asked.get("stream") is not True:
        message = {"role": "assistant", "content": "Hi"}
        choices = [{"index": index, "message": message, **end} for index in indices]
        return JSONResponse(
            {"choices": choices, "usage": usage, "input_tokens": 1, "count": 1, "prompt_token_ids": [1]}
        )
    parts = [chunk({"index": index, "delta": {"content": "Hi"}, **end}, prompt_token_ids=[1]) for index in indices]
    return StreamingResponse(iter([*parts, chunk(usage=usage), DONE]), media_type="text/event-stream")


@asynccontextmanager
async def everything(directory: Path) -> AsyncIterator[World]:
    """A gateway with a model of each kind."""
    store = await SqlStore.open(directory / "store.sqlite", synchronous="NORMAL")
    async with (
        talking() as (engine, service),
        serving(Starlette(routes=[Route("/{path:path}", anything, methods=["POST"])])) as url,
    ):
        entries = [ModelEntry("policy", engine, train=GREEDY), ModelEntry("vllm", HttpBackend(f"{url}/v1"))]
        entries += [
            ModelEntry(kind, HttpBackend(f"{url}/v1", kind=kind), trainable=False, train=None, val=None)
            for kind in ("openai", "anthropic")
        ]
        gateway = Gateway(ModelTable(entries), store)
        async with serving(Starlette(routes=gateway.routes())) as front:
            yield World(front, store, gateway, service)
        await gateway.close()
    await store.close()


class Caller:
    """Asks one gateway, which runs in a thread of its own, over one connection."""

    def __init__(self, url: str, prefix: str, gateway: Gateway) -> None:
        self.gateway = gateway
        self._prefix = prefix
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)

    def ask(self, endpoint: str, body: bytes, **headers: str) -> tuple[int, bytes]:
        self._connection.request("POST", f"{self._prefix}/v1/{endpoint}", body, headers)
        answer = self._connection.getresponse()
        return answer.status, answer.read()


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    with start_blocking_portal() as portal:
        with portal.wrap_async_context_manager(everything(tmp_path_factory.mktemp("store"))) as built:
            attempted = portal.call(built.attempt)
            prefix = f"/rollout/{attempted.rollout_id}/attempt/{attempted.attempt.attempt_id}"
            yield Caller(built.url, prefix, built.gateway)


def is_refusal(endpoint: str, status: int, body: bytes) -> bool:
    """Whether this is how the endpoint's protocol says no, and says whose fault it is."""
    told = json.loads(body)
    if endpoint in ANTHROPICS:
        return told["type"] == "error" and {"type", "message"} <= set(told["error"])
    return set(told["error"]) == {"message", "type", "param", "code"} and bool(told["error"]["message"])


# --- JSON of every kind ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_any_value_in_any_field_is_answered_or_refused(caller: Caller, endpoint: str, model: str) -> None:
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(requests(endpoint, model))
    def check(request: dict[str, Any]) -> None:
        status, body = caller.ask(endpoint, json.dumps(request).encode())
        if status != 200:
            assert 400 <= status < 500 and is_refusal(endpoint, status, body), (status, body)
        elif request.get("stream") is True:
            assert b"server_error" not in body and b"api_error" not in body, body
        else:
            json.loads(body)

    check()


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"model"',
        b"{",
        b'{"model": "policy",}',
        b'{"model": "policy"} {}',
        b"{'model': 'policy'}",
        b'{"model": NaN}',
        b"\xff\xfe{}",
        b'{"model": "\xff"}',
        b'{"\xff": 1, "model": "openai", "input": "x"}',
        b'{"model": "policy", "user": "\xc3\x28", "input": "x", "messages": []}',
        b'{"model": "openai", "input": "\xff", "messages": "\xff", "user": "\xff"}',
        b'{"model": "anthropic", "input": "\xff", "messages": "\xff", "user": "\xff"}',
        b'{"model": "policy", "x": "\\ud800"}',
        b"\x00",
        b"[" * 100_000,
        b'{"model": "policy", "messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"model": "openai", "input": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"model": "vllm", "x": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
        b'{"model": "policy", "seed": 1e999}',
        b'{"model": "policy", "seed": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda body: repr(body[:60]),
)
def test_what_is_no_request_is_refused(caller: Caller, endpoint: str, body: bytes) -> None:
    status, told = caller.ask(endpoint, body)
    assert 400 <= status < 500 and is_refusal(endpoint, status, told), (status, told)
