"""What stands between a client and its store: a TCP proxy that loses answers, and servers that are
not ours."""

from __future__ import annotations

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from aiohttp import web

ADMIN_KEY = "an admin's key"


class CuttingProxy:
    """Forwards bytes to a server. Each of the next `cuts` answers to what holds `word` is thrown
    away, with its connection; or, not `delivered`, the question is."""

    def __init__(self, url: str, word: bytes, delivered: bool) -> None:
        self._host, self._port = urlsplit(url).hostname, urlsplit(url).port
        self._word = word
        self._delivered = delivered
        self.url = ""
        self.cuts = 0
        self.cut = 0

    async def serve(self, from_client: StreamReader, to_client: StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection(self._host, self._port)
        asked = asyncio.Event()
        asking = asyncio.create_task(self._ask(from_client, to_server, asked))
        try:
            while data := await from_server.read(65536):
                if self.cuts and asked.is_set():
                    self._count()
                    return
                to_client.write(data)
        finally:
            asking.cancel()
            to_client.close()
            to_server.close()

    async def _ask(
        self, from_client: StreamReader, to_server: StreamWriter, asked: asyncio.Event
    ) -> None:
        while data := await from_client.read(65536):
            if self.cuts and self._word in data:
                if not self._delivered:
                    self._count()
                    break
                asked.set()
            to_server.write(data)
        to_server.close()

    def _count(self) -> None:
        self.cuts -= 1
        self.cut += 1


@asynccontextmanager
async def cutting(
    url: str, word: bytes = b"", delivered: bool = True
) -> AsyncIterator[CuttingProxy]:
    proxy = CuttingProxy(url, word, delivered)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.url = url.replace(f":{urlsplit(url).port}", f":{server.sockets[0].getsockname()[1]}")
    yield proxy
    server.close()


class Stranger:
    """An HTTP server that is not ours: gives one prepared answer after the other, the last one
    again and again."""

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
