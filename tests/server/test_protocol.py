"""What HTTP/1.1 asks of a server, of connections that hold LLM calls and other requests."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from agentlightning.gateway.backends.http import HttpBackend
from agentlightning.gateway.gateway import Gateway
from agentlightning.gateway.models import ModelEntry, ModelTable
from agentlightning.server.app import create_app
from agentlightning.server.guards import GuardedProtocol
from agentlightning.server.serve import HttpServer
from tests.gateway.upstream import DONE, GOOD, Upstream, chunk, piece, until
from tests.gateway.world import fronting, serving

pytestmark = pytest.mark.anyio
CALL = "POST /v1/chat/completions HTTP/1.1"
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


def asked(text: str = "hello", *, stream: bool = False) -> bytes:
    return json.dumps(
        {"model": "policy", "messages": [{"role": "user", "content": text}], "stream": stream}
    ).encode()


def post(*headers: str, line: str = CALL, body: bytes | None = None) -> bytes:
    body = asked() if body is None else body
    lines = [line, "host: localhost", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Client:
    """A connection, over which answers are read one by one."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self, *, body: bool = True) -> tuple[int, dict[str, str], bytes]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        content = b""
        if body and "content-length" in headers:
            content = await self.reader.readexactly(int(headers["content-length"]))
        while headers.get("transfer-encoding") == "chunked":
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            content += (await self.reader.readexactly(size + 2))[:-2]
            if not size:
                break
        return int(head[0].split()[1]), headers, content


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
    try:
        async with asyncio.timeout(60):
            yield Client(reader, writer)
    finally:
        writer.close()


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with (
        Upstream(GOOD).backend() as backend,
        fronting(ModelEntry("policy", backend)) as built,
    ):
        yield built.url


async def test_calls_and_other_requests_share_a_connection_and_may_come_at_once(url: str) -> None:
    requests = [
        post(),
        HEALTH,
        post(body=asked(stream=True)),
        post(line="POST /nothing HTTP/1.1"),
        HEALTH,
        post(),
    ]
    expected = [
        (200, b"Hi!"),
        (200, b"ok"),
        (200, b"[DONE]"),
        (404, b"/docs"),
        (200, b"ok"),
        (200, b"Hi!"),
    ]
    async with connected(url) as client:
        client.send(b"".join(requests))
        for status, text in expected:
            answer = await client.answer()
            assert answer[0] == status and text in answer[2]
        for request, (status, text) in zip(requests, expected, strict=True):
            client.send(request)
            answer = await client.answer()
            assert answer[0] == status and text in answer[2]


async def test_a_body_comes_when_it_is_asked_for_in_chunks_and_byte_by_byte(url: str) -> None:
    async with connected(url) as client:
        whole = post("expect: 100-continue")
        head, _, body = whole.partition(b"\r\n\r\n")
        client.send(head + b"\r\n\r\n")
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(body)
        assert (await client.answer())[0] == 200
        client.send(post("expect: 100-continue"))  # a client that does not wait
        interim = await client.reader.readuntil(b"\r\n\r\n")
        assert interim.startswith((b"HTTP/1.1 100", b"HTTP/1.1 200"))
        if b" 200 " in interim:
            await client.reader.readexactly(int(re.findall(rb"content-length: (\d+)", interim)[0]))
        else:
            assert (await client.answer())[0] == 200
        chunks = b"".join(
            b"%x\r\n%b\r\n" % (1, body[place : place + 1]) for place in range(len(body))
        )
        client.send(
            f"{CALL}\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n".encode()
            + chunks
            + b"0\r\n\r\n"
        )
        assert (await client.answer())[0] == 200
        for byte in post():
            client.send(bytes([byte]))
            await asyncio.sleep(0)
        assert (await client.answer())[0] == 200


async def test_a_wish_to_upgrade_is_ignored(url: str) -> None:
    h2c = "connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAAP__"
    requests = [
        post(*h2c),
        post("connection: upgrade", "upgrade: websocket", line="GET /health HTTP/1.1", body=b""),
    ]
    requests += [post(*h2c, line="POST /nothing HTTP/1.1"), post()]
    async with connected(url) as client:
        client.send(b"".join(requests))
        assert [(await client.answer())[0] for _ in requests] == [200, 200, 404, 200]
        for byte in requests[0]:
            client.send(bytes([byte]))
            await asyncio.sleep(0)
        assert b"Hi!" in (await client.answer())[2]
        client.send(b"CONNECT here:443 HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await client.answer())[0] == 400


async def test_a_connection_ends_when_its_client_says_so_and_not_before(url: str) -> None:
    for request in (post("connection: close"), post(line=CALL.replace("1.1", "1.0"))):
        async with connected(url) as client:
            client.send(request)
            status, headers, _ = await client.answer()
            assert (status, headers["connection"]) == (200, "close")
            assert await client.reader.read() == b""


async def test_heads_are_answered_without_bodies_and_other_methods_told_what_is_there(
    url: str,
) -> None:
    async with connected(url) as client:
        client.send(post(line="HEAD /v1/models HTTP/1.1", body=b""))
        status, headers, _ = await client.answer(body=False)
        assert status == 200 and int(headers["content-length"]) > 0
        client.send(post(line="DELETE /v1/models/policy HTTP/1.1", body=b""))
        status, headers, told = await client.answer()
        assert (status, headers["allow"]) == (
            405,
            "post, get",
        ) and b"takes POST, GET, not DELETE" in told


async def test_a_refused_body_is_not_taken_for_the_next_request(url: str) -> None:
    async with connected(url) as client:
        client.send(post(body=b"{" + b" " * 300_000))
        client.send(post())
        assert (await client.answer())[0] == 400
        assert (await client.answer())[0] == 200


class Endless:
    """Streams large events until its caller has gone, and counts their bytes."""

    def __init__(self) -> None:
        self.sent, self.left, self.go_on = 0, asyncio.Event(), True

    async def answer(self, request: Request) -> StreamingResponse:
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[str]:
        yield GOOD[0]
        try:
            while self.go_on:
                event = chunk(piece("x" * 50_000, [4], [-0.5]))
                self.sent += len(event)
                yield event
                await asyncio.sleep(0)  # what is sent to nobody never waits
            yield chunk(piece("!", [5], [-0.5], finish_reason="stop"))
            yield DONE
        finally:
            self.left.set()

    @asynccontextmanager
    async def gateway(self) -> AsyncIterator[tuple[HttpServer, Gateway]]:
        app = Starlette(routes=[Route("/v1/chat/completions", self.answer, methods=["POST"])])
        async with serving(app) as url:
            backend = HttpBackend(f"{url}/v1")
            gateway = Gateway(ModelTable([ModelEntry("policy", backend)]))
            async with HttpServer(create_app(None, gateway=gateway)) as server:
                yield server, gateway
            await gateway.close()


async def test_a_client_that_reads_slowly_holds_up_its_server_and_gets_everything() -> None:
    endless = Endless()
    async with endless.gateway() as (server, gateway), connected(server.url) as client:
        client.send(post(body=asked(stream=True)))
        sent = -1
        while sent != endless.sent:  # until every buffer on the way is full
            sent = endless.sent
            await asyncio.sleep(0.5)
        assert 0 < sent < 50_000_000
        endless.go_on = False
        _, _, body = await client.answer()
        assert body.endswith(b"data: [DONE]\n\n")
        assert sum(len(text) for text in re.findall(rb'"content":"(x*)', body)) >= 0.9 * sent
        await until(lambda: not gateway.running)


async def test_a_client_that_leaves_ends_its_call_also_while_another_waits_behind_it() -> None:
    for behind in (b"", post()):
        endless = Endless()
        async with endless.gateway() as (server, gateway):
            async with connected(server.url) as client:
                client.send(post(body=asked(stream=True)) + behind)
                await client.reader.readexactly(1000)
            await asyncio.wait_for(endless.left.wait(), 60)
            await until(lambda gateway=gateway: not gateway.running)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_running_call_is_answered_before_the_server_stops(stream: bool) -> None:
    reached, may_answer = asyncio.Event(), asyncio.Event()

    class Late(Upstream):
        async def answer(self, request: Request) -> Any:
            reached.set()
            await may_answer.wait()
            return await super().answer(request)

    async with Late(GOOD).backend() as backend:
        gateway = Gateway(ModelTable([ModelEntry("policy", backend)]))
        server = HttpServer(create_app(None, gateway=gateway))
        await server.start()
        async with connected(server.url) as client:
            client.send(post(body=asked(stream=stream)))
            await reached.wait()
            stopping = asyncio.create_task(server.stop())
            await asyncio.sleep(0.2)
            may_answer.set()
            status, _, body = await client.answer()
            assert status == 200 and (b"[DONE]" if stream else b"Hi!") in body
            assert await client.reader.read() == b""
        await asyncio.wait_for(stopping, 60)
        await gateway.close()


async def test_requests_that_come_at_once_cost_the_same_each_however_many(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has no key sends them too."""
    receive = GuardedProtocol.data_received
    costs: list[tuple[int, float]] = []

    def timed(protocol: GuardedProtocol, data: bytes) -> None:
        began = time.thread_time()
        receive(protocol, data)
        costs.append((len(data), (time.thread_time() - began) / len(data)))

    monkeypatch.setattr(GuardedProtocol, "data_received", timed)
    few = min([await _cost(url, 500, costs) for _ in range(5)])
    # the garbage of all tests before is collected in one or the other
    many = min([await _cost(url, 12_000, costs) for _ in range(5)])
    assert many < 4 * few


async def _cost(url: str, requests: int, costs: list[tuple[int, float]]) -> float:
    """Seconds for a byte of these, in the largest part that came at once."""
    costs.clear()
    async with connected(url) as client:
        client.send(b"GET / HTTP/1.1\r\n\r\n" * requests)
        with suppress(ConnectionError):
            await client.reader.read(1)
    return max(costs)[1]
