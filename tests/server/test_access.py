"""Who may do what: every call with every kind of key."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Callable
from itertools import product
from typing import Any

import aiohttp
import pytest

from agentlightning import semconv
from agentlightning.errors import InvalidError
from agentlightning.gateway.gateway import Gateway
from agentlightning.gateway.models import ModelTable
from agentlightning.semconv import ATTEMPT_ID, REWARD, ROLLOUT_ID, reward_value
from agentlightning.server.access import ATTEMPT_BYTES
from agentlightning.server.app import create_app
from agentlightning.server.serve import HttpServer
from agentlightning.store.base import CALLS
from agentlightning.store.sql import SqlStore
from agentlightning.types import (
    EnqueueRolloutRequest,
    SampledChoice,
    TokenCapture,
)
from tests.server.conftest import ADMIN_KEY
from tests.server.places import (
    ADMIN,
    EVERY,
    OPENS,
    Caller,
    Clock,
    Place,
    call_about,
    furnish,
    issue,
    otlp,
    span_of,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(anyio_backend, clock) -> AsyncIterator[SqlStore]:
    opened = await SqlStore.open(":memory:", clock=clock)
    yield opened
    await opened.close()


def test_the_rules_speak_of_every_call():
    assert set(CALLS) == ADMIN


async def statuses(
    store: SqlStore, caller: Caller, key_of: Callable[[Place], str] | None = None
) -> dict[Any, int]:
    """What each call is answered, each in a place of its own."""
    found: dict[Any, int] = {}
    for number, kind in enumerate(EVERY):
        place = await furnish(store, f"a-{number}")
        if kind == "dequeue_many_rollouts":
            await store.enqueue_many_rollouts(requests=[EnqueueRolloutRequest(input=1)])
        if key_of is not None:
            caller.key = key_of(place)
        found[kind], _ = await caller(call_about(kind, place))
    return found


def expected(opens: set[str], otherwise: int = 403) -> dict[Any, int]:
    return {kind: 200 if kind in opens else otherwise for kind in EVERY}


@pytest.mark.parametrize("scope", OPENS)
async def test_a_key_opens_what_its_scope_says(store, http, scope):
    assert await statuses(store, Caller(http, await issue(store, scope))) == expected(OPENS[scope])


async def test_the_admin_key_opens_everything(store, http):
    assert await statuses(store, Caller(http, ADMIN_KEY)) == expected(ADMIN)


async def test_without_a_valid_key_nothing_opens(store, http, clock):
    ended = await store.issue_key(name="ended", scopes=["admin"])
    revoked, expired = ended.api_key, await issue(store, "admin", lifetime_seconds=10)
    for key in (revoked, expired):
        assert (await Caller(http, key)(CALLS["query_runs"]()))[0] == 200
    await store.revoke_key(key_id=ended.key_id)
    clock.now += 11
    elsewhere = await SqlStore.open(":memory:")
    foreign = (await furnish(elsewhere, "f")).attempt_key
    await elsewhere.close()
    for key in (
        None,
        "",
        "wrong",
        revoked,
        expired,
        foreign,
        ADMIN_KEY[:-1],
        ADMIN_KEY + "x",
        "ключ",
        f"aglk-{'x' * 43}",
    ):
        caller = Caller(http, key)
        for kind in EVERY:
            assert (await caller(call_about(kind, Place("nowhere"))))[0] == 401, (key, kind)


@pytest.mark.parametrize("which", ["attempt_key", "grading_key"])
async def test_an_attempts_key_adds_spans_and_nothing_else(store, http, which):
    found = await statuses(store, Caller(http, None), lambda place: getattr(place, which))
    assert found == expected({"store_spans"})


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({"name": "two\nlines"}, "printable"),
        ({"name": "n" * 201}, "1 to 200"),
        ({"scopes": []}, "some of read"),
        ({"lifetime_seconds": math.nan}, "positive"),
        ({"lifetime_seconds": 1e30}, "at most"),
    ],
)
async def test_a_key_that_nobody_could_make_sense_of_is_not_issued(store, fields, hint):
    with pytest.raises(InvalidError, match=hint):
        await store.issue_key(**{"name": "k", "scopes": ["read"], **fields})
    assert await store.query_keys() == []


async def test_an_agents_own_key_gives_no_rewards_unless_it_was_issued_with_them(store, http):
    place = await furnish(store, "a")
    agent, grader = Caller(http, place.attempt_key), Caller(http, place.grading_key)
    rewarded = [
        span_of(place, 2, name=REWARD),
        span_of(place, 3, attributes={reward_value(0): 1.0}),
        span_of(place, 4, attributes={reward_value(7): 1.0}),
    ]
    for span in rewarded:
        status, text = await agent(CALLS["store_spans"](spans=[span_of(place, 5), span]))
        assert status == 403 and "reward" in text
        assert (await agent.request("POST", "/v1/traces", **otlp(span)))[0] == 403
    assert len(await store.query_spans(place.rollout_id)) == 1
    assert (await grader(CALLS["store_spans"](spans=rewarded[:2])))[0] == 200
    assert (await grader.request("POST", "/v1/traces", **otlp(rewarded[2])))[0] == 200
    assert len(await store.query_spans(place.rollout_id)) == 4


async def test_an_attempts_key_does_not_speak_for_the_gateway(store, http):
    place = await furnish(store, "a")
    choice = SampledChoice(token_ids=(1,), logprobs=(0.0,), finish_reason="stop")
    forged = [
        span_of(place, 2, name=semconv.UNDELIVERED),
        span_of(place, 3, attributes={semconv.CALL_DISCARDS: [0]}),
        span_of(place, 4, tokens=TokenCapture(prompt_token_ids=(1,), choices=(choice,))),
    ]
    for key, span in product(
        (place.attempt_key, place.grading_key, await issue(store, "grader")), forged
    ):
        status, text = await Caller(http, key)(
            CALLS["store_spans"](spans=[span_of(place, 6), span])
        )
        assert status == 403 and semconv.CALL in text
        if span.tokens is None:  # which OTLP cannot carry
            assert (await Caller(http, key).request("POST", "/v1/traces", **otlp(span)))[0] == 403
    assert len(await store.query_spans(place.rollout_id)) == 1


async def test_an_attempts_key_leaves_room_for_what_is_recorded_later(store, http):
    """In numbers, and in the server's memory."""
    place = await furnish(store, "a")
    caller = Caller(http, place.attempt_key)
    status, text = await caller(CALLS["store_spans"](spans=[span_of(place, 2, sequence_id=2**53)]))
    assert status == 422 and "sequence_id" in text
    large = span_of(place, 2, attributes={"text": "x" * ATTEMPT_BYTES})
    app = create_app(store, admin_key=ADMIN_KEY)
    async with HttpServer(app) as server, aiohttp.ClientSession(server.url) as roomy:
        caller = Caller(roomy, place.attempt_key)
        assert (await caller(CALLS["store_spans"](spans=[large])))[0] == 413
        assert (await caller.request("POST", "/v1/traces", **otlp(large)))[0] == 413
        some = span_of(place, 2, attributes={"text": "x" * (ATTEMPT_BYTES // 4)})
        assert (await caller(CALLS["store_spans"](spans=[some])))[0] == 413
        assert (await caller.request("POST", "/v1/traces", **otlp(some)))[0] == 200
        asked = {"where": {"op": "eq", "field": "rollout_id", "value": "x" * ATTEMPT_BYTES}}
        reader = Caller(roomy, await issue(store, "read"))
        assert (await reader.request("POST", "/api/v1/rollouts/query", json=asked))[0] == 413
        worker = Caller(roomy, await issue(store, "worker"))
        assert (await worker(CALLS["store_spans"](spans=[large])))[0] == 200


async def test_an_attempts_key_touches_no_other_attempt(store, http):
    own, other = await furnish(store, "a"), await furnish(store, "b")
    mixed = span_of(own, 2, attempt_id=other.attempt_id)
    for key in (own.attempt_key, own.grading_key):
        for span in (span_of(other, 2), mixed):
            assert (await Caller(http, key)(CALLS["store_spans"](spans=[span_of(own, 3), span])))[
                0
            ] == 403
            claim = span_of(
                own, 4, attributes={ROLLOUT_ID: span.rollout_id, ATTEMPT_ID: span.attempt_id}
            )
            assert (await Caller(http, key).request("POST", "/v1/traces", **otlp(claim)))[0] == 403
    assert (
        len(await store.query_spans(own.rollout_id))
        == len(await store.query_spans(other.rollout_id))
        == 1
    )


async def test_every_use_of_an_administrative_call_names_who_made_it(store, http, caplog):
    caplog.set_level(logging.INFO, "agentlightning.audit")
    issued = await store.issue_key(name="ops", scopes=["admin"])
    caller, audited = Caller(http, issued.api_key), [kind for kind in EVERY if CALLS[kind].audited]
    for number, kind in enumerate(audited):
        place = await furnish(store, str(number))
        assert (await caller(call_about(kind, place)))[0] == 200
        assert caplog.records[-1].getMessage().startswith(f"{kind} by {issued.key_id}: ")
    assert issued.api_key not in caplog.text
    trainer = await issue(store, "trainer")
    caplog.clear()
    assert (await Caller(http, trainer)(CALLS["check_store"]()))[0] == 403
    assert not caplog.records


async def test_a_key_that_may_work_calls_without_an_attempt(store):
    """With keys required, one that may only read is refused and a placeholder unknown; without, any
    is ignored."""
    place = await furnish(store, "a")
    path = f"/rollout/{place.rollout_id}/attempt/{place.attempt_id}/v1/chat/completions"
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    keys = {
        await issue(store, "worker"): 404,
        ADMIN_KEY: 404,
        await issue(store, "read"): 403,
        "EMPTY": 401,
    }
    for required in (True, False):
        gateway = Gateway(ModelTable(), store, admin_key=ADMIN_KEY if required else None)
        app = create_app(store, gateway=gateway, admin_key=ADMIN_KEY)
        async with HttpServer(app) as server, aiohttp.ClientSession(server.url) as http:
            for key, status in keys.items():
                for url in ("/v1/chat/completions", path):
                    answered = (await Caller(http, key).request("POST", url, json=body))[0]
                    # nothing is wrong but that there is no model
                    assert answered == (status if required else 404)


@pytest.mark.parametrize(
    ("headers", "let_in"),
    [
        ({}, True),
        ({"authorization": "Bearer EMPTY"}, True),
        ({"host": "localhost:9999"}, True),
        ({"host": "[::1]:8123"}, True),
        ({"origin": "http://127.0.0.1:3000"}, True),
        ({"origin": "https://evil.example"}, False),
        ({"origin": "null"}, False),
        ({"sec-fetch-site": "same-origin"}, True),
        ({"sec-fetch-site": "same-site"}, True),  # of another port of this machine
        ({"sec-fetch-site": "none"}, True),  # typed by hand
        ({"sec-fetch-site": "cross-site"}, False),
        ({"origin": "http://127.0.0.1:3000", "sec-fetch-site": "cross-site"}, True),
        ({"host": "evil.example:8123"}, False),
        ({"host": "[half"}, False),
        ({"host": "host.docker.internal:8123", "authorization": "Bearer EMPTY"}, False),
        ({"x-forwarded-for": "203.0.113.7"}, False),
        ({"forwarded": "for=203.0.113.7"}, False),
    ],
)
async def test_models_answer_whom_the_store_would(store, headers, let_in):
    place = await furnish(store, "a")
    attempt = f"/rollout/{place.rollout_id}/attempt/{place.attempt_id}"
    body = b'{"model": "policy", "messages": [{"role": "user", "content": "hi"}]}'
    paths = ("chat/completions", "messages/count_tokens")
    posts = [f"{prefix}/v1/{path}" for prefix in ("", attempt) for path in paths]
    app = create_app(store, gateway=Gateway(ModelTable(), store))
    async with HttpServer(app) as server, aiohttp.ClientSession(server.url) as http:
        caller = Caller(http, None)
        assert (await caller.request("GET", "/api/v1/statistics", headers=headers))[0] == (
            200 if let_in else 403
        )
        assert (await caller.request("GET", "/v1/models", headers=headers))[0] == (
            200 if let_in else 403
        )
        for path in posts:  # as a page may post without asking first
            sent = {"data": body, "headers": {"content-type": "text/plain", **headers}}
            status, text = await caller.request("POST", path, **sent)
            # nothing is wrong but that there is no model
            assert status == (404 if let_in else 403), text
            assert let_in or "admin key" in text


async def test_a_key_that_may_call_models_does_so_from_anywhere(store):
    place = await furnish(store, "a")
    keys = {
        place.attempt_key: 404,
        await issue(store, "worker"): 404,
        await issue(store, "read"): 403,
    }
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    app = create_app(store, gateway=Gateway(ModelTable(), store))
    async with HttpServer(app) as server, aiohttp.ClientSession(server.url) as http:
        assert (await Caller(http, await issue(store, "read"))(CALLS["check_store"]()))[0] == 403
        for key, status in keys.items():
            sent = {"json": body, "headers": {"host": "host.docker.internal:8123"}}
            assert (await Caller(http, key).request("POST", "/v1/chat/completions", **sent))[
                0
            ] == status


async def test_models_without_a_store_are_this_machines_too():
    app = create_app(None, gateway=Gateway(ModelTable()))
    async with HttpServer(app) as server, aiohttp.ClientSession(server.url) as http:
        assert (await http.get("/v1/models")).status == 200
        assert (await http.get("/v1/models", headers={"host": "models.example"})).status == 403
