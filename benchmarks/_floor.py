"""The least that such a gateway can be made of: httptools reads requests and answers on bare
sockets, and SQLite keeps the requests and, of each answer, as many bytes as ids and logprobs take.
Nothing else is parsed. Under `/captured` a call is durable before the end of its answer goes back;
under `/queued` the answer does not wait for that.

    python benchmarks/_floor.py UPSTREAM FILE        prints where it listens
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import sys
import threading
from typing import Any
from urllib.parse import urlsplit

import httptools
from _upstream import PROMPT_TOKENS, SAMPLED_TOKENS

KEPT = 4 * (PROMPT_TOKENS + 2 * SAMPLED_TOKENS)  # bytes: ids and logprobs as int32 and float32


class Keeper(threading.Thread):
    """Writes rows in groups that share a commit."""

    def __init__(self, file: str) -> None:
        super().__init__(daemon=True)
        self._loop = asyncio.get_running_loop()
        self._file = file
        self._rows = queue.SimpleQueue[tuple[tuple[bytes, bytes], asyncio.Future[None]]]()
        self.start()

    def keep(self, request: bytes, answer: bytes) -> asyncio.Future[None]:
        future: asyncio.Future[None] = self._loop.create_future()
        self._rows.put(((request, answer), future))
        return future

    def run(self) -> None:
        connection = sqlite3.connect(self._file, isolation_level=None)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("CREATE TABLE calls (request BLOB, answer BLOB)")
        while True:
            batch = [self._rows.get()]
            while not self._rows.empty():
                batch.append(self._rows.get())
            connection.execute("BEGIN")
            connection.executemany("INSERT INTO calls VALUES (?, ?)", [row for row, _ in batch])
            connection.execute("COMMIT")
            self._loop.call_soon_threadsafe(
                lambda kept: [one.set_result(None) for _, one in kept], batch
            )


class Reader(asyncio.Protocol):
    """A connection whose messages are read one after the other; `body` holds what has come of
    one."""

    def __init__(self, parser: Any) -> None:
        self.parser = parser(self)
        self.body = b""
        self.whole = False

    def connection_made(self, transport: Any) -> None:
        self.transport: asyncio.Transport = transport

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)
        self.read()

    def on_body(self, part: bytes) -> None:
        self.body += part

    def on_message_complete(self) -> None:
        self.whole = True

    def read(self) -> None:
        """As much has come as was read at once."""
        raise NotImplementedError


class Floor:
    """Where calls go, and what keeps them."""

    def __init__(self, upstream: str, file: str) -> None:
        self.host, self.port = urlsplit(upstream).hostname or "", urlsplit(upstream).port or 80
        self.keeper = Keeper(file)
        self.idle: list[Upstream] = []

    async def connected(self, caller: Caller) -> None:
        made = await asyncio.get_running_loop().create_connection(
            lambda: Upstream(self), self.host, self.port
        )
        made[1].ask(caller)


class Caller(Reader):
    """Asks one thing at a time."""

    def __init__(self, floor: Floor) -> None:
        super().__init__(httptools.HttpRequestParser)
        self._floor = floor
        self._target = b""

    def on_url(self, url: bytes) -> None:
        self._target = url

    def read(self) -> None:
        if not self.whole:
            return
        self.whole = False
        if self._floor.idle:
            self._floor.idle.pop().ask(self)
        else:
            self._connecting = asyncio.ensure_future(self._floor.connected(self))

    @property
    def request(self) -> bytes:
        path = self._target.split(b"/", 2)[2]
        head = b"POST /%b HTTP/1.1\r\nhost: upstream\r\ncontent-length: %d\r\n\r\n"
        return head % (path, len(self.body)) + self.body

    def answered(self, last: bytes, answer: bytes) -> None:
        """Send the `last` bytes of an answer when it is kept."""
        kept = self._floor.keeper.keep(self.body, answer[:KEPT])
        self.body = b""
        if self._target.startswith(b"/captured"):
            kept.add_done_callback(lambda _: self.transport.write(last))
        else:
            self.transport.write(last)


class Upstream(Reader):
    """A connection to it, which is used again."""

    def __init__(self, floor: Floor) -> None:
        super().__init__(httptools.HttpResponseParser)
        self._floor = floor
        self._head = b""
        self._sent = 0  # bytes of the body

    def ask(self, caller: Caller) -> None:
        self._caller, self.body, self.whole, self._sent = caller, b"", False, 0
        self.transport.write(caller.request)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            streamed = value.startswith(b"text/event-stream")
            self._head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n" % value
            self._head += b"transfer-encoding: chunked\r\n\r\n" if streamed else b""
            self._streamed = streamed

    def read(self) -> None:
        part, data = self.body[self._sent :], b""
        if self._streamed and part:
            data, self._head, self._sent = (
                b"%b%x\r\n%b\r\n" % (self._head, len(part), part),
                b"",
                len(self.body),
            )
        if not self.whole:
            self._caller.transport.write(data)
            return
        end = b"%bcontent-length: %d\r\n\r\n%b" % (self._head, len(self.body), self.body)
        if self._streamed:
            self._caller.transport.write(data)
            end = b"0\r\n\r\n"
        self._floor.idle.append(self)
        self._caller.answered(end, self.body)


async def main(upstream: str, file: str) -> None:
    floor = Floor(upstream, file)
    server = await asyncio.get_running_loop().create_server(
        lambda: Caller(floor), "127.0.0.1", 0, backlog=2048
    )
    print(f"floor at http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    import uvloop

    uvloop.run(main(*sys.argv[1:]))
