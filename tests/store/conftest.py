"""The same store four ways: in memory, in a file, in PostgreSQL, and through a real HTTP server on
loopback."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentlightning.server.app import create_app
from agentlightning.server.serve import HttpServer
from agentlightning.store.base import LightningStore
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.sql import SqlStore
from agentlightning.types import (
    AttemptedRollout,
    SampledChoice,
    Span,
    SpanEvent,
    SpanLink,
    SpanStatus,
    TokenCapture,
)

_numbers = itertools.count()


def span_of(
    of: AttemptedRollout | tuple[str, str], span_id: str | None = None, **fields: Any
) -> Span:
    """A span of an attempt, with an id of its own unless it is given."""
    rollout_id, attempt_id = of if isinstance(of, tuple) else (of.rollout_id, of.attempt.attempt_id)
    return Span(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        span_id=span_id or f"{next(_numbers):016x}",
        **{
            "sequence_id": 0,
            "trace_id": "7" * 32,
            "name": "n",
            "start_time": 1.0,
            "end_time": 2.0,
            **fields,
        },
    )


TOKENS = TokenCapture(
    prompt_token_ids=(1, 2**31 - 1, 0),
    choices=(
        # logprobs are float32
        SampledChoice(
            token_ids=(5, 6),
            logprobs=(-0.10000000149011612, -2.5),
            finish_reason="stop",
            versions=((3, 1), (4, 1)),
        ),
        SampledChoice(token_ids=(), logprobs=(), finish_reason="abort"),
    ),
)


def full_span(of: AttemptedRollout | tuple[str, str]) -> Span:
    """A call with everything that a span can have."""
    return span_of(
        of,
        "call",
        sequence_id=7,
        name="Grüße 🛩️ 東京",
        parent_id="ab",
        start_time=1.1,
        end_time=2.2,
        status=SpanStatus(status_code="ERROR", description="it broke"),
        attributes={
            "text": "naïve 🤖",
            "count": 3,
            "cost": 0.1,
            "ok": True,
            "tags": ["a", "b"],
            "mixed": [0.5, True],
        },
        events=(
            SpanEvent(
                name="exception", attributes={"exception.type": "ValueError", "k": 1}, timestamp=0.3
            ),
        ),
        links=(SpanLink(trace_id="t", span_id="s", attributes={"n": 1}),),
        resource={"service.name": "agent"},
        tokens=TOKENS,
    )


@contextlib.asynccontextmanager
async def opened(address: Path | str = ":memory:", **options: Any) -> AsyncIterator[SqlStore]:
    store = await SqlStore.open(address, **options)
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture(params=["memory", "file", "postgres"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return _address(request.param, request)


def _address(kind: str, request: pytest.FixtureRequest) -> str:
    if kind == "memory":
        return ":memory:"
    if kind == "postgres":
        return request.getfixturevalue("postgres_database")
    return str(request.getfixturevalue("tmp_path") / "store.db")


KINDS = ["memory", "file", "postgres", "http"]


@contextlib.asynccontextmanager
async def open_store(
    kind: str, request: pytest.FixtureRequest, lease_seconds: float = 30.0
) -> AsyncIterator[LightningStore]:
    async with opened(_address(kind, request), lease_seconds=lease_seconds) as sql:
        if kind != "http":
            yield sql
            return
        async with HttpServer(create_app(sql, admin_key="an admin's key")) as server:
            client = LightningStoreClient(server.url, "an admin's key", patience=2)
            try:
                yield client
            finally:
                await client.close()


@pytest.fixture(params=KINDS)
async def store(request, anyio_backend) -> AsyncIterator[LightningStore]:
    async with open_store(request.param, request) as opened:
        yield opened


@pytest.fixture(params=KINDS)
async def hasty_store(request, anyio_backend) -> AsyncIterator[LightningStore]:
    """A store whose leases run out after a fifth of a second."""
    async with open_store(request.param, request, lease_seconds=0.2) as opened:
        yield opened
