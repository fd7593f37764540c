"""An attempt can wait for spans that other processes export by themselves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import ConfigError
from agentlightning.runner.runner import Runner
from agentlightning.store.sql import SqlStore
from agentlightning.types import AttemptedRollout, Span

pytestmark = pytest.mark.anyio
PAUSE = 0.1


def exporting_agent(store: SqlStore) -> tuple[Any, list[asyncio.Task[None]]]:
    """An agent whose spans reach the store by another way, three of them after its end."""
    exports: list[asyncio.Task[None]] = []

    async def export(rollout: AttemptedRollout) -> None:
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        for number in "123":
            await asyncio.sleep(PAUSE)
            span = Span(
                **ids, sequence_id=0, trace_id="a" * 32, span_id=number * 16, name="tool", start_time=1, end_time=2
            )
            await store.add_span(span)

    @agl.rollout
    async def agent(task: int, rollout: AttemptedRollout) -> float:
        exports.append(asyncio.create_task(export(rollout)))
        return 1.0

    return agent, exports


async def test_with_settle_seconds_an_attempt_ends_when_its_spans_have_stopped_coming(store: SqlStore) -> None:
    agent, _ = exporting_agent(store)
    rollout = await Runner(store, agent, settle_seconds=3 * PAUSE).run_one(1)
    assert rollout.status == "succeeded"
    assert [span.name for span in await store.query_spans(rollout.rollout_id)].count("tool") == 3


async def test_without_them_it_ends_at_once_and_late_spans_are_kept_all_the_same(store: SqlStore) -> None:
    agent, exports = exporting_agent(store)
    rollout = await Runner(store, agent).run_one(1)
    assert not exports[0].done()
    await exports[0]
    assert [span.name for span in await store.query_spans(rollout.rollout_id)].count("tool") == 3


async def test_settle_seconds_below_zero_are_refused(store: SqlStore) -> None:
    with pytest.raises(ConfigError, match="settle_seconds"):
        Runner(store, lambda task: 1.0, settle_seconds=-1)
