"""Several servers behind one name, as they answer, fill up, fail and recover."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import msgspec
import pytest

from agentlightning import semconv
from agentlightning.errors import BackendError
from agentlightning.gateway.backend import BackendEvent, ModelCall, RelayedCall, Started
from agentlightning.gateway.backends.http import HttpBackend
from agentlightning.gateway.models import ModelEntry
from agentlightning.gateway.replicas import Replicas
from tests.gateway.talker import user
from tests.gateway.upstream import Server, until
from tests.gateway.world import fronting

pytestmark = pytest.mark.anyio


def free(replicas: Replicas) -> list[bool]:
    return [replica.ejected_since is None for replica in replicas.replicas]


@asynccontextmanager
async def replicated(
    count: int = 2, *, seconds: float = 600.0, check_seconds: float = 60.0
) -> AsyncIterator[tuple[Replicas, list[Server]]]:
    """As many servers behind one backend. `seconds` without an answer and they count as silent."""
    async with AsyncExitStack() as stack:
        servers = [Server() for _ in range(count)]
        for server in servers:
            await stack.enter_async_context(server.http)
        backends = [HttpBackend(server.url, timeout_seconds=seconds) for server in servers]
        replicas = Replicas(backends, check_seconds=check_seconds)
        try:
            yield replicas, servers
        finally:
            for server in servers:
                server.end()
            await replicas.close()


def call(said: str = "hello", session: str | None = None, *, stream: bool = False) -> ModelCall:
    return ModelCall(
        request_id=said, model="m", messages=user(said), session=session, stream=stream
    )


async def answered_by(replicas: Replicas, asked: ModelCall) -> str:
    """Who answers the call."""
    events: list[BackendEvent] = []
    async with aclosing(replicas.answer(asked)) as arriving:
        events = [event async for event in arriving]
    assert isinstance(events[0], Started)
    return events[0].replica


async def test_calls_go_to_whoever_runs_the_fewest() -> None:
    async with replicated(3) as (replicas, servers):
        for server in servers:
            server.hold()
        async with asyncio.TaskGroup() as group:
            for number in range(6):
                group.create_task(answered_by(replicas, call(str(number))))
            await until(lambda: sum(server.running for server in servers) == 6)
            assert [server.running for server in servers] == [2, 2, 2]
            assert [replica.running for replica in replicas.replicas] == [2, 2, 2]
            for server in servers:
                server.release()
        assert [replica.running for replica in replicas.replicas] == [0, 0, 0]


async def test_a_session_stays_where_its_prefix_is_cached_until_that_one_is_much_busier() -> None:
    async with replicated() as (replicas, servers):
        first = await answered_by(replicas, call(session="a"))
        for _ in range(3):
            assert await answered_by(replicas, call(session="a")) == first
        busy = next(server for server in servers if server.url == first)
        busy.hold()
        async with asyncio.TaskGroup() as group:
            for _ in range(5):  # calls of one session may overlap
                group.create_task(answered_by(replicas, call(session="a")))
            await until(lambda: busy.running == 5)
            assert await answered_by(replicas, call(session="a")) != first
            busy.release()
        assert await answered_by(replicas, call(session="a")) == first


async def test_what_is_passed_through_and_what_is_counted_is_routed_too() -> None:
    async with replicated() as (replicas, servers):
        await servers[0].http.stop()
        for _ in range(2):
            assert await replicas.count_tokens(call()) == 7
            asked = RelayedCall("embeddings", "m", {"input": msgspec.Raw(b'"hello"')}, {})
            async with replicas.relay(asked) as answer:
                assert (answer.status, answer.replica) == (200, servers[1].url)
                assert b"".join([part async for part in answer.parts])
        servers[1].behaviour = "500"
        # nobody else is left: what it says is passed on
        async with replicas.relay(asked) as answer:
            assert (answer.status, answer.replica) == (500, servers[1].url)


@pytest.mark.parametrize("behaviour", ["503", "breaks off", "hangs"])
async def test_a_call_that_a_replica_fails_is_answered_by_another(behaviour: str) -> None:
    async with replicated(seconds=0.3 if behaviour == "hangs" else 60) as (replicas, servers):
        servers[0].behaviour = behaviour
        for _ in range(2):
            assert await answered_by(replicas, call(stream=True)) == servers[1].url
        assert free(replicas) == [False, True]


@pytest.mark.parametrize(
    ("behaviour", "says", "status", "asked", "usable"),
    [
        ("400", "not now", 400, 1, 3),  # the caller's own fault
        # an answer is not begun anew
        ("breaks off in mid-answer", "before every choice was finished", 502, 1, 2),
        # every replica fails: the last failure is what the caller gets
        ("503", "not now", 502, 3, 0),
    ],
)
async def test_what_every_replica_would_fail_is_an_error(
    behaviour: str, says: str, status: int, asked: int, usable: int
) -> None:
    async with replicated(3) as (replicas, servers):
        for server in servers:
            server.behaviour = behaviour
        with pytest.raises(BackendError, match=says) as caught:
            await answered_by(replicas, call(stream=True))
        assert caught.value.status == status
        assert sum(len(server.asked) for server in servers) == asked
        assert free(replicas).count(True) == usable


async def test_a_replica_that_fails_gets_no_calls_until_it_is_healthy() -> None:
    async with replicated(check_seconds=0.05) as (replicas, (bad, good)):
        bad.behaviour, bad.healthy = "500", False
        for number in range(10):
            assert await answered_by(replicas, call(str(number))) == good.url
        ejected = replicas.replicas[0]
        assert len(bad.asked) == 1
        assert ejected.ejected_since is not None
        assert "not now" in str(ejected.why)
        bad.behaviour, bad.healthy = "answers", True
        await until(lambda: ejected.ejected_since is None)
        assert {await answered_by(replicas, call()) for _ in range(2)} == {bad.url, good.url}
        assert ejected.why is None


async def test_where_all_are_ejected_any_is_tried() -> None:
    async with replicated() as (replicas, servers):
        for server in servers:
            await server.http.stop()
        for _ in range(4):
            with pytest.raises(BackendError, match="cannot be reached") as caught:
                await answered_by(replicas, call())
            assert caught.value.status == 503
        assert free(replicas) == [False, False]
        await servers[1].http.start()
        async with fronting(ModelEntry("policy", replicas)) as front:
            attempted = await front.attempt()
            answer = await front.client(attempted).chat.completions.create(
                model="policy", messages=user("hello")
            )
            (span,) = await front.spans(attempted)
        assert answer.choices[0].message.content == "Hi!" and span.tokens is not None
        assert span.attributes[semconv.CALL_BACKEND] == servers[1].url
        assert free(replicas) == [False, True]  # its answer shows that it is back
