"""The least that such a gateway can be made of: uvicorn takes a request, aiohttp forwards it, SQLite keeps it and, of
its answer, as many bytes as ids and logprobs take. Nothing is parsed. Under `/captured` it is durable before the end of
the answer goes back; under `/queued` the answer does not wait for that.

    python benchmarks/_floor.py UPSTREAM FILE        prints where it listens
"""

from __future__ import annotations

import asyncio
import queue
import socket
import sqlite3
import sys
import threading
from typing import Any

import aiohttp
import uvicorn
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
            self._loop.call_soon_threadsafe(lambda kept: [one.set_result(None) for _, one in kept], batch)


class Floor:
    """The ASGI application."""

    def __init__(self, upstream: str, file: str) -> None:
        self._upstream = upstream
        self._keeper = Keeper(file)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        more = True
        while more:
            message = await receive()
            body += message["body"]
            more = message["more_body"]
        _, way, path = scope["path"].split("/", 2)
        headers = {"content-type": "application/json"}
        async with self._session.post(f"{self._upstream}/{path}", data=body, headers=headers) as response:
            if streamed := response.content_type == "text/event-stream":
                await send(_start(response.content_type))
                answer = b""
                async for part in response.content.iter_any():
                    answer += part
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            else:
                answer = await response.read()
        kept = self._keeper.keep(body, answer[:KEPT])
        if way == "captured":
            await kept
        if not streamed:
            await send(_start(response.content_type, (b"content-length", b"%d" % len(answer))))
        await send({"type": "http.response.body", "body": b"" if streamed else answer})


def _start(content_type: str, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    told = [(b"content-type", content_type.encode()), *headers]
    return {"type": "http.response.start", "status": 200, "headers": told}


async def main(upstream: str, file: str) -> None:
    listening = socket.create_server(("127.0.0.1", 0), backlog=2048)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    config = uvicorn.Config(Floor(upstream, file), http="httptools", ws="none", lifespan="off", log_config=None)
    print(f"floor at http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    await uvicorn.Server(config).serve([listening])


if __name__ == "__main__":
    import uvloop

    uvloop.run(main(*sys.argv[1:]))
