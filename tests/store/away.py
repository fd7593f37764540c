"""What stands between a client and its store in these tests: a server in a process of its own, that can be killed and
started again on its port, and a TCP proxy that loses answers."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import sys
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

from aiohttp import web

from agentlightning.types import AttemptedRollout, Span

ADMIN_KEY = "an admin's key"
# Below the ports that systems give to outgoing connections: the port stays free while the server is down.
PORTS = range(20000, 30000)

SERVER = """
import asyncio, sys
from agentlightning.server.app import create_app
from agentlightning.server.serve import HttpServer
from agentlightning.store.sql import SqlStore

async def main():
    store = await SqlStore.open(sys.argv[1])
    async with HttpServer(create_app(store, admin_key=sys.argv[3]), port=int(sys.argv[2])):
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def free_port() -> int:
    while True:
        port = random.choice(PORTS)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class ServerProcess:
    """A server of the store in `path`, while it runs; `url` stays the same over restarts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", SERVER, str(self._path), str(self._port), ADMIN_KEY), stdout=asyncio.subprocess.PIPE
        )
        assert self._process.stdout is not None
        assert await asyncio.wait_for(self._process.stdout.readline(), 60) == b"ready\n"

    async def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            await self._process.wait()
            self._process = None

    async def __aenter__(self) -> ServerProcess:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()


class CuttingProxy:
    """Forwards bytes to a server. Each of the next `cuts` answers is thrown away, with its connection."""

    def __init__(self, url: str) -> None:
        self._host, self._port = urlsplit(url).hostname, urlsplit(url).port
        self.url = ""
        self.cuts = 0
        self.cut = 0

    async def serve(self, from_client: StreamReader, to_client: StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection(self._host, self._port)
        asking = asyncio.create_task(forward(from_client, to_server))
        try:
            while data := await from_server.read(65536):
                if self.cuts:
                    self.cuts -= 1
                    self.cut += 1
                    return
                to_client.write(data)
        finally:
            asking.cancel()
            to_client.close()
            to_server.close()


async def forward(reader: StreamReader, writer: StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()


@asynccontextmanager
async def cutting(url: str) -> AsyncIterator[CuttingProxy]:
    proxy = CuttingProxy(url)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield proxy
    server.close()


class Stranger:
    """An HTTP server that is not ours: gives one prepared answer after the other, the last one again and again."""

    def __init__(self, *answers: web.Response) -> None:
        self._answers = list(answers)
        self.url = ""
        self.asked: list[float] = []

    async def answer(self, request: web.Request) -> web.Response:
        await request.read()
        self.asked.append(asyncio.get_running_loop().time())
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return web.Response(body=answer.body, status=answer.status, headers=answer.headers)


@asynccontextmanager
async def strange(*answers: web.Response) -> AsyncIterator[Stranger]:
    stranger = Stranger(*answers)
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", stranger.answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    stranger.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield stranger
    await runner.cleanup()


def numbered_span(leased: AttemptedRollout, number: int, **attributes: object) -> Span:
    return Span(
        rollout_id=leased.rollout_id,
        attempt_id=leased.attempt.attempt_id,
        sequence_id=0,
        trace_id="trace",
        span_id=f"{number:016x}",
        name="step",
        start_time=1.0,
        end_time=2.0,
        attributes={"number": number, **attributes},
    )


def numbers(spans: list[Span]) -> list[int]:
    """The numbers of `numbered_span`s in the order in which they reached the store."""
    return [span.attributes["number"] for span in sorted(spans, key=lambda span: span.sequence_id)]
