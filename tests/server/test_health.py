"""What operators ask of a server: whether it lives, whether it can work, and how much it does."""

from __future__ import annotations

import aiohttp
import anyio
import anyio.lowlevel
import pytest
from prometheus_client.parser import text_string_to_metric_families

from agentlightning.server.app import create_app
from agentlightning.server.serve import HttpServer
from agentlightning.store.client import LightningStoreClient
from tests.server.conftest import ADMIN_KEY, until

pytestmark = pytest.mark.anyio
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}


async def metrics(http: aiohttp.ClientSession) -> dict[tuple[str, ...], float]:
    """Every sample by its name and the values of its labels."""
    answer = await http.get("/metrics", headers=ADMIN)
    assert (answer.status, answer.content_type) == (200, "text/plain")
    families = text_string_to_metric_families(await answer.text())
    return {
        (one.name, *one.labels.values()): one.value for family in families for one in family.samples
    }


async def test_a_server_whose_store_is_gone_lives_but_is_not_ready(http, store):
    assert await (await http.get("/ready")).json() == {"status": "ready"}
    await store.close()
    assert (await http.get("/health")).status == 200
    answer = await http.get("/ready")
    assert (answer.status, (await answer.json())["reason"]) == (503, "the store is closed")


async def test_a_server_without_a_store_is_ready():
    async with HttpServer(create_app(None)) as server, aiohttp.ClientSession(server.url) as http:
        assert (await http.get("/ready")).status == 200
        assert (await http.get("/metrics")).status == 200


async def test_metrics_count_requests_by_route_and_what_is_stored(http, store):
    await store.enqueue_many_rollouts([])
    await store.enqueue_rollout("waits")
    started = await store.start_rollout("runs")
    for _ in range(3):
        await http.get(f"/api/v1/rollouts/{started.rollout_id}", headers=ADMIN)
    await http.get("/api/v1/rollouts/ro-nowhere", headers=ADMIN)
    await http.get("/no/such/path")
    found = await metrics(http)
    assert found["agl_requests_total", "GET", "/api/v1/rollouts/{rollout_id}", "200"] == 3
    assert found["agl_requests_total", "GET", "/api/v1/rollouts/{rollout_id}", "404"] == 1
    assert found["agl_requests_total", "GET", "unmatched", "404"] == 1
    assert found["agl_request_seconds_count", "GET", "/api/v1/rollouts/{rollout_id}"] == 4
    assert found["agl_rollouts", "queuing"] == found["agl_queue_length",] == 1
    assert found["agl_rollouts", "preparing"] == 1
    assert found["agl_spans",] == 0
    assert found["process_resident_memory_bytes",] > 1e6
    assert not any(started.rollout_id in label for name in found for label in name)


async def test_metrics_show_who_waits_and_who_listens(http, server, store):
    client = LightningStoreClient(server.url, ADMIN_KEY)
    async with anyio.create_task_group() as tasks, http.get("/api/v1/events", headers=ADMIN):
        tasks.start_soon(lambda: client.dequeue_rollout(timeout=60))

        async def both_show() -> bool:
            found = await metrics(http)
            return found["agl_long_polls",] == found["agl_event_streams",] == 1

        await until(both_show)
        await store.enqueue_rollout("ends the wait")
    await client.close()


async def test_a_poll_whose_client_left_is_no_failure_of_the_server(http, server):
    with anyio.move_on_after(0.3):
        await http.get("/api/v1/finished-rollouts?timeout=60", headers=ADMIN)

    async def it_was_counted() -> bool:
        return ("agl_requests_total", "GET", "/api/v1/finished-rollouts", "499") in await metrics(
            http
        )

    await until(it_was_counted)
