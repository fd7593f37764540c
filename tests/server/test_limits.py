"""Rate limits: fair to each caller, and of no use to who invents keys."""

from __future__ import annotations

import aiohttp
import pytest

from agentlightning.errors import ConfigError
from agentlightning.server.app import create_app
from agentlightning.server.limits import Buckets
from agentlightning.server.serve import HttpServer
from agentlightning.store.client import LightningStoreClient
from tests.server.conftest import ADMIN_KEY

pytestmark = pytest.mark.anyio
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}


def test_two_seconds_worth_may_come_at_once_and_then_as_much_as_flows_in():
    buckets = Buckets(rate=10)
    assert [buckets.take(b"a", now=0.0) for _ in range(20)] == [0.0] * 20
    assert buckets.take(b"a", now=0.0) == pytest.approx(0.1)
    assert buckets.take(b"b", now=0.0) == 0.0
    assert buckets.take(b"a", now=0.1) == 0.0
    assert buckets.take(b"a", now=0.1) > 0
    assert [buckets.take(b"a", now=100.0) for _ in range(20)] == [0.0] * 20
    assert buckets.take(b"a", now=100.0) > 0


def test_a_limit_below_one_a_second_lets_one_through():
    buckets = Buckets(rate=0.1)
    assert buckets.take(b"a", now=0.0) == 0.0
    assert buckets.take(b"a", now=0.0) == pytest.approx(10)


def test_memory_is_bounded_and_the_quiet_are_forgotten_first():
    buckets = Buckets(rate=1, remembered=100)
    for number in range(1000):
        buckets.take(str(number).encode(), now=0.0)
        buckets.take(b"busy", now=0.0)
    assert len(buckets) == 100
    assert b"busy" in buckets


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf")])
def test_a_rate_that_limits_nothing_sensible_is_refused(rate):
    with pytest.raises(ConfigError, match="rate limit"):
        Buckets(rate)


async def test_who_asks_too_often_is_told_when_to_ask_again(store):
    app = create_app(store, admin_key=ADMIN_KEY, rate_limit=0.01)  # one request, then one in 100 s
    async with HttpServer(app) as server, aiohttp.ClientSession(server.url) as http:
        # The address's one request, and that of the key which it made known.
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
            (await http.get("/api/v1/statistics", headers={"x-api-key": f"invented-{number}"})).status
            for number in range(100)
        ]
        assert statuses[0] == 401
        assert 429 in statuses
        assert (await http.get("/api/v1/statistics", headers=ADMIN)).status == 200


async def test_a_client_of_ours_waits_and_asks_again(store):
    async with HttpServer(create_app(store, rate_limit=5)) as server:
        client = LightningStoreClient(server.url, patience=60)
        for _ in range(15):
            await client.statistics()
        await client.close()
