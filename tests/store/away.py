"""What stands between a client and its store: a TCP proxy that loses answers, and servers that are not ours."""

from __future__ import annotations

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from aiohttp import web

ADMIN_KEY = "an admin's key"


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
