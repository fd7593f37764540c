"""Servers that fail in every way: the agent gets an error it understands; what was sampled is kept
and not trained."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import openai
import pytest

from agentlightning import semconv
from agentlightning.data.transitions import trace_rollout
from agentlightning.gateway.backends.http import HttpBackend
from agentlightning.gateway.models import ModelEntry
from agentlightning.types import AttemptedRollout, Span
from tests.gateway.talker import user
from tests.gateway.upstream import DONE, GOOD, chunk, piece, until, whole
from tests.gateway.world import World, fronting

pytestmark = pytest.mark.anyio

# and its end is that of the connection
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
BEGIN = STREAM + "".join(GOOD[:2]).encode()


class RawServer:
    """Sends exactly these bytes to whoever asks, and then closes the connection or, if it `hangs`,
    does nothing more. `left` is set when a caller has gone before that."""

    def __init__(self, answer: bytes, *, hangs: bool = False) -> None:
        self.left = asyncio.Event()
        self.asked = 0
        self._answer = answer
        self._hangs = hangs

    @asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        told = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(
            int(told.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        )
        self.asked += 1
        try:
            writer.write(self._answer)
            await writer.drain()
            if self._hangs:
                await reader.read()
        except ConnectionError:
            pass
        self.left.set()
        writer.close()


@asynccontextmanager
async def before(server: RawServer, *, timeout_seconds: float = 0.5) -> AsyncIterator[World]:
    """A gateway with the server behind it."""
    async with server.served() as url:
        backend = HttpBackend(url, timeout_seconds=timeout_seconds)
        async with fronting(ModelEntry("policy", backend)) as built:
            yield built


async def ask(built: World, attempted: AttemptedRollout, stream: bool) -> str:
    create = built.client(attempted, timeout=20).chat.completions.create
    if not stream:
        return (await create(model="policy", messages=user("hello"))).choices[0].message.content
    parts = await create(model="policy", messages=user("hello"), stream=True, logprobs=True)
    return "".join([part.choices[0].delta.content or "" async for part in parts])


async def failed(built: World, stream: bool) -> tuple[openai.APIError, Span]:
    """The error of a call, and its span; nothing of it is trained."""
    attempted = await built.attempt()
    with pytest.raises(openai.APIError) as caught:
        await ask(built, attempted, stream)
    span = await untrained(built, attempted)
    assert (
        span.status.status_code == "ERROR" and span.attributes[semconv.CALL_FLAG] == "call failed"
    )
    return caught.value, span


async def untrained(built: World, attempted: AttemptedRollout) -> Span:
    """The span of the attempt's one call, of which nothing is trained."""
    (span,) = await built.spans(attempted)
    rollout = await built.store.get_rollout_by_id(span.rollout_id)
    assert rollout is not None and trace_rollout(rollout, [span]).transitions == ()
    return span


def refusing(status: str, body: bytes, *headers: bytes) -> bytes:
    told = [f"HTTP/1.1 {status}".encode(), b"content-length: %d" % len(body), *headers]
    return b"\r\n".join(told) + b"\r\n\r\n" + body


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("server", "status", "says"),
    [
        ((b"", True), 504, "fell silent"),
        ((b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{", True), 504, "fell silent"),
        ((b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{", False), 502, "broke off"),
        ((b"\x00\xff no HTTP at all\r\n\r\n", False), 502, "does not speak HTTP"),
        ((b"HTTP/1.1 200 OK\r\nendless: " + b"x" * 1_000_000, False), 502, "does not end"),
        (
            (b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 4\r\n\r\nabcd", False),
            502,
            "compressed",
        ),
        ((refusing("200 OK", b"<html>welcome</html>"), False), 502, ""),
        ((refusing("200 OK", b""), False), 502, ""),
        ((refusing("302 Found", b"", b"location: http://127.0.0.1:1/"), False), 502, ""),
        ((refusing("500 Oops", b"<html><h1>It \xff broke</h1></html>"), False), 502, "broke"),
        ((refusing("503 Busy", b'{"error": "overloaded"}'), False), 502, "overloaded"),
        (
            (
                refusing("500 Oops", b'{"error": {"message": {"a": 1}, "code": 7, "param": []}}'),
                False,
            ),
            502,
            "",
        ),
        ((refusing("400 Bad", b"[" * 100_000), False), 400, ""),
    ],
    ids=lambda value: repr(value)[:50],
)
async def test_a_server_that_fails_before_it_answers(
    server: tuple[bytes, bool], status: int, says: str, stream: bool
) -> None:
    async with before(RawServer(server[0], hangs=server[1])) as built:
        error, _ = await failed(built, stream)
    if isinstance(error, openai.APIStatusError):
        assert error.status_code == status
    else:
        assert stream  # its head was already sent
    assert says in error.message


def delta(written: bytes, index: int = 0) -> bytes:
    return b'data: {"choices": [{"index": %d, "delta": %s}]}\n\n' % (index, written)


NONSENSE = "no chat completion"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("then", "hangs", "says"),
    [
        (b"", True, "fell silent"),
        (b"", False, "before every choice"),
        (b"data: {}}\n\n", False, NONSENSE),
        (b"data: " + b"[" * 100_000 + b"\n\n", False, NONSENSE),
        (b"data: " + b"x" * 50_000_000, False, "a line of more than"),
        (b'data: {"error": {"message": "gpu on fire"}}\n\n', False, "gpu on fire"),
        (b'data: {"error": "gpu on fire"}\n\n', False, "gpu on fire"),
        (b'data: {"detail": [{"loc": ["gpu", 0], "msg": "on fire"}]}\n\n', False, "gpu.0: on fire"),
        (
            b'data: {"object": "error", "message": "gpu on fire", "code": 500}\n\n',
            False,
            "gpu on fire",
        ),
        (b'data: [{"error": {"code": 503, "message": "gpu on fire"}}]\n\n', False, "gpu on fire"),
        (b'data: "gpu on fire"\n\n', False, "gpu on fire"),
        (b"event: error\ndata: gpu on fire\n\n", False, "gpu on fire"),
        (b'event: error\ndata: {"message": "gpu on fire"}\n\n', False, "gpu on fire"),
        (b"\x00\xff\xfe" * 1000, False, "before every choice"),
    ],
    ids=lambda value: repr(value)[:60],
)
async def test_what_was_said_before_a_stream_failed_is_kept(
    then: bytes, hangs: bool, says: str
) -> None:
    async with before(
        RawServer(BEGIN + then, hangs=hangs), timeout_seconds=0.5 if hangs else 30
    ) as built:
        error, span = await failed(built, stream=True)
    assert says in error.message
    assert span.tokens is not None and list(span.tokens.choices[0].token_ids) == [4]
    assert json.loads(str(span.attributes[semconv.GEN_AI_OUTPUT_MESSAGES]))[0]["content"] == "Hi"
    assert span.attributes[semconv.GEN_AI_FINISH_REASONS] == ["abort"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [b"7", b"Wed, 21 Oct 2026 07:28:00 GMT"])
async def test_how_long_to_wait_is_passed_on(stream: bool, after: bytes) -> None:
    body = b'{"error": {"message": "slow down", "type": "tokens", "code": "rate_limit_exceeded"}}'
    answer = refusing("429 Too Many Requests", body, b"retry-after: " + after)
    async with before(RawServer(answer)) as built:
        error, _ = await failed(built, stream)
    assert isinstance(error, openai.RateLimitError) and error.code == "rate_limit_exceeded"
    assert error.response.headers["retry-after"] == after.decode()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_huge_answer_arrives_whole(stream: bool) -> None:
    text = "much " * 2_000_000
    events = [GOOD[0], chunk(piece(text, [4, 5], [-0.5, -0.25], finish_reason="stop")), DONE]
    answer = (
        STREAM + "".join(events).encode()
        if stream
        else refusing("200 OK", json.dumps(whole(events)).encode())
    )
    async with before(RawServer(answer)) as built:
        attempted = await built.attempt()
        assert await ask(built, attempted, stream) == text
        (span,) = await built.spans(attempted)
    assert span.tokens is not None and list(span.tokens.choices[0].token_ids) == [4, 5]


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_a_client_that_leaves_in_mid_stream_ends_the_call_upstream(path: str) -> None:
    server = RawServer(BEGIN, hangs=True)
    async with before(server, timeout_seconds=60.0) as built:
        attempted = await built.attempt()
        url = f"{built.client(attempted).base_url}{path}"
        said = (
            {"input": "hello"}
            if path == "responses"
            else {"messages": user("hello"), "max_tokens": 9}
        )
        body = {"model": "policy", "stream": True, **said}
        async with aiohttp.ClientSession() as http, http.post(url, json=body) as answer:
            received = b""
            while b"Hi" not in received:
                received += await asyncio.wait_for(answer.content.readany(), 60)
        await asyncio.wait_for(server.left.wait(), 60)
        await until(lambda: not built.gateway.running)
        span = await untrained(built, attempted)
    assert span.attributes[semconv.CALL_FLAG] == "client disconnected"
    assert span.attributes[semconv.GEN_AI_FINISH_REASONS] == ["abort"]
    assert span.tokens is not None and list(span.tokens.prompt_token_ids) == [1, 2, 3]
    (choice,) = span.tokens.choices
    assert (list(choice.token_ids), list(choice.logprobs)) == ([4], [-0.5])


@pytest.mark.parametrize("status", ["099", "101", "700"])
async def test_a_status_that_no_answer_has_is_not_passed_through(status: str) -> None:
    server = RawServer(
        f"HTTP/1.1 {status} Odd\r\ncontent-type: application/json\r\n"
        "content-length: 2\r\n\r\n{}".encode()
    )
    asked = {"model": "policy", "input": "hello"}
    async with (
        before(server) as built,
        aiohttp.ClientSession(built.url) as http,
        http.post("/v1/embeddings", json=asked) as answer,
    ):
        assert answer.status == 502
        assert f"answered {int(status)}" in (await answer.json())["error"]["message"]
