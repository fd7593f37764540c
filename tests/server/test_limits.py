"""Limits of requests and of bytes: fair to each caller, and of no use to who invents keys."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentlightning.errors import ConfigError, ForbiddenError
from agentlightning.gateway.gateway import Gateway
from agentlightning.gateway.models import ModelTable
from agentlightning.server import serve
from agentlightning.server.access import Access, Principal
from agentlightning.server.app import create_app
from agentlightning.server.limits import Limited, Limits, _network, limit_of
from agentlightning.server.serve import HttpServer
from tests.gateway.upstream import until
from tests.server.conftest import ADMIN_KEY

pytestmark = pytest.mark.anyio
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf")])
def test_a_rate_that_limits_nothing_sensible_is_refused(rate):
    with pytest.raises(ConfigError, match="rate limit"):
        limit_of(rate)


@pytest.mark.parametrize("rate", [0.01, 0.15, 0.7, 1, 1.2, 3.3, 50])
def test_a_rate_is_kept_within_a_percent(rate):
    limit = limit_of(rate)
    assert limit.amount / limit.get_expiry() == pytest.approx(rate, rel=0.01)


def test_whoever_has_an_address_of_ipv6_has_its_network():
    assert {_network(f"2001:db8::{number:x}") for number in range(9)} == {"2001:db8::/64"}
    assert _network("203.0.113.7") == "203.0.113.7"


async def test_who_asks_too_often_is_told_when_to_ask_again(store):
    app = create_app(store, admin_key=ADMIN_KEY, rate_limit=0.01)  # one request, then one in 100 s
    async with HttpServer(app) as server, aiohttp.ClientSession(server.url) as http:
        assert (await http.get("/api/v1/statistics", headers=ADMIN)).status == 200
        assert (await http.get("/ready")).status == 200
        answer = await http.get("/api/v1/statistics", headers=ADMIN)
        assert answer.status == 429
        assert 1 <= int(answer.headers["retry-after"]) <= 100
        assert (await answer.json())["error"]["type"] == "rate_limited"
        for _ in range(5):
            assert (await http.get("/health")).status == 200


async def test_invented_keys_share_what_their_address_has(store):
    app = create_app(store, admin_key=ADMIN_KEY, rate_limit=5)  # ten at once
    async with HttpServer(app) as server, aiohttp.ClientSession(server.url) as http:
        # Who is known keeps a bucket of their own, however busy their address is.
        assert (await http.get("/api/v1/statistics", headers=ADMIN)).status == 200
        statuses = [
            (
                await http.get("/api/v1/statistics", headers={"x-api-key": f"invented-{number}"})
            ).status
            for number in range(100)
        ]
        assert statuses[0] == 401
        assert 429 in statuses
        open_to_all = [
            (await http.get("/", headers={"x-api-key": f"other-{n}"})).status for n in range(30)
        ]
        assert 429 in open_to_all, "an open page makes no key known"
        assert (await http.get("/api/v1/statistics", headers=ADMIN)).status == 200


async def test_addresses_share_a_bounded_memory():
    limits = Limits(None, 1000)
    for number in range(2000):
        async with limits.within("GET", "/", {}, f"203.0.{number // 250}.{number % 250}"):
            pass
    assert len(limits._limiter.storage.expirations) <= 2 * 256  # pyright: ignore


async def test_large_bodies_of_one_caller_are_read_within_a_budget():
    size, reading = 3 << 19, {"one": 0, "two": 0}
    most = dict(reading)

    async def read(request: Request) -> Response:
        name = request.headers["x-api-key"]
        await request.body()
        reading[name] += 1
        most[name] = max(most[name], reading[name])
        await asyncio.sleep(0.05)
        reading[name] -= 1
        return Response("ok")

    layers = [Middleware(Limited, limits=Limits(None, None, 2 * size, budget=2 * size))]
    app = Starlette(routes=[Route("/", read, methods=["POST"])], middleware=layers)

    async def parts() -> AsyncIterator[bytes]:
        yield b"x" * size

    async with HttpServer(app) as server, aiohttp.ClientSession(server.url) as http:

        async def post(name: str, body: Any) -> int:
            async with http.post("/", data=body, headers={"x-api-key": name}) as answer:
                return answer.status

        posts = [post(name, b"x" * size) for name in ["one"] * 7 + ["two"]]
        assert set(await asyncio.gather(*posts)) == {200}
        assert most == {"one": 2, "two": 1}
        most["one"] = 0
        assert await asyncio.gather(*(post("one", parts()) for _ in range(3))) == [200] * 3
        assert most["one"] == 1, "a body of unknown length counts as the longest"


async def test_an_attempts_key_sends_so_many_bytes_of_spans_and_no_more(store):
    access = Access(store, ADMIN_KEY)
    for attempt in ("at-1", "at-2"):
        scope = Principal("agent", frozenset(), ("ro-1", attempt))
        access.count_sent(scope, 200 << 20)
    with pytest.raises(ForbiddenError, match="attempt at-2 has sent"):
        access.count_sent(scope, 100 << 20)
    with pytest.raises(ForbiddenError, match="attempt at-3 has sent"):
        access.count_sent(Principal("agent", frozenset(), ("ro-1", "at-3")), spans=150_000)
    access.count_sent(Principal(), 1 << 40)


async def test_large_bodies_of_all_callers_have_a_total_and_wait_in_turn_for_so_long():
    size, reading = 3 << 19, 0
    most = 0
    answered = asyncio.Event()

    async def read(request: Request) -> Response:
        nonlocal reading, most
        await request.body()
        reading += 1
        most = max(most, reading)
        await answered.wait()
        reading -= 1
        return Response("ok")

    limits = Limits(None, None, 4 * size, total=3 * size, seconds=0.5)
    app = Starlette(
        routes=[Route("/", read, methods=["POST"])], middleware=[Middleware(Limited, limits=limits)]
    )
    async with HttpServer(app) as server, aiohttp.ClientSession(server.url) as http:

        async def post(name: str, length: int = size) -> tuple[int, str | None]:
            async with http.post("/", data=b"x" * length, headers={"x-api-key": name}) as answer:
                return answer.status, answer.headers.get("retry-after")

        first = [asyncio.create_task(post(f"caller {number}")) for number in range(3)]
        await until(lambda: reading == 3)
        assert await post("one more") == (503, "10")
        async with (
            asyncio.timeout(0.2),
            limits.within("POST", "/", {"content-length": "0"}, "here"),
        ):
            pass  # what is small waits for nothing
        waiting = [asyncio.create_task(post(f"later {number}")) for number in range(3)]
        await asyncio.sleep(0.05)
        answered.set()
        assert {status for status, _ in await asyncio.gather(*first, *waiting)} == {200}
        assert most == 3
        assert await post("long", 4 * size) == (200, None), (
            "a body that is longer than the total is read alone"
        )


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/v1/rollouts/query", "/v1/traces"])
@pytest.mark.parametrize("sent", [b"", b"{", b"x" * 10])
async def test_a_body_that_is_announced_and_does_not_come_is_closed_like_a_head(
    store, monkeypatch, path, sent
):
    monkeypatch.setattr(serve, "_IDLE_SECONDS", 0.3)
    async with HttpServer(create_app(store, gateway=Gateway(ModelTable(), store))) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = (
            f"POST {path} HTTP/1.1\r\n"
            "host: localhost\r\n"
            "content-type: application/json\r\n"
            "content-length: 3000000"
        )
        writer.write(f"{head}\r\n\r\n".encode() + sent)
        async with asyncio.timeout(30):
            await reader.read()
        writer.close()


async def test_a_body_that_comes_slowly_but_comes_is_read(store, monkeypatch):
    monkeypatch.setattr(serve, "_IDLE_SECONDS", 0.3)
    async with HttpServer(create_app(store)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = b"POST /api/v1/rollouts/query HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(head + b"content-length: 800002\r\n\r\n{")
        for _ in range(8):
            writer.write(b" " * 100_000)
            await writer.drain()
            await asyncio.sleep(0.1)
        writer.write(b"}")
        assert b" 200 " in await reader.readline()
        writer.close()
