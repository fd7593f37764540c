"""Clients that send anything: what cannot be used is refused in the protocol's own form, and nobody
else notices."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
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

from agentlightning import semconv
from agentlightning.gateway.backends.http import HttpBackend
from agentlightning.gateway.models import ModelEntry
from agentlightning.gateway.request import MOST_PARTS
from agentlightning.store.sql import SqlStore
from tests.gateway.full_requests import FULL_REQUESTS, requests
from tests.gateway.talker import PLAIN, make_talker, user
from tests.gateway.upstream import DONE, chunk
from tests.gateway.world import GREEDY, World, fronting, serving, talking, world

ENDPOINTS = list(FULL_REQUESTS)
ANTHROPICS = ("messages", "messages/count_tokens")
# What each server answers: the embedded engine, one like vLLM, and hosted ones that are asked in
# the agent's protocol.
MODELS = ("policy", "vllm", "openai", "anthropic")
EXAMPLES = 25


async def anything(request: Request) -> Response:
    """A server that answers whatever it is asked."""
    asked = await request.json()
    end = {
        "finish_reason": "stop",
        "token_ids": [4],
        "logprobs": {"content": [{"token": "?", "logprob": -0.5}]},
    }
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "input_tokens": 1, "output_tokens": 1}
    indices = range(asked["n"]) if isinstance(asked.get("n"), int) else range(1)
    if asked.get("stream") is not True:
        message = {"role": "assistant", "content": "Hi"}
        choices = [{"index": index, "message": message, **end} for index in indices]
        return JSONResponse(
            {
                "choices": choices,
                "usage": usage,
                "input_tokens": 1,
                "count": 1,
                "prompt_token_ids": [1],
            }
        )
    parts = [
        chunk({"index": index, "delta": {"content": "Hi"}, **end}, prompt_token_ids=[1])
        for index in indices
    ]
    return StreamingResponse(
        iter([*parts, chunk(usage=usage), DONE]), media_type="text/event-stream"
    )


@asynccontextmanager
async def everything() -> AsyncIterator[World]:
    """A gateway with a model of each kind."""
    async with (
        talking() as (engine, _),
        serving(Starlette(routes=[Route("/{path:path}", anything, methods=["POST"])])) as url,
    ):
        entries = [
            ModelEntry("policy", engine, train=GREEDY),
            ModelEntry("vllm", HttpBackend(f"{url}/v1")),
        ]
        entries += [
            ModelEntry(
                kind, HttpBackend(f"{url}/v1", kind=kind), trainable=False, train=None, val=None
            )
            for kind in ("openai", "anthropic")
        ]
        # Nothing renews the lease of its attempt, however long this file takes.
        store = await SqlStore.open(":memory:", lease_seconds=3600.0)
        async with fronting(*entries, store=store) as front:
            yield front
        await store.close()


class Caller:
    """Asks a gateway, which runs in a thread of its own, over one connection."""

    def __init__(self, url: str) -> None:
        self._path = urlsplit(url).path
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)

    def ask(self, endpoint: str, body: bytes) -> tuple[int, bytes]:
        self._connection.request("POST", f"{self._path}/v1/{endpoint}", body)
        answer = self._connection.getresponse()
        return answer.status, answer.read()

    def close(self) -> None:
        self._connection.close()


@pytest.fixture(scope="module")
def attempt_url() -> Iterator[str]:
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(everything()) as built,
    ):
        attempted = portal.call(partial(built.attempt, "test"))
        yield f"{built.url}/rollout/{attempted.rollout_id}/attempt/{attempted.attempt.attempt_id}"


@pytest.fixture
def caller(attempt_url: str) -> Iterator[Caller]:
    with contextlib.closing(Caller(attempt_url)) as caller:
        yield caller


def is_refusal(endpoint: str, status: int, body: bytes) -> bool:
    """Whether this is how the endpoint's protocol says no, and says whose fault it is."""
    told = json.loads(body)
    if endpoint in ANTHROPICS:
        return told["type"] == "error" and {"type", "message"} <= set(told["error"])
    return set(told["error"]) == {"message", "type", "param", "code"} and bool(
        told["error"]["message"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_any_value_in_any_field_is_answered_or_refused(
    caller: Caller, endpoint: str, model: str
) -> None:
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
        b"[]",
        b"{",
        b'{"model": "policy"} {}',
        b'{"model": NaN}',
        b"\xff\xfe{}",
        b'{"\xff": 1, "model": "openai", "input": "x"}',
        b'{"model": "policy", "user": "\xc3\x28", "input": "x", "messages": []}',
        b'{"model": "openai", "input": "\xff", "messages": "\xff", "user": "\xff"}',
        b'{"model": "anthropic", "input": "\xff", "messages": "\xff", "user": "\xff"}',
        b'{"model": "policy", "x": "\\ud800"}',
        b"[" * 100_000,
        b'{"model": "policy", "messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"model": "openai", "input": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"model": "vllm", "x": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
        b'{"model": "policy", "seed": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda body: repr(body[:60]),
)
def test_what_is_no_request_is_refused(caller: Caller, endpoint: str, body: bytes) -> None:
    status, told = caller.ask(endpoint, body)
    assert 400 <= status < 500 and is_refusal(endpoint, status, told), (status, told)


def test_a_setting_of_very_many_parts_is_refused_before_it_is_read(caller: Caller) -> None:
    asked = {"model": "policy", "messages": [{"role": "user", "content": "Hi"}]}
    asked["logit_bias"] = dict.fromkeys(map(str, range(150_000)), 1.0)
    status, told = caller.ask("chat/completions", json.dumps(asked).encode())
    assert status == 400 and b"logit_bias has more than" in told


# which are passed on unread
@pytest.mark.parametrize("endpoint", [one for one in ENDPOINTS if one != "embeddings"])
@pytest.mark.parametrize("field", ["tools", "anything"])
def test_a_body_of_very_many_parts_is_refused_before_it_is_read(
    caller: Caller, endpoint: str, field: str
) -> None:
    body = b'{"model": "policy", "%b": [%b[]]}' % (field.encode(), b"[]," * MOST_PARTS)
    status, told = caller.ask(endpoint, body)
    assert status == 413 and is_refusal(endpoint, status, told), (status, told)


MEGABYTE = 1024 * 1024


@asynccontextmanager
async def connection(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        yield reader, writer
    finally:
        writer.close()


def head(endpoint: str, *headers: str) -> bytes:
    return "\r\n".join(
        [f"POST /v1/{endpoint} HTTP/1.1", "host: localhost", *headers, "", ""]
    ).encode()


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """One answer of known length."""
    told = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(told.partition("content-length: ")[2].partition("\r\n")[0])
    return int(told.split()[1]), await reader.readexactly(length)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("endpoint", ["responses", "messages"])
@pytest.mark.parametrize("announced", [True, False])
async def test_a_huge_body_is_refused_and_not_kept(
    tmp_path: Path, endpoint: str, announced: bool
) -> None:
    part = b" " * MEGABYTE
    async with (
        world(tmp_path, body_limit=2 * MEGABYTE) as built,
        connection(built.url) as (reader, writer),
    ):
        length = f"content-length: {50 * MEGABYTE}" if announced else "transfer-encoding: chunked"
        writer.write(head(endpoint, length))
        before = resident_bytes()
        for _ in range(50):
            writer.write(part if announced else b"%x\r\n%s\r\n" % (MEGABYTE, part))
            await writer.drain()
        writer.write(b"" if announced else b"0\r\n\r\n")
        status, body = await asyncio.wait_for(answer_of(reader), 60)
        assert status == 413 and is_refusal(endpoint, status, body)
        assert resident_bytes() - before < 20 * MEGABYTE
        writer.write(head(endpoint, "content-length: 2") + b"{}")  # on the same connection
        status, body = await asyncio.wait_for(answer_of(reader), 60)
        assert status == 400 and is_refusal(endpoint, status, body)


@pytest.mark.anyio
@pytest.mark.parametrize("endpoint", ["responses", "messages"])
@pytest.mark.parametrize(
    "length", [f"content-length: {2 * MEGABYTE}", "transfer-encoding: chunked"]
)
async def test_a_large_body_is_not_waited_for_of_who_may_not_call(
    tmp_path: Path, endpoint: str, length: str
) -> None:
    async with (
        world(tmp_path, admin_key="an admin's key") as built,
        connection(built.url) as (reader, writer),
    ):
        ended = await built.attempt()
        await built.store.cancel_rollout(ended.rollout_id)
        for key, expected in (("", 401), (f"authorization: Bearer {ended.api_key}", 403)):
            writer.write(head(endpoint, length, *filter(None, [key])))
            status, body = await asyncio.wait_for(answer_of(reader), 10)
            assert status == expected and is_refusal(endpoint, status, body)
            reader, writer = await asyncio.open_connection(
                urlsplit(built.url).hostname, urlsplit(built.url).port
            )
        writer.close()


@pytest.mark.anyio
async def test_requests_that_never_come_whole_keep_nobody_waiting(gateway_world: World) -> None:
    halves = [b"POST /v1/chat/comp", head("chat/completions", "content-length: 100")[:-2]]
    halves += [
        head("messages", "content-length: 100") + b'{"model": ',
        head("responses", "transfer-encoding: chunked"),
    ]
    async with AsyncExitStack() as stack:
        for number in range(200):
            _, writer = await stack.enter_async_context(connection(gateway_world.url))
            writer.write(halves[number % len(halves)])
            await writer.drain()
        client = gateway_world.client(await gateway_world.attempt(), timeout=10)
        answer = await client.chat.completions.create(model="policy", messages=user("hello"))
    assert answer.choices[0].message.content == PLAIN["hello"]
    assert gateway_world.gateway.running == 0


@pytest.mark.anyio
async def test_odd_characters_come_through_as_they_are(gateway_world: World) -> None:
    attempted = await gateway_world.attempt()
    client = gateway_world.client(attempted)
    await client.chat.completions.create(model="policy", messages=user(ODD), user=ODD, max_tokens=1)
    await client.responses.create(model="policy", input=ODD, max_output_tokens=16)
    for span in await gateway_world.spans(attempted):
        assert json.loads(str(span.attributes[semconv.GEN_AI_INPUT_MESSAGES])) == user(ODD)
        assert span.tokens is not None
        assert ODD in make_talker().tokenizer.decode(span.tokens.prompt_token_ids)


ODD = "NUL \x00, family 👩‍👩‍👧‍👦, flag 🏴󠁧󠁢󠁳󠁣󠁴󠁿, e\u0301, \u202eright to left, \ufeff\u2028\uffff end"
