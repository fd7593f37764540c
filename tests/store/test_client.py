"""The client against a server that goes away, answers that get lost, and strangers at the
address."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from aiohttp import web

from agentlightning.errors import ConfigError, ForbiddenError, InvalidError, UnavailableError
from agentlightning.server.app import create_app
from agentlightning.server.serve import HttpServer
from agentlightning.store.client import LightningStoreClient
from agentlightning.types import PromptTemplate
from tests.store.away import ADMIN_KEY, cutting, strange
from tests.store.conftest import opened, span_of
from tests.store.server_process import free_port

pytestmark = pytest.mark.anyio

HTML = {"Content-Type": "text/html"}
PAGE = b"<html><head><title>Welcome to nginx</title></head></html>"
STATISTICS = b"\x81\xa8rollouts\x05"  # {"rollouts": 5} in msgpack
MSGPACK = {"Content-Type": "application/msgpack"}


@pytest.fixture
async def sql(tmp_path, anyio_backend):
    async with opened(tmp_path / "store.db") as store:
        yield store


@pytest.fixture
async def lossy(sql):
    """(a client, the proxy that loses its answers, the store behind both)."""
    async with (
        HttpServer(create_app(sql, admin_key=ADMIN_KEY)) as server,
        cutting(server.url) as proxy,
    ):
        client = LightningStoreClient(proxy.url, ADMIN_KEY, patience=30)
        yield client, proxy, sql
        await client.close()


@contextlib.asynccontextmanager
async def client_of(url: str, patience: float = 30.0):
    client = LightningStoreClient(url, ADMIN_KEY, patience=patience)
    try:
        yield client
    finally:
        await client.close()


@pytest.mark.parametrize(
    ("ask", "adds"),
    [
        (lambda store: store.enqueue_rollout("task"), {"rollouts": 1, "rollouts_queuing": 1}),
        (
            lambda store: store.start_rollout("task"),
            {"rollouts": 1, "rollouts_preparing": 1, "attempts": 1},
        ),
        (lambda store: store.start_run("rl", {}), {"runs": 1}),
        (lambda store: store.create_group(4), {"groups": 1}),
        (
            lambda store: store.add_resources({"main": PromptTemplate(template="hi")}),
            {"resources": 1},
        ),
    ],
    ids=["enqueue_rollout", "start_rollout", "start_run", "create_group", "add_resources"],
)
async def test_what_was_made_when_the_answer_was_lost_is_not_made_twice(lossy, ask, adds):
    client, proxy, sql = lossy
    before = await sql.statistics()
    proxy.cuts = 2
    await ask(client)
    assert proxy.cut == 2
    after = await sql.statistics()
    assert {
        name: count - before.get(name, 0)
        for name, count in after.items()
        if count != before.get(name, 0)
    } == adds


@pytest.mark.parametrize("timeout", [0.0, 20.0])
async def test_a_lease_whose_answer_was_lost_is_handed_out_again_to_the_same_caller(lossy, timeout):
    client, proxy, sql = lossy
    queued = [await sql.enqueue_rollout(index) for index in range(3)]
    proxy.cuts = 2
    leased = await client.dequeue_many_rollouts(2, "worker", timeout)
    assert proxy.cut == 2
    assert [rollout.rollout_id for rollout in leased] == [
        rollout.rollout_id for rollout in queued[:2]
    ]
    for rollout in leased:
        assert [attempt.attempt_id for attempt in await sql.query_attempts(rollout.rollout_id)] == [
            rollout.attempt.attempt_id
        ]
        beat = await client.heartbeat(
            rollout.rollout_id, rollout.attempt.attempt_id, rollout.lease.token
        )
        assert beat.status == "preparing"
    assert (await sql.get_rollout_by_id(queued[2].rollout_id)).status == "queuing"


async def test_a_lease_that_came_while_waiting_is_not_lost_with_its_answer(lossy):
    client, proxy, sql = lossy
    proxy.cuts = 1
    waiting = asyncio.create_task(client.dequeue_rollout(timeout=60))
    await asyncio.sleep(0.1)
    queued = await sql.enqueue_rollout("late")
    leased = await asyncio.wait_for(waiting, 60)
    assert (leased.rollout_id, proxy.cut) == (queued.rollout_id, 1)
    assert len(await sql.query_attempts(queued.rollout_id)) == 1


async def test_the_start_spans_and_end_of_an_attempt_arrive_once(lossy):
    client, proxy, sql = lossy
    first = await sql.start_rollout("task")
    proxy.cuts = 2
    leased = await client.start_attempt(first.rollout_id)
    attempts = [attempt.attempt_id for attempt in await sql.query_attempts(first.rollout_id)]
    assert attempts == [first.attempt.attempt_id, leased.attempt.attempt_id]
    proxy.cuts = 2
    stored = await client.add_many_spans([span_of(leased) for _ in range(5)])
    assert [span.sequence_id for span in stored] == [1, 2, 3, 4, 5]
    proxy.cuts = 2
    ended = await client.update_attempt(
        leased.rollout_id, leased.attempt.attempt_id, status="succeeded", lease=leased.lease.token
    )
    assert (ended.status, proxy.cut) == ("succeeded", 6)
    assert len(await sql.query_spans(leased.rollout_id)) == 5


async def test_a_call_that_could_be_done_twice_is_not_repeated(lossy):
    client, proxy, sql = lossy
    proxy.cuts = 1
    with pytest.raises(UnavailableError, match=r"carried it out \(issue key\)"):
        await client.issue_key(name="ci", scopes=["read"])
    assert len(await sql.query_keys()) == 1
    leased = await sql.start_rollout(1)
    proxy.cuts = 1
    with pytest.raises(UnavailableError, match=r"carried it out \(update rollout\)"):
        await client.update_rollout(leased.rollout_id, status="requeuing")


async def test_even_a_call_that_must_not_be_repeated_waits_for_a_server_that_is_not_there_yet(sql):
    port = free_port()
    async with client_of(f"http://127.0.0.1:{port}") as client:
        issuing = asyncio.create_task(client.issue_key(name="ci", scopes=["read"]))
        await asyncio.sleep(0.3)
        async with HttpServer(create_app(sql, admin_key=ADMIN_KEY), port=port):
            assert (await issuing).name == "ci"


async def test_a_server_that_stays_away_is_named_at_once_and_with_how_long_it_was_tried(
    monkeypatch, caplog
):
    monkeypatch.setattr("agentlightning.store.client._SILENT_SECONDS", 0.05)
    async with client_of(f"http://127.0.0.1:{free_port()}", patience=0.5) as client:
        with pytest.raises(
            UnavailableError, match=rf"{client.url} cannot be reached .*tried for 0\.\d s"
        ):
            await client.statistics()
        assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [
            f"the server at {client.url} cannot be reached"
        ]


async def test_a_value_that_cannot_be_sent_is_refused_here(lossy):
    client, _, _ = lossy
    with pytest.raises(InvalidError, match="POST /rollouts cannot be sent"):
        await client.enqueue_rollout(object())
    with pytest.raises(InvalidError, match="cannot be sent"):
        await client.enqueue_rollout(2**70)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504, 520])
async def test_a_proxy_that_cannot_reach_the_server_is_asked_again(status):
    down = web.Response(status=status, body=b"<html>restarting</html>", headers=HTML)
    async with strange(down, down, web.Response(body=STATISTICS, headers=MSGPACK)) as proxy:
        async with client_of(proxy.url) as client:
            assert await client.statistics() == {"rollouts": 5}
        assert len(proxy.asked) == 3


async def test_a_server_that_asks_to_be_left_alone_is_left_alone():
    busy = web.Response(status=429, headers={"Retry-After": "1"})
    async with (
        strange(busy, web.Response(body=STATISTICS, headers=MSGPACK)) as server,
        client_of(server.url) as client,
    ):
        assert await client.statistics() == {"rollouts": 5}
    first, second = server.asked
    assert second - first >= 1


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        *(
            (web.Response(status=status, body=PAGE, headers=HTML), ConfigError, "to nginx")
            for status in (200, 400, 404)
        ),
        (
            web.Response(status=301, headers={"Location": "https://a.example/"}),
            ConfigError,
            "redirects to https://a",
        ),
        (
            web.Response(status=401, body=PAGE, headers=HTML),
            ForbiddenError,
            "stands before the server",
        ),
        (web.Response(body=b"\x93\x01\x02\x03", headers=MSGPACK), ConfigError, "same version"),
        (
            web.Response(status=502, body=b"<title>gone</title>", headers=HTML),
            UnavailableError,
            "502 Bad Gateway .*gone",
        ),
        (web.Response(status=503, headers={"Retry-After": "3600"}), UnavailableError, "of 0.3 s"),
    ],
)
async def test_a_strangers_answer_is_not_taken_for_the_stores(answer, error, says):
    async with strange(answer) as server, client_of(server.url, patience=0.3) as client:
        with pytest.raises(error, match=says):
            await asyncio.wait_for(client.get_rollout_by_id("ro-1"), 60)


async def test_a_server_of_ours_without_a_store_says_so():
    async with HttpServer(create_app(None)) as server, client_of(server.url) as client:
        with pytest.raises(ConfigError, match="must be the server of a store"):
            await client.get_rollout_by_id("ro-1")


@pytest.mark.parametrize("url", ["localhost:8000", "http://", "http://[::1", "ftp://host"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ConfigError, match="URL"):
        LightningStoreClient(url)


async def test_https_to_a_server_without_it_is_explained(sql):
    async with HttpServer(create_app(sql)) as server:
        url = server.url.replace("http:", "https:")
        async with client_of(url, patience=0.3) as client:
            with pytest.raises(UnavailableError, match=f"{url} cannot be reached .*SSL"):
                await client.statistics()
