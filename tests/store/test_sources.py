"""A fork walks a recorded attempt of the same task; its source goes with it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from agentlightning import semconv
from agentlightning.errors import (
    ConfigError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
)
from agentlightning.server.app import create_app
from agentlightning.server.serve import HttpServer
from agentlightning.store.base import LightningStore
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.sources import forked
from agentlightning.store.sql import SqlStore
from agentlightning.types import (
    AttemptedRollout,
    Condition,
    EnqueueRolloutRequest,
    ForkSource,
    Rollout,
    SpanStatus,
)
from tests.store.conftest import opened, span_of

pytestmark = pytest.mark.anyio

SAID = {semconv.GEN_AI_OUTPUT_MESSAGES: '[{"role": "assistant", "content": "hi"}]'}


async def begin(store: LightningStore, *calls: dict[str, Any], **request: Any) -> AttemptedRollout:
    """A rollout at work that has made these calls."""
    queued = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input="task", **request)])
    started = await store.start_attempt(queued[0].rollout_id)
    spans = [
        span_of(
            started,
            attributes={semconv.CALL_INDEX: index, **call},
            status=SpanStatus(status_code="ERROR" if semconv.ERROR_TYPE in call else "UNSET"),
        )
        for index, call in enumerate(calls)
    ]
    await store.add_many_spans(spans)
    return started


async def finish(store: LightningStore, *calls: dict[str, Any], **request: Any) -> Rollout:
    started = await begin(store, *calls, **request)
    await store.update_attempt(started.rollout_id, started.attempt.attempt_id, status="succeeded")
    found = await store.get_rollout_by_id(started.rollout_id)
    assert found is not None
    return found


async def fork(store: LightningStore, rollout: Rollout, at: int, **more: Any) -> Rollout:
    source = ForkSource(rollout_id=rollout.rollout_id, at=at)
    return (await store.enqueue_many_rollouts([forked(rollout, source, **more)]))[0]


async def test_a_fork_names_the_last_attempt_of_its_source_and_draws_its_own_numbers(
    store: LightningStore,
) -> None:
    source = await finish(store, SAID, SAID, metadata={"sample": "t1", "seed": 5})
    attempt = await store.get_latest_attempt(source.rollout_id)
    assert attempt is not None
    forks = await fork(store, source, 1, number=3)
    assert forks.source == ForkSource(
        rollout_id=source.rollout_id, attempt_id=attempt.attempt_id, at=1
    )
    assert forks.metadata == {"sample": "t1/fork 1.3", "seed": 5}
    assert await store.get_rollout_by_id(forks.rollout_id) == forks
    named = Condition("source_id", "eq", source.rollout_id)
    assert await store.query_rollouts(where=named) == [forks]


async def test_a_fork_never_has_the_sample_of_its_source(store: LightningStore) -> None:
    source = await finish(store, SAID)
    request = EnqueueRolloutRequest(
        input="task", source=ForkSource(rollout_id=source.rollout_id, at=0)
    )
    (first,) = await store.enqueue_many_rollouts([request])
    assert first.metadata == {"sample": f"{source.rollout_id}/fork 0.{first.rollout_id}"}


async def test_a_call_beyond_the_rollout_or_that_nobody_received_is_no_place_to_fork(
    store: LightningStore,
) -> None:
    source = await finish(
        store,
        SAID,
        {semconv.ERROR_TYPE: "client disconnected"},
        SAID,
        {**SAID, semconv.CALL_DISCARDS: [2]},
    )
    for at in (1, 2, 4):
        with pytest.raises(InvalidError, match=f"no call {at} that was answered; it has 0, 3"):
            await fork(store, source, at)
    with pytest.raises(ConfigError, match="at is -1"):
        ForkSource(rollout_id=source.rollout_id, at=-1)


async def test_what_was_captured_without_answers_cannot_be_forked(store: LightningStore) -> None:
    source = await finish(store, {})
    with pytest.raises(InvalidError, match="--capture off"):
        await fork(store, source, 0)


async def test_a_source_is_a_stored_attempt_that_has_ended_and_of_the_same_task(
    store: LightningStore,
) -> None:
    running = await begin(store, SAID)
    with pytest.raises(ConflictError, match="is running"):
        await fork(store, running, 0)
    source = await finish(store, SAID)
    with pytest.raises(InvalidError, match="another input"):
        await fork(store, msgspec.structs.replace(source, input="another task"), 0)
    with pytest.raises(NotFoundError, match="was it deleted"):
        await fork(store, msgspec.structs.replace(source, rollout_id="gone"), 0)
    request = forked(source, ForkSource(rollout_id=source.rollout_id, attempt_id="no", at=0))
    with pytest.raises(NotFoundError, match="has no attempt 'no'"):
        await store.enqueue_many_rollouts([request])


async def test_a_fork_is_of_the_same_version_of_the_program(store: LightningStore) -> None:
    ours = await store.start_run("rl", {"commit": "a"})
    theirs = await store.start_run("rl", {"commit": "b"})
    source = await finish(store, SAID, run_id=ours.run_id)
    with pytest.raises(InvalidError, match="made by commit a and the fork's run is of b"):
        await fork(store, source, 0, run_id=theirs.run_id)
    assert (await fork(store, source, 0, run_id=ours.run_id)).run_id == ours.run_id


async def test_forks_are_deleted_with_their_source(store: LightningStore) -> None:
    source = await finish(store, SAID)
    other = await finish(store, SAID)
    child = await fork(store, source, 0)
    started = await store.start_attempt(child.rollout_id)
    await store.add_many_spans([span_of(started, attributes={semconv.CALL_INDEX: 0, **SAID})])
    await store.update_attempt(child.rollout_id, started.attempt.attempt_id, status="succeeded")
    await fork(store, child, 0)
    deleted = await store.delete_rollouts(
        Condition("rollout_id", "in", [source.rollout_id, child.rollout_id])
    )
    assert (deleted.rollouts, deleted.attempts, deleted.spans) == (3, 2, 2)
    assert await store.query_rollouts() == [other]


async def test_a_group_of_forks_names_the_group_of_their_sources(store: LightningStore) -> None:
    group = await store.create_group(1)
    forks = await store.create_group(2, None, "forks", group.group_id)
    assert forks.source_id == group.group_id
    assert await store.get_group("forks") == forks
    assert await store.create_group(2, None, "forks", group.group_id) == forks
    with pytest.raises(ConflictError, match="of forks of"):
        await store.create_group(2, None, "forks")
    with pytest.raises(NotFoundError, match="nowhere"):
        await store.create_group(2, None, "others", "nowhere")


async def test_a_source_is_not_deleted_while_its_forks_are_awaited(store: LightningStore) -> None:
    source = await finish(store, SAID)
    group = await store.create_group(1)
    await store.create_group(1, None, "forks", group.group_id)
    child = await fork(store, source, 0, group_id="forks", group_index=0)
    named = Condition("rollout_id", "eq", source.rollout_id)
    assert (await store.delete_rollouts(named)).rollouts == 0
    await store.cancel_rollout(child.rollout_id)
    assert (await store.delete_rollouts(named)).rollouts == 2
    await store.create_group(1, None, "more", group.group_id)
    source = await finish(store, SAID)
    await fork(store, source, 0, group_id="more", group_index=0)
    named = Condition("rollout_id", "eq", source.rollout_id)
    assert (await store.delete_rollouts(named, unfinished=True)).rollouts == 2


async def test_only_who_may_queue_rollouts_may_set_a_source() -> None:
    async with (
        opened() as store,
        HttpServer(create_app(store, admin_key="an admin's key")) as server,
    ):
        source = await finish(store, SAID)
        attempted = await begin(store, SAID)
        assert attempted.api_key is not None
        assert attempted.reward_key is not None
        worker = (await store.issue_key("w", ["worker"])).api_key
        trainer = (await store.issue_key("t", ["trainer"])).api_key
        for key in (attempted.api_key, attempted.reward_key, worker):
            client = LightningStoreClient(server.url, key)
            with pytest.raises(ForbiddenError):
                await fork(client, source, 0)
            await client.close()
        client = LightningStoreClient(server.url, trainer)
        assert (await fork(client, source, 0)).source is not None
        await client.close()


async def test_an_agent_cannot_say_that_its_call_was_another_rollouts() -> None:
    async with (
        opened() as store,
        HttpServer(create_app(store, admin_key="an admin's key")) as server,
    ):
        source = await finish(store, SAID)
        attempted = await begin(store, SAID)
        assert attempted.api_key is not None
        client = LightningStoreClient(server.url, attempted.api_key)
        forged = {semconv.CALL_REPLAYED_ROLLOUT: source.rollout_id}
        with pytest.raises(ForbiddenError, match="only the gateway records"):
            await client.add_span(span_of(attempted, attributes=forged))
        await client.close()


async def test_exports_and_imports_keep_the_source(store: LightningStore) -> None:
    source = await finish(store, SAID)
    child = await fork(store, source, 0)
    await store.cancel_rollout(child.rollout_id)
    (whole,) = await store.query_rollouts(rollout_id_in=[child.rollout_id])
    other = await SqlStore.open(":memory:")
    assert await other.import_rollout(whole, [], [])
    (imported,) = await other.query_rollouts()
    assert imported.source == child.source
    await other.close()
