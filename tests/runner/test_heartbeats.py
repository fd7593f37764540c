"""One timer keeps all attempts alive, and no call of it that fails costs another attempt
anything."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import agentlightning as agl
from agentlightning.runner import reports
from agentlightning.runner.reports import DEFECT_TRIES
from agentlightning.runner.runner import Runner
from agentlightning.server.app import create_app
from agentlightning.server.serve import HttpServer
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.sql import SqlStore
from tests.runner.world import AGAIN, LEASE_SECONDS, enqueue, reason_of, running, statuses

pytestmark = pytest.mark.anyio

DEFECT = Response(
    b'{"error": {"message": "a defect", "type": "error"}}', 500, media_type="application/json"
)
OF_A_PROXY = Response(b"<html><title>502 Bad Gateway</title></html>", 502, media_type="text/html")

WITH_SPANS = ("/spans", "/end")

Refuse = Callable[[str, bytes], Response | None]


class Between:
    """ASGI: stands between the runner and its server; `refuse`, told `METHOD path` and the body,
    may answer instead."""

    def __init__(self, app: ASGIApp, refuse: Refuse) -> None:
        self._app = app
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        answer = self._refuse(f"{scope['method']} {scope['path']}", body)
        if answer is not None:
            await answer(scope, receive, send)
            return
        read = iter([body])

        async def again() -> Message:
            return (
                next(({"type": "http.request", "body": part} for part in read), None)
                or await receive()
            )

        await self._app(scope, again, send)


@asynccontextmanager
async def client_behind(store: SqlStore, refuse: Refuse) -> AsyncIterator[LightningStoreClient]:
    app = create_app(store)
    app.add_middleware(Between, refuse=refuse)
    async with HttpServer(app) as server:
        client = LightningStoreClient(server.url)
        try:
            yield client
        finally:
            await client.close()


async def test_an_attempt_is_reported_in_one_call(store: SqlStore) -> None:
    calls: list[str] = []

    def note(call: str, body: bytes) -> Response | None:
        calls.append(call)

    (rollout_id,) = await enqueue(store, "x")
    async with client_behind(store, note) as client, running(Runner(client, lambda task: 0.5)):
        await store.wait_for_rollouts([rollout_id], timeout=60)
    rollout = await store.get_rollout_by_id(rollout_id)
    assert rollout is not None and rollout.reward == 0.5
    of_attempts = [call for call in calls if "/attempts/" in call or "/spans" in call]
    assert len(of_attempts) == 1 and of_attempts[0].endswith("/end")


async def test_spans_too_large_for_one_call_are_sent_in_several(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "CHUNK", 100_000)
    sizes: list[int] = []

    def agent(task: str) -> float:
        for _ in range(7):
            agl.emit_message(80_000 * "x")
        return 1.0

    def note(call: str, body: bytes) -> Response | None:
        sizes.extend([len(body)] * call.endswith(WITH_SPANS))

    (rollout_id,) = await enqueue(store, "x")
    async with client_behind(store, note) as client, running(Runner(client, agent)):
        await store.wait_for_rollouts([rollout_id], timeout=60)
    assert await statuses(store, rollout_id) == [["succeeded"]]
    assert len(await store.query_spans(rollout_id)) == 8
    assert len(sizes) == 7 and max(sizes) < 100_000


async def test_what_an_agent_recorded_is_stored_though_it_ends_too_late(
    store: SqlStore, caplog: pytest.LogCaptureFixture
) -> None:
    async def agent(task: str) -> float:
        agl.emit_message("hello")
        (rollout,) = await store.query_rollouts()
        attempt = await store.get_latest_attempt(rollout.rollout_id)
        assert attempt is not None
        await store.end_attempt(rollout.rollout_id, attempt.attempt_id, "unresponsive")
        assert await store.dequeue_rollout("another") is not None
        return 1.0

    async with client_behind(store, lambda call, body: None) as client:
        rollout_id = (await Runner(client, agent).run_one("x", config=AGAIN)).rollout_id
    assert "too late, ignored" in caplog.text
    recorded, rewarded = await store.query_spans(rollout_id)
    assert recorded.name == "agentlightning.message"
    assert agl.find_final_reward([rewarded]) == 1.0
    rollout = await store.get_rollout_by_id(rollout_id)
    assert rollout is not None and rollout.reward is None, (
        "the reward of an attempt that another one has followed"
    )


@pytest.mark.slow
async def test_a_call_that_a_proxy_refuses_for_long_costs_no_attempt_its_lease(
    brief_store: SqlStore,
) -> None:
    healed, release = asyncio.Event(), asyncio.Event()

    async def agent(task: str) -> float:
        agl.emit_message(task)
        await release.wait()
        return 1.0

    def refuse(call: str, body: bytes) -> Response | None:
        too_large = call.endswith(WITH_SPANS) and b"large" in body
        return OF_A_PROXY if too_large and not healed.is_set() else None

    rollout_ids = await enqueue(brief_store, "large", "small", "small")
    async with client_behind(brief_store, refuse) as client, running(Runner(client, agent)):
        await asyncio.sleep(2.5 * LEASE_SECONDS)
        assert await statuses(brief_store, *rollout_ids) == [
            ["preparing"],
            ["running"],
            ["running"],
        ]
        healed.set()
        release.set()
        await brief_store.wait_for_rollouts(rollout_ids, timeout=60)
    assert await statuses(brief_store, *rollout_ids) == [["succeeded"]] * 3


@pytest.mark.slow
async def test_a_server_that_fails_once_at_each_kind_of_call_ends_no_runner(
    brief_store: SqlStore, caplog: pytest.LogCaptureFixture
) -> None:
    failed: Counter[str] = Counter()

    async def agent(task: int) -> float:
        agl.emit_message("so far")
        await asyncio.sleep(LEASE_SECONDS)
        return 1.0

    def refuse(call: str, body: bytes) -> Response | None:
        kind = (
            call
            if call.endswith(("/lease", "/workers", "/heartbeat", *WITH_SPANS))
            else call.partition(" ")[0]
        )
        failed[kind] += 1
        return DEFECT if failed[kind] == 1 else None

    rollout_ids = await enqueue(brief_store, *range(40))
    async with client_behind(brief_store, refuse) as client, running(Runner(client, agent)):
        await brief_store.wait_for_rollouts(rollout_ids, timeout=60)
    assert await statuses(brief_store, *rollout_ids) == [["succeeded"]] * 40
    kinds = Counter(kind.rpartition("/")[2] for kind in failed)
    assert kinds["heartbeat"] == 40 and {"lease", "workers", "spans", "end"} <= set(kinds)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "a defect" in said[0] and len(said) < 12, "each doubling is said, not each failure"


@pytest.mark.slow
@pytest.mark.parametrize("goes_on", [False, True])
async def test_spans_at_which_the_server_always_fails_fail_their_own_attempt(
    brief_store: SqlStore, goes_on: bool
) -> None:
    tries = 0

    async def agent(task: str) -> float:
        agl.emit_message(task)
        if task == "poison" and goes_on:
            await asyncio.Event().wait()
        return 1.0

    def refuse(call: str, body: bytes) -> Response | None:
        nonlocal tries
        poisoned = call.endswith(WITH_SPANS) and b"poison" in body
        tries += poisoned
        return DEFECT if poisoned else None

    rollout_ids = await enqueue(brief_store, "poison", "fine")
    async with client_behind(brief_store, refuse) as client, running(Runner(client, agent)):
        poison, fine = await brief_store.wait_for_rollouts(rollout_ids, timeout=60)
        assert await enqueue(brief_store, "another")
    if poison.rollout_id != rollout_ids[0]:
        poison, fine = fine, poison
    assert (poison.status, fine.status, tries) == ("failed", "succeeded", DEFECT_TRIES)
    assert "its spans were refused: the server failed" in await reason_of(
        brief_store, poison.rollout_id
    )
