"""Requests to a server over kept connections, against a real socket that answers as it likes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trustme

from agentlightning.errors import BackendError
from agentlightning.gateway.backends.connection import BROKE_OFF, UNREACHABLE, BackendConnection

pytestmark = pytest.mark.anyio

Answering = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Server:
    """Reads requests and answers each by `answering(request, writer)`."""

    def __init__(self, answering: Answering) -> None:
        self.connections = 0
        self.requests: list[bytes] = []
        self.listening: asyncio.Server | None = None
        self._answering = answering
        self._writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        try:
            while not writer.is_closing():
                request = await reader.readuntil(b"\r\n\r\n")
                for line in request.lower().split(b"\r\n"):
                    if line.startswith(b"content-length:"):
                        request += await reader.readexactly(int(line.partition(b":")[2]))
                self.requests.append(request)
                await self._answering(request, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def leave(self) -> None:
        """Close the port and all connections."""
        assert self.listening is not None
        self.listening.close()
        for writer in self._writers:
            writer.close()
        await asyncio.sleep(0.05)


@asynccontextmanager
async def before(
    answering: Answering, silence_seconds: float = 5.0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[BackendConnection, Server]]:
    server = Server(answering)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls)
    server.listening = listening
    port = listening.sockets[0].getsockname()[1]
    url = f"https://localhost:{port}" if tls else f"http://127.0.0.1:{port}"
    connection = BackendConnection(f"{url}/v1", timeout_seconds=silence_seconds)
    connection.retries = False
    try:
        yield connection, server
    finally:
        await connection.close()
        listening.close()


def saying(answer: bytes, *, then_close: bool = False) -> Answering:
    async def answering(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()
        if then_close:
            writer.close()

    return answering


async def ask(connection: BackendConnection, body: bytes | None = b"{}", **headers: str) -> bytes:
    async with connection.posted(connection.url("x"), body, headers) as response:
        return await response.read()


async def test_a_connection_is_used_again_and_calls_at_once_have_one_each() -> None:
    async with before(saying(OK)) as (connection, server):
        assert [await ask(connection, a="b") for _ in range(3)] == [b"ok"] * 3
        assert server.connections == 1
        line, *headers, _, body = server.requests[0].lower().split(b"\r\n")
        assert line == b"post /v1/x http/1.1" and body == b"{}"
        assert {
            b"a: b",
            b"content-length: 2",
            b"accept-encoding: identity",
            b"user-agent: agentlightning",
        } <= set(headers)
        with pytest.raises(BackendError, match="line break"):
            await ask(connection, session="a\r\nx-evil: 1")  # a header cannot smuggle another
        assert len(server.requests) == 3
        assert await asyncio.gather(*(ask(connection) for _ in range(20))) == [b"ok"] * 20
        assert server.connections <= 21


@pytest.mark.parametrize(
    ("answer", "closes", "body"),
    [
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n",
            False,
            b"abcde",
        ),
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", True, b"until the end"),
        (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx",
            False,
            b"x",
        ),
        (b"HTTP/1.1 204 No Content\r\n\r\n", False, b""),
    ],
)
async def test_bodies_end_as_their_heads_say(answer: bytes, closes: bool, body: bytes) -> None:
    async with before(saying(answer, then_close=closes)) as (connection, server):
        assert await ask(connection, None) == body
        assert await ask(connection) == body
        assert server.connections == (2 if closes else 1)


async def test_a_kept_connection_that_the_server_has_closed_costs_nothing() -> None:
    async def answers_once(request: bytes, writer: asyncio.StreamWriter) -> None:
        if server.requests.count(request) == 1 and server.connections == 1:
            writer.write(OK)
        elif server.connections == 1:
            writer.close()  # reads the second request on the kept connection, and closes
        else:
            writer.write(OK)

    async with before(answers_once) as (connection, server):
        assert await ask(connection) == b"ok"
        assert await ask(connection) == b"ok"
        assert server.connections == 2


async def test_a_server_that_is_gone_is_not_asked_for_ever() -> None:
    async with before(saying(OK)) as (connection, server):
        assert await ask(connection) == b"ok"
        assert await ask(connection) == b"ok"  # on the same connection
        assert server.connections == 1
        await server.leave()
        with pytest.raises(BackendError, match="cannot be reached"):
            await asyncio.wait_for(ask(connection), 5)


async def test_an_unasked_answer_is_no_answer_to_the_next_request() -> None:
    async def answers_twice(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(OK.replace(b"ok", b"no"))

    async with before(answers_twice) as (connection, server):
        assert await ask(connection) == b"ok"
        await asyncio.sleep(0.2)
        assert await ask(connection) == b"ok"
        assert server.connections == 2


async def test_requests_during_and_after_the_end_leave_nothing_open() -> None:
    async with before(saying(OK)) as (connection, server):
        async with connection.posted(connection.url("x"), b"") as response:
            ending = asyncio.create_task(connection.close())
            await asyncio.sleep(0.05)
            assert not ending.done() and await response.read() == b"ok"
        await ending
        assert await ask(connection) == b"ok"
        assert server.connections == 2
        assert await ask(connection) == b"ok"
        assert server.connections == 3


async def test_a_redirect_is_an_answer() -> None:
    async with before(
        saying(b"HTTP/1.1 307 Away\r\nlocation: /v1/y\r\ncontent-length: 0\r\n\r\n")
    ) as (
        connection,
        server,
    ):
        async with connection.posted(connection.url("x"), b"{}") as response:
            assert response.status == 307
        assert len(server.requests) == 1


async def test_a_server_that_does_not_read_is_not_waited_for() -> None:
    async def reads_nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(5)
        writer.close()

    async with await asyncio.start_server(reads_nothing, "127.0.0.1", 0, limit=1024) as listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
        connection = BackendConnection(url, timeout_seconds=0.3)
        connection.retries = False
        with pytest.raises(BackendError, match="fell silent"):
            await asyncio.wait_for(ask(connection, bytes(1 << 26)), 5)
        await connection.close()


async def test_a_server_that_sends_more_than_is_read_has_to_wait() -> None:
    sent = 0

    async def floods(_: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 67108864\r\n\r\n")
        for _ in range(1024):
            writer.write(bytes(65536))
            await writer.drain()
            sent += 65536

    async with (
        before(floods) as (connection, _),
        connection.posted(connection.url("x"), b"") as response,
    ):
        await asyncio.sleep(0.3)
        assert sent < 32 * 2**20, (
            "what nobody reads waits in the sockets and a little here, not all of it in memory"
        )
        assert len(await response.read()) == 64 * 2**20


@pytest.mark.parametrize(
    ("answer", "closes", "code", "says"),
    [
        (b"", False, "timeout", "fell silent"),
        (b"", True, UNREACHABLE, "closed the connection"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", True, BROKE_OFF, "broke off"),
    ],
)
async def test_silence_and_lost_connections_are_told_apart(
    answer: bytes, closes: bool, code: str, says: str
) -> None:
    async with before(saying(answer, then_close=closes), silence_seconds=5 if closes else 0.1) as (
        connection,
        _,
    ):
        with pytest.raises(BackendError, match=says) as told:
            await ask(connection)
        assert told.value.code == code


async def test_nonsense_in_the_middle_of_an_answer_ends_it() -> None:
    async def answering(_: bytes, writer: asyncio.StreamWriter) -> None:
        for part in (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n",
            b"no number\r\n",
        ):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.1)

    async with (
        before(answering, silence_seconds=60) as (connection, _),
        connection.posted(connection.url("x"), b"") as response,
    ):
        parts = response.parts()
        assert await anext(parts) == b"ok"
        with pytest.raises(BackendError, match="speak HTTP") as told:
            await asyncio.wait_for(anext(parts), 5)
    assert told.value.code == BROKE_OFF


async def test_a_certificate_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    async with before(saying(OK), tls=context) as (connection, _):
        with pytest.raises(BackendError, match="certificate"):
            await ask(connection)
        trusting = ssl.create_default_context()
        authority.configure_trust(trusting)
        monkeypatch.setattr("aiohttp.connector._SSL_CONTEXT_VERIFIED", trusting)
        assert await ask(connection) == b"ok"
