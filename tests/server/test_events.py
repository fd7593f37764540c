"""The event stream: what happens in the store reaches whoever listens, and nobody else."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

import aiohttp
import anyio
import msgspec
import pytest

from agentlightning.server import events
from agentlightning.server.app import create_app
from agentlightning.server.serve import HttpServer
from agentlightning.types import Condition, EnqueueRolloutRequest, Metrics
from tests.server.conftest import ADMIN_KEY, until
from tests.server.places import issue
from tests.store.conftest import span_of

pytestmark = pytest.mark.anyio


class Listener:
    """One open stream, read event by event."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self.answer = answer

    async def next(self) -> tuple[str, dict]:
        """The next event; its name is "" for a heartbeat. EOFError at the end of the stream."""
        name, data = "", {}
        with anyio.fail_after(30):
            while line := (await self.answer.content.readline()).decode():
                match line.rstrip("\n").partition(": "):
                    case ("event", _, value):
                        name = value
                    case ("data", _, value):
                        data = msgspec.json.decode(value)
                    case ("", "", ""):
                        return name, data
        raise EOFError

    async def until(self, name: str, **wanted) -> list[tuple[str, dict]]:
        """All events up to one with this name and these fields."""
        passed = [await self.next()]
        while passed[-1][0] != name or not wanted.items() <= passed[-1][1].items():
            passed.append(await self.next())
        return passed


@contextlib.asynccontextmanager
async def listening(http: aiohttp.ClientSession, key: str = ADMIN_KEY) -> AsyncGenerator[Listener]:
    async with http.get("/api/v1/events", headers={"Authorization": f"Bearer {key}"}) as answer:
        assert (answer.status, answer.content_type) == (200, "text/event-stream")
        listener = Listener(answer)
        assert await listener.next() == ("reset", {})
        yield listener


async def test_the_life_of_runs_groups_and_rollouts_is_heard(http, store):
    async with listening(http) as listener:
        run = await store.start_run("train", {})
        await listener.until("metrics", run_id=run.run_id)
        await store.add_metrics(
            Metrics(run_id=run.run_id, step=1, time=0.0, values={"reward": 1.0})
        )
        assert await listener.until("metrics") == [("metrics", {"run_id": run.run_id})]
        group = await store.create_group(size=1, run_id=run.run_id)
        request = EnqueueRolloutRequest(
            input=1, run_id=run.run_id, group_id=group.group_id, group_index=0
        )
        (member,) = await store.enqueue_many_rollouts([request])
        await store.cancel_rollout(member.rollout_id)
        await listener.until("groups", run_id=run.run_id)
        await store.enqueue_rollout("task")
        await listener.until("queued", count=1)
        leased = await store.dequeue_rollout()
        (*_, (_, event)) = await listener.until("rollout", status="preparing")
        assert event["rollout_id"] == leased.rollout_id
        await store.add_span(span_of(leased))
        await listener.until("spans", rollout_id=leased.rollout_id)
        await store.update_attempt(leased.rollout_id, leased.attempt.attempt_id, status="succeeded")
        (*_, (_, event)) = await listener.until("rollout", status="succeeded")
        assert event["end_time"] is not None
        store._subscribers.publish(None)  # as when it has missed something
        await listener.until("reset")
        await store.delete_rollouts(where=Condition("rollout_id", "eq", leased.rollout_id))
        await listener.until("rollout", rollout_id=leased.rollout_id, status="deleted")


async def test_what_happens_at_once_is_said_once(http, store):
    async with listening(http) as listener:
        started = await store.start_rollout(1)
        await store.add_many_spans([span_of(started) for _ in range(50)])
        await store.cancel_rollout(started.rollout_id)
        passed = await listener.until("rollout", status="cancelled")
        await store.enqueue_rollout("the next thing")
        passed += await listener.until("queued")
        assert 1 <= sum(name == "spans" for name, _ in passed) <= 2


async def test_listening_needs_a_key_that_may_read(http, store):
    attempt = await store.start_rollout(1)
    for path in ("/api/v1/events", "/metrics"):
        assert (await http.get(path)).status == 401
        assert (await http.get(path, headers={"x-api-key": attempt.api_key})).status == 403


async def test_nobody_listens_so_often_that_writes_become_slow(http, store, monkeypatch):
    monkeypatch.setattr(events, "_MOST_STREAMS", 2)
    reader = await issue(store, "read")

    async def may_listen() -> bool:
        async with http.get(
            "/api/v1/events", headers={"Authorization": f"Bearer {reader}"}
        ) as answer:
            return answer.status == 200

    async with listening(http, reader), listening(http), listening(http, reader):
        assert not await may_listen()
    await until(may_listen)


async def test_a_revoked_key_hears_no_more(http, store):
    issued = await store.issue_key(name="reader", scopes=["read"])
    async with listening(http, issued.api_key) as listener:
        await store.revoke_key(key_id=issued.key_id)
        with pytest.raises(EOFError):
            while True:
                await listener.next()


async def test_a_silent_stream_shows_that_it_is_alive(http, monkeypatch):
    monkeypatch.setattr(events, "HEARTBEAT_SECONDS", 0.05)
    async with listening(http) as listener:
        assert [await listener.next() for _ in range(2)] == [("", {}), ("", {})]


async def test_a_stopping_server_ends_its_streams_and_a_client_that_leaves_is_forgotten(store):
    server = HttpServer(create_app(store))
    await server.start()
    async with aiohttp.ClientSession(server.url) as http, listening(http) as listener:
        async with listening(http):
            pass

        async def one_is_open() -> bool:
            return "agl_event_streams 1.0" in await (await http.get("/metrics")).text()

        await until(one_is_open)
        with anyio.fail_after(4):  # less than what a server waits for requests that do not end
            await server.stop()
        with pytest.raises(EOFError):
            await listener.next()
