"""Callers that cost next to nothing: one keep-alive connection each, over bare sockets, and when
each byte came.

They know HTTP/1.1 as far as a server here answers it, and nothing of what is in a body.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import urlsplit


@dataclass
class Calls:
    """Answered calls: seconds from the first request to the last answer, and of each call the
    seconds to the first byte of the body and to the last."""

    seconds: float = 0.0
    first: list[float] = field(default_factory=list[float])
    whole: list[float] = field(default_factory=list[float])

    def __len__(self) -> int:
        return len(self.whole)


class Caller(asyncio.Protocol):
    """Sends requests in turn, again and again: one now, and one more after each answer for which
    `go_on()` holds.

    With `pause` it waits so many seconds after whatever it has read before it reads on."""

    def __init__(
        self, requests: Sequence[bytes], calls: Calls, go_on: Callable[[], bool], pause: float
    ) -> None:
        self._requests = itertools.cycle(requests)
        self._pause = pause
        self._calls = calls
        self._go_on = go_on
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._received = b""
        self._sent = self._first = 0.0

    def connection_made(self, transport: Any) -> None:
        self._transport: asyncio.Transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(
                exc or ConnectionResetError("the server hung up before its answer was complete")
            )

    def start(self) -> asyncio.Future[None]:
        """Send the first request. The future is resolved with the last answer."""
        self._done = asyncio.get_running_loop().create_future()
        self._send()
        return self._done

    def close(self) -> None:
        if not self._done.done():
            self._done.cancel()
        self._transport.close()

    def _send(self) -> None:
        self._first = 0.0
        self._sent = time.perf_counter()
        self._transport.write(next(self._requests))

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._pause:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(self._pause, self._transport.resume_reading)
        received = self._received = self._received + data if self._received else data
        body = received.find(b"\r\n\r\n") + 4
        if body < 4 or len(received) == body:
            return
        self._first = self._first or now
        place = received.find(b"content-length: ", 0, body)
        if place < 0:
            whole = received.endswith(b"\r\n0\r\n\r\n")  # it is chunked
        else:
            whole = len(received) >= body + int(received[place + 16 : received.index(b"\r", place)])
        if whole:
            self._received = b""
            self._answered(received, now)

    def _answered(self, received: bytes, now: float) -> None:
        if not received.startswith(b"HTTP/1.1 200"):
            self._done.set_exception(ConnectionError(received[:500].decode(errors="replace")))
            return
        self._calls.first.append(self._first - self._sent)
        self._calls.whole.append(now - self._sent)
        if self._go_on():
            self._send()
        else:
            self._done.set_result(None)


def post(url: str, body: bytes, api_key: str = "none") -> bytes:
    """The bytes of a request such as an SDK sends."""
    parts = urlsplit(url)
    head = (
        f"POST {parts.path} HTTP/1.1\r\n"
        f"host: {parts.netloc}\r\n"
        f"authorization: Bearer {api_key}\r\n"
        "accept: application/json\r\n"
        "content-type: application/json\r\n"
        "user-agent: OpenAI/Python 2.8.0\r\n"
        "accept-encoding: gzip, deflate\r\n"
        f"content-length: {len(body)}\r\n"
        "\r\n"
    )
    return head.encode() + body


Requests: TypeAlias = bytes | Sequence[bytes]
"""What a caller sends: one request again and again, or several in turn."""


async def connect(
    url: str,
    requests: Requests,
    calls: Calls,
    go_on: Callable[[], bool] = lambda: False,
    pause: float = 0.0,
) -> Caller:
    parts, several = urlsplit(url), [requests] if isinstance(requests, bytes) else requests
    connection = socket.socket()
    if pause:
        # who reads slowly leaves it with the server
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, (parts.hostname, parts.port or 80))
    _, caller = await loop.create_connection(
        lambda: Caller(several, calls, go_on, pause), sock=connection
    )
    return caller


async def call_for(seconds: float, url: str, requests: Sequence[bytes]) -> Calls:
    """One caller for each request, all at once, for so many seconds. What is being answered at the
    end counts.

    ConnectionError, with the answer, if a call is not answered with 200."""
    calls = Calls()
    end = 0.0
    callers = [
        await connect(url, request, calls, lambda: time.perf_counter() < end)
        for request in requests
    ]
    begin = time.perf_counter()
    end = begin + seconds
    await asyncio.gather(*(caller.start() for caller in callers))
    calls.seconds = time.perf_counter() - begin
    for caller in callers:
        caller.close()
    return calls


async def call_each(
    count: int, url: str, requests: Sequence[Requests], pause: float = 0.0
) -> Calls:
    """One caller for each request, all at once: it connects, which is part of the time, and makes
    `count` calls."""
    calls = Calls()

    async def call(request: Requests) -> None:
        further = iter(range(count - 1))
        caller = await connect(url, request, calls, lambda: next(further, None) is not None, pause)
        await caller.start()
        caller.close()

    begin = time.perf_counter()
    await asyncio.gather(*map(call, requests))
    calls.seconds = time.perf_counter() - begin
    return calls


async def call_in_turn(count: int, callers: Sequence[Caller]) -> None:
    """Each of the callers makes a call, one after the other, `count` times."""
    for _ in range(count):
        for caller in callers:
            await caller.start()
