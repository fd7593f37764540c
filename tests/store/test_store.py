"""What every store promises, whichever way it is reached."""

from __future__ import annotations

import asyncio

import pytest

from agentlightning.errors import ConflictError, InvalidError, NotFoundError
from agentlightning.store.base import LightningStore
from agentlightning.types import (
    LLM,
    AttemptedRollout,
    EnqueueRolloutRequest,
    Metrics,
    PromptTemplate,
    RolloutConfig,
    TokenCapture,
)
from tests.store.conftest import full_span, span_of

pytestmark = pytest.mark.anyio


async def status_of(store: LightningStore, rollout_id: str) -> str:
    rollout = await store.get_rollout_by_id(rollout_id)
    assert rollout is not None
    return rollout.status


async def lease_new(store: LightningStore, config: RolloutConfig | None = None) -> AttemptedRollout:
    await store.enqueue_rollout({"question": "2+2"}, config=config)
    leased = await store.dequeue_rollout(worker_id="worker-1")
    assert leased is not None
    return leased


async def end(store: LightningStore, rollout: AttemptedRollout, status: str = "succeeded") -> None:
    await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status=status)


async def test_a_rollout_lives_from_queue_to_success(store):
    queued = await store.enqueue_rollout({"question": "2+2"}, mode="val", metadata={"tag": "a"})
    assert (queued.status, queued.mode, queued.metadata, queued.end_time) == (
        "queuing",
        "val",
        {"tag": "a"},
        None,
    )

    leased = await store.dequeue_rollout(worker_id="worker-1")
    assert leased.rollout_id == queued.rollout_id
    assert leased.input == {"question": "2+2"}
    assert (leased.status, leased.attempt.status, leased.attempt.sequence_id) == (
        "preparing",
        "preparing",
        1,
    )
    assert leased.attempt.worker_id == "worker-1"
    found = await store.find_key(api_key=leased.api_key)
    assert found is not None and found.attempt == (leased.rollout_id, leased.attempt.attempt_id)

    await store.add_span(span_of(leased))
    assert await status_of(store, queued.rollout_id) == "running"
    assert (await store.get_latest_attempt(queued.rollout_id)).status == "running"

    ended = await store.update_attempt(
        leased.rollout_id, leased.attempt.attempt_id, status="succeeded", lease=leased.lease.token
    )
    assert ended.status == "succeeded"
    assert ended.end_time is not None
    rollout = await store.get_rollout_by_id(queued.rollout_id)
    assert (rollout.status, rollout.end_time) == ("succeeded", ended.end_time)


async def test_the_last_spans_of_an_attempt_are_stored_with_its_end_or_not_at_all(store):
    leased = await lease_new(store, RolloutConfig(max_attempts=2, retry_condition=["unresponsive"]))
    ids, token = (leased.rollout_id, leased.attempt.attempt_id), leased.lease.token
    last = [span_of(leased), span_of(leased, attributes={"agentlightning.reward.0.value": 0.5})]

    async def is_as_before(status: str, spans: int) -> None:
        attempt = await store.get_latest_attempt(leased.rollout_id)
        assert (attempt.status, len(await store.query_spans(*ids))) == (status, spans)

    with pytest.raises(ConflictError, match="does not hold"):
        await store.end_attempt(*ids, "succeeded", last, lease=token - 1)
    with pytest.raises(InvalidError, match="too large"):
        await store.end_attempt(*ids, "succeeded", [last[0], span_of(leased, sequence_id=2**53)])
    with pytest.raises(InvalidError, match="does not end as 'running'"):
        await store.end_attempt(*ids, "running", last)
    await is_as_before("preparing", 0)

    for _ in range(2):  # as if the first answer were lost
        assert await store.end_attempt(*ids, "unresponsive", last[:1], lease=token) == [1]
        assert await status_of(store, leased.rollout_id) == "requeuing"
    assert await store.end_attempt(*ids, "succeeded", last, lease=token) == [1, 2]
    (rollout,) = await store.wait_for_rollouts([leased.rollout_id], timeout=10)
    assert (rollout.status, rollout.reward) == ("succeeded", 0.5)
    with pytest.raises(ConflictError, match="has ended as succeeded"):
        await store.end_attempt(*ids, "failed", [span_of(leased)], lease=token)
    assert await store.end_attempt(*ids, "succeeded", last, lease=token) == [1, 2]
    await is_as_before("succeeded", 2)


async def test_a_rollout_is_leased_to_one_worker_only(store):
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=i) for i in range(20)])
    leased = await asyncio.gather(*(store.dequeue_rollout(f"worker-{i}") for i in range(30)))
    ids = [rollout.rollout_id for rollout in leased if rollout is not None]
    assert len(ids) == len(set(ids)) == 20


async def test_metadata_is_replaced_or_merged(store):
    rollout = await store.enqueue_rollout(
        "task", metadata={"by": {"a": 1, "b": [1]}, "kept": None, "gone": 1}
    )
    changes = [
        {"by": {"b": {"c": None, "d": 2}}},
        {"gone": None, "new": {"x": None}},
        {"by": {"a": 3}},
    ]
    await asyncio.gather(
        *(store.update_rollout(rollout.rollout_id, merge=change) for change in changes)
    )
    changed = await store.get_rollout_by_id(rollout.rollout_id)
    assert changed.metadata == {"by": {"a": 3, "b": {"d": 2}}, "kept": None, "new": {}}
    leased = await store.dequeue_rollout()
    for metadata in ({"error": "boom"}, {"why": "again"}):
        attempt = await store.update_attempt(
            leased.rollout_id, leased.attempt.attempt_id, metadata=metadata
        )
        assert attempt.metadata == metadata
        requeued = await store.update_rollout(
            leased.rollout_id, status="requeuing", metadata=metadata
        )
        assert (requeued.status, requeued.metadata) == ("requeuing", metadata)


async def test_a_worker_that_dies_loses_its_lease_and_the_rollout_fails(hasty_store):
    leased = await lease_new(hasty_store)
    (rollout,) = await hasty_store.wait_for_rollouts([leased.rollout_id], timeout=10)
    assert rollout.status == "failed"
    assert rollout.end_time is not None
    attempt = await hasty_store.get_latest_attempt(leased.rollout_id)
    assert (attempt.status, attempt.end_time) == ("unresponsive", rollout.end_time)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
async def test_attempts_are_held_for_a_number_of_seconds(store, seconds):
    leased = await lease_new(store)
    with pytest.raises(InvalidError, match="positive and finite"):
        await store.extend_attempts([(leased.rollout_id, leased.attempt.attempt_id)], seconds)


async def test_a_waiting_worker_gets_work_when_it_is_enqueued(store):
    waiting = asyncio.create_task(store.dequeue_rollout(timeout=20))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    queued = await store.enqueue_rollout("work")
    leased = await asyncio.wait_for(waiting, 60)
    assert leased.rollout_id == queued.rollout_id
    assert await store.dequeue_rollout(timeout=0.05) is None


async def test_a_worker_that_stops_waiting_takes_nothing_with_it(store):
    waiting = asyncio.create_task(store.dequeue_rollout(timeout=20))
    await asyncio.sleep(0.1)
    waiting.cancel()
    await asyncio.wait([waiting])
    await asyncio.sleep(0.1)  # for the server to notice that its client has gone
    queued = await store.enqueue_rollout("work")
    leased = await store.dequeue_rollout(timeout=5)
    assert (leased.rollout_id, leased.attempt.sequence_id) == (queued.rollout_id, 1)


async def test_waiting_for_rollouts_returns_all_of_them_once_the_last_has_finished_or_some_after_the_timeout(
    store,
):
    assert await store.wait_for_rollouts([]) == []
    with pytest.raises(NotFoundError, match="ro-nowhere"):
        await store.wait_for_rollouts(["ro-nowhere"], timeout=0.01)
    first, second = await lease_new(store), await lease_new(store)
    waiting = asyncio.create_task(store.wait_for_rollouts([first.rollout_id, second.rollout_id]))
    await end(store, second, "failed")
    (some,) = await store.wait_for_rollouts([first.rollout_id, second.rollout_id], timeout=0.05)
    assert some.rollout_id == second.rollout_id and not waiting.done()
    await end(store, first)
    finished = await asyncio.wait_for(waiting, 60)
    assert [(r.rollout_id, r.status) for r in finished] == [
        (first.rollout_id, "succeeded"),
        (second.rollout_id, "failed"),
    ]


async def enqueue_group(store: LightningStore, run_id: str, size: int) -> list[AttemptedRollout]:
    group = await store.create_group(size, run_id)
    await store.enqueue_many_rollouts(
        [
            EnqueueRolloutRequest(input=i, group_id=group.group_id, group_index=i)
            for i in range(size)
        ]
    )
    return await store.dequeue_many_rollouts(size)


async def test_groups_are_numbered_in_the_order_they_become_complete(store):
    run = await store.start_run("train", {"seed": 1})
    first = await enqueue_group(store, run.run_id, 2)
    second = await enqueue_group(store, run.run_id, 1)
    assert {rollout.run_id for rollout in first + second} == {run.run_id}

    waiting = asyncio.create_task(store.complete_groups_after(run.run_id, 0, timeout=20))
    await end(store, first[0])
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await end(store, second[0], "failed")
    (group,) = await asyncio.wait_for(waiting, 60)
    assert (group.group_id, group.finished_index, group.size) == (second[0].group_id, 1, 1)

    await end(store, first[1])
    (group,) = await store.complete_groups_after(run.run_id, 1)
    assert (group.group_id, group.finished_index) == (first[0].group_id, 2)
    assert group.rollout_ids == (first[0].rollout_id, first[1].rollout_id)
    assert [g.finished_index for g in await store.complete_groups_after(run.run_id, 0)] == [1, 2]
    assert [
        g.finished_index for g in await store.complete_groups_after(run.run_id, 0, limit=1)
    ] == [1]
    assert await store.complete_groups_after(run.run_id, 2, timeout=0.02) == []
    assert await store.get_group(group.group_id) == group


async def test_a_group_takes_each_index_once_and_only_its_own(store):
    run = await store.start_run("train", {})
    group = await store.create_group(2, run.run_id, "group-1")
    assert await store.create_group(2, run.run_id, "group-1") == group
    with pytest.raises(ConflictError):
        await store.create_group(3, run.run_id, "group-1")
    with pytest.raises(InvalidError, match="0 to 1"):
        await store.enqueue_many_rollouts(
            [EnqueueRolloutRequest(input=0, group_id="group-1", group_index=2)]
        )
    with pytest.raises(InvalidError, match="group_id"):
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=0, group_index=0)])
    with pytest.raises(NotFoundError, match="group-2"):
        await store.enqueue_many_rollouts(
            [EnqueueRolloutRequest(input=0, group_id="group-2", group_index=0)]
        )
    request = EnqueueRolloutRequest(input=0, group_id="group-1", group_index=0)
    with pytest.raises(ConflictError, match="taken"):
        await store.enqueue_many_rollouts([request, request])
    assert await store.query_rollouts(group_id="group-1") == [], "all or none"


async def test_policy_versions_are_never_given_twice(store):
    run = await store.start_run("train", {})
    versions = await asyncio.gather(*(store.next_policy_version(run.run_id) for _ in range(10)))
    assert sorted(versions) == list(range(1, 11))
    assert (await store.query_runs())[0].policy_version == 10
    with pytest.raises(NotFoundError):
        await store.next_policy_version("run-nowhere")


async def test_a_run_is_resumed_under_its_id(store):
    run = await store.start_run("train", {"seed": 1}, "run-a")
    ended = await store.update_run("run-a", "cancelled")
    assert ended.end_time is not None
    resumed = await store.start_run("train", {"seed": 2}, "run-a")
    assert resumed == run
    with pytest.raises(ConflictError, match="kind"):
        await store.start_run("evaluate", {}, "run-a")
    with pytest.raises(NotFoundError):
        await store.update_run("run-b", "failed")


async def test_a_run_says_why_it_ended_and_is_deleted_whole(store):
    await store.start_run("train", {"seed": 1}, "run-a")
    await store.update_run("run-a", merge={"name": "first", "tags": ["a"]})
    measured = await store.add_metrics(
        Metrics(run_id="run-a", step=1, time=1.0, values={"reward": 0.1})
    )
    assert (
        measured.manifest == {"seed": 1, "name": "first", "tags": ["a"]}
        and measured.status == "running"
    )
    await store.create_group(2, run_id="run-a", group_id="group-a")
    requests = [
        EnqueueRolloutRequest(input=i, run_id="run-a", group_id="group-a", group_index=i)
        for i in range(2)
    ]
    await store.enqueue_many_rollouts(
        [*requests, EnqueueRolloutRequest(input="another", run_id="run-b")]
    )
    with pytest.raises(ConflictError, match="running"):
        await store.delete_run("run-a")
    ended = await store.update_run(
        "run-a", "failed", merge={"reason": "the agent broke", "name": None}
    )
    assert ended.manifest == {"seed": 1, "tags": ["a"], "reason": "the agent broke"}
    assert (await store.delete_run("run-a")).rollouts == 2
    assert await store.query_runs() == [] and await store.get_group("group-a") is None
    assert [rollout.input for rollout in await store.query_rollouts()] == ["another"]
    with pytest.raises(NotFoundError):
        await store.delete_run("run-a")


async def test_metrics_of_a_step_are_recorded_and_replaced(store):
    await store.start_run("train", {}, "run-a")
    await store.add_metrics(Metrics(run_id="run-a", step=2, time=1.0, values={"reward": 0.1}))
    await store.add_metrics(Metrics(run_id="run-a", step=1, time=0.0, values={"reward": 0.3}))
    await store.add_metrics(Metrics(run_id="run-a", step=2, time=2.0, values={"reward": 0.2}))
    assert [(m.step, m.values["reward"]) for m in await store.query_metrics("run-a")] == [
        (1, 0.3),
        (2, 0.2),
    ]
    with pytest.raises(NotFoundError):
        await store.query_metrics("run-b")


async def test_a_span_comes_back_as_it_was_written(store):
    leased = await lease_new(store)
    span = full_span(leased)
    assert await store.add_span(span) == span
    assert await store.query_spans(leased.rollout_id) == [span]


async def test_a_nul_in_a_name_is_kept_as_the_replacement_character(store):
    leased = await lease_new(store)
    await store.add_span(span_of(leased, name="a\0b", attributes={"text": "c\0d"}))
    (span,) = await store.query_spans(leased.rollout_id)
    assert (span.name, span.attributes["text"]) == ("a\ufffdb", "c\0d")


async def test_token_ids_must_be_32_bit(store):
    leased = await lease_new(store)
    with pytest.raises(InvalidError, match="32 bits"):
        await store.add_span(
            span_of(leased, tokens=TokenCapture(prompt_token_ids=(2**31,), choices=()))
        )


async def test_spans_are_numbered_within_their_attempt_and_ordered_by_time(store):
    leased = await lease_new(store)
    ids = leased.rollout_id, leased.attempt.attempt_id
    assert await store.get_next_span_sequence_id(*ids) == 1
    first = await store.add_span(span_of(leased, start_time=5.0))
    assert first.sequence_id == 2
    await store.add_span(span_of(leased, sequence_id=10, start_time=5.0))
    assert await store.get_next_span_sequence_id(*ids) == 11
    await store.add_span(span_of(leased, start_time=4.0))
    assert [span.sequence_id for span in await store.query_spans(leased.rollout_id)] == [12, 2, 10]


async def test_spans_are_asked_for_by_attempt(store):
    first = await lease_new(store)
    await store.add_span(span_of(first, name="one"))
    second = await store.start_attempt(first.rollout_id)
    await store.add_span(span_of(second, name="two"))
    assert [s.name for s in await store.query_spans(first.rollout_id)] == ["one", "two"]
    assert [s.name for s in await store.query_spans(first.rollout_id, "latest")] == ["two"]
    assert [
        s.name for s in await store.query_spans(first.rollout_id, first.attempt.attempt_id)
    ] == ["one"]


async def test_spans_of_an_unknown_attempt_are_refused_all_together(store):
    leased, other = await lease_new(store), await lease_new(store)
    stray = span_of((other.rollout_id, leased.attempt.attempt_id))
    with pytest.raises(NotFoundError, match="attempt"):
        await store.add_many_spans([span_of(leased), stray])
    assert await store.query_spans(leased.rollout_id) == []


async def test_resources_are_immutable_versions(store):
    assert await store.get_latest_resources() is None
    llm = LLM(endpoint="http://h/v1", model="m", sampling_parameters={"temperature": 0.7})
    first = await store.add_resources({"llm": llm}, {"from": "test"})
    second = await store.update_resources("prompts-2", {"prompt": PromptTemplate(template="{x}")})
    assert (first.version, second.version, first.metadata) == (1, 2, {"from": "test"})
    assert await store.get_latest_resources() == second
    assert await store.get_resources_by_id(first.resources_id) == first
    assert first.resources == {"llm": llm}
    assert (
        await store.update_resources("prompts-2", {"prompt": PromptTemplate(template="{x}")})
        == second
    )
    with pytest.raises(ConflictError, match="immutable"):
        await store.update_resources("prompts-2", {"prompt": PromptTemplate(template="{y}")})
    assert await store.query_resources() == [first, second]
    assert (await store.enqueue_rollout(1, resources_id="prompts-2")).resources_id == "prompts-2"
    with pytest.raises(NotFoundError, match="prompts-3"):
        await store.enqueue_rollout(1, resources_id="prompts-3")


async def test_a_worker_is_busy_while_it_holds_an_attempt(store):
    leased = await lease_new(store)
    worker = await store.get_worker_by_id("worker-1")
    assert (worker.status, worker.current_attempt_id) == ("busy", leased.attempt.attempt_id)
    await end(store, leased)
    worker = await store.update_worker("worker-1", {"memory": 12})
    assert (worker.status, worker.current_attempt_id, worker.heartbeat_stats) == (
        "idle",
        None,
        {"memory": 12},
    )
    assert await store.query_workers() == [worker]
    assert await store.get_worker_by_id("worker-2") is None


async def test_rollouts_are_found_by_what_they_are(store):
    run = await store.start_run("train", {})
    requests = [
        EnqueueRolloutRequest(input=i, run_id=run.run_id, mode="val" if i % 2 else "train")
        for i in range(4)
    ]
    ids = [rollout.rollout_id for rollout in await store.enqueue_many_rollouts(requests)]
    await store.enqueue_rollout("of no run")
    await store.cancel_rollout(ids[3])

    async def found(**filters) -> list[str]:
        return [rollout.rollout_id for rollout in await store.query_rollouts(**filters)]

    assert await found(run_id=run.run_id) == ids
    assert await found(run_id=run.run_id, mode_in=["val"]) == [ids[1], ids[3]]
    assert await found(mode_in=["val"], status_in=["queuing"]) == [ids[1]]
    assert await found(rollout_id_in=[ids[2], ids[0], "ro-nowhere"]) == [ids[0], ids[2]]
    assert await found(rollout_id_in=[]) == []
    assert await found(run_id=run.run_id, limit=2, offset=1) == ids[1:3]
    with pytest.raises(InvalidError):
        await found(limit=-1)


async def test_a_rollout_enqueued_twice_under_its_id_is_stored_once(store):
    request = EnqueueRolloutRequest(input={"a": 1, "b": [1, 2]}, rollout_id="mine")
    (first,) = await store.enqueue_many_rollouts([request])
    (again,) = await store.enqueue_many_rollouts(
        [EnqueueRolloutRequest(input={"b": [1, 2], "a": 1}, rollout_id="mine")]
    )
    assert again == first
    assert len(await store.query_rollouts()) == 1
    with pytest.raises(ConflictError, match="mine"):
        await store.enqueue_many_rollouts(
            [
                EnqueueRolloutRequest(input=1),
                EnqueueRolloutRequest(input="other", rollout_id="mine"),
            ]
        )
    assert len(await store.query_rollouts()) == 1


@pytest.mark.parametrize("name", ["", "a/b", "a b", "é", "x" * 201])
async def test_an_id_that_cannot_stand_in_a_url_is_refused(store, name):
    with pytest.raises(InvalidError, match="rollout_id"):
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=1, rollout_id=name)])


VALUES = [
    None,
    0.1,
    2**64 - 1,
    [-(2**63), 2**53 + 1],
    "Ω≈ç√ 🚀",
    [],
    {"deep": {"er": [None, {"x": "\u0000"}]}},
]


@pytest.mark.parametrize("value", VALUES)
async def test_an_input_comes_back_as_it_was_given(store, value):
    queued = await store.enqueue_rollout(value, metadata={"value": value})
    assert (await store.get_rollout_by_id(queued.rollout_id)).input == value
    leased = await store.dequeue_rollout()
    assert (leased.input, leased.metadata) == (value, {"value": value})


async def test_what_is_returned_is_a_copy(store):
    task = {"question": "2+2"}
    queued = await store.enqueue_rollout(task)
    task["question"] = "3+3"
    queued.input["question"] = "4+4"
    stored = await store.get_rollout_by_id(queued.rollout_id)
    stored.input["question"] = "5+5"
    assert (await store.get_rollout_by_id(queued.rollout_id)).input == {"question": "2+2"}


async def test_unknown_ids_are_not_found(store):
    assert await store.get_rollout_by_id("ro-nowhere") is None
    assert await store.get_latest_attempt("ro-nowhere") is None
    assert await store.get_group("gr-nowhere") is None
    assert await store.get_resources_by_id("rs-nowhere") is None
    leased = await lease_new(store)
    for call in (
        store.query_attempts("ro-nowhere"),
        store.query_spans("ro-nowhere"),
        store.query_spans(leased.rollout_id, "at-nowhere"),
        store.cancel_rollout("ro-nowhere"),
        store.update_rollout("ro-nowhere", metadata={}),
        store.start_attempt("ro-nowhere"),
        store.update_attempt(leased.rollout_id, "at-nowhere", status="failed"),
        store.update_attempt("ro-nowhere", leased.attempt.attempt_id, status="failed"),
        store.heartbeat(leased.rollout_id, "at-nowhere", 1),
        store.get_next_span_sequence_id(leased.rollout_id, "at-nowhere"),
        store.complete_groups_after("run-nowhere", 0),
    ):
        with pytest.raises(NotFoundError, match="nowhere"):
            await call
