"""Rate limits: fair to each caller, and of no use to who invents keys."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI
from starlette.applications import Starlette

from agentlightning.errors import ConfigError
from agentlightning.gateway.app import Gateway
from agentlightning.gateway.models import ModelEntry, ModelTable
from agentlightning.semconv import CALL_DISCARDS
from agentlightning.server.app import create_app
from agentlightning.server.limits import RateLimit, Refusals, _address
from agentlightning.server.serve import HttpServer
from agentlightning.store.client import LightningStoreClient
from tests.gateway.talker import user
from tests.gateway.upstream import GOOD, Upstream
from tests.gateway.world import GREEDY
from tests.server.conftest import ADMIN_KEY

pytestmark = pytest.mark.anyio
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf")])
def test_a_rate_that_limits_nothing_sensible_is_refused(rate):
    with pytest.raises(ConfigError, match="rate limit"):
        RateLimit(Starlette(), rate, None)


async def test_addresses_share_a_bounded_memory():
    limit = RateLimit(Starlette(), 0.01, None)
    sent: list[int] = []

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        sent.append(200)

    async def send(message: Any) -> None:
        sent.append(message.get("status", 0))

    limit._app = answer
    for number in range(1000):
        scope = {"type": "http", "path": "/", "headers": [], "client": (f"2001:db8:{number:x}::1", 1)}
        await limit(scope, None, send)
    assert len(limit._limiter.storage.storage) <= 2 * 256
    assert {200, 429} <= set(sent)
    networks = {limit._slot(_address({"client": (f"2001:db8::{number:x}", 1)})) for number in range(50)}
    assert len(networks) == 1


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
            (await http.get("/api/v1/statistics", headers={"x-api-key": f"invented-{number}"})).status
            for number in range(100)
        ]
        assert statuses[0] == 401
        assert 429 in statuses
        open_to_all = [(await http.get("/", headers={"x-api-key": f"other-{n}"})).status for n in range(30)]
        assert 429 in open_to_all, "an open page makes no key known"
        assert (await http.get("/api/v1/statistics", headers=ADMIN)).status == 200


async def test_a_client_of_ours_waits_and_asks_again(store):
    async with HttpServer(create_app(store, rate_limit=5)) as server:
        client = LightningStoreClient(server.url, patience=60)
        for _ in range(15):
            await client.statistics()
        await client.close()


async def test_a_call_that_was_refused_discards_no_answer_when_it_is_repeated(store):
    """An agent that asks one question again and again, faster than it may: each answer it got is trained."""
    attempted = await store.start_rollout("task")
    async with Upstream(GOOD).backend() as backend:
        gateway = Gateway(ModelTable([ModelEntry("policy", backend, train=GREEDY)]), store)
        async with HttpServer(create_app(store, gateway=gateway, rate_limit=5)) as server:
            client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key=attempted.api_key, max_retries=5)
            ask = client.chat.completions.with_raw_response.create
            one_by_one = [await ask(model="policy", messages=user("hello")) for _ in range(14)]
            at_once = await asyncio.gather(*(ask(model="policy", messages=user("hello")) for _ in range(14)))
            assert any(answer.retries_taken for answer in one_by_one), "the limit was never met"
            assert sum(answer.retries_taken > 0 for answer in at_once) > 1
            await client.close()
        await gateway.close()
    spans = await store.query_spans(attempted.rollout_id)
    assert len(spans) == 28 and all(CALL_DISCARDS not in span.attributes for span in spans)


def test_a_refusal_is_forgotten_with_its_repetition_and_says_nothing_of_other_requests():
    def request(retries: str, path: str = "/v1/chat/completions", length: str = "10") -> dict[str, Any]:
        headers = [(b"x-stainless-retry-count", retries.encode()), (b"content-length", length.encode())]
        return {"path": path, "headers": headers}

    def is_retry(refusals: Refusals, scope: dict[str, Any]) -> bool:
        refusals.settle(scope, "a")
        return any(name == b"x-stainless-retry-count" and value != b"0" for name, value in scope["headers"])

    refusals = Refusals(remembered=2)
    for retries in ("0", "1", "0"):  # a refused retry is the same request again
        refusals.note(request(retries), "a")
    assert is_retry(refusals, request("1", length="11"))
    assert [is_retry(refusals, request("2")) for _ in range(3)] == [False, False, True]
    for length in range(3):
        refusals.note(request("0", length=str(length)), "a")
    assert [is_retry(refusals, request("1", length=str(length))) for length in range(3)] == [True, False, False]
