"""Nothing of one project for the keys of another: not to read, change, list, hear or guess."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from agentlightning.semconv import ATTEMPT_ID, ROLLOUT_ID
from agentlightning.store import calls
from agentlightning.store.sql import SqlStore
from agentlightning.types import (
    UNATTRIBUTED,
    Condition,
    EnqueueRolloutRequest,
)
from tests.server.places import NAMELESS, NAMING, OF_THE_WHOLE, Caller, Place, furnish, issue, otlp, span_of

pytestmark = pytest.mark.anyio


async def everything(store: SqlStore, place: Place) -> list[Any]:
    """All that there is of a place."""
    return [
        await store.get_rollout_by_id(place.rollout_id),
        await store.query_attempts(place.rollout_id),
        await store.query_spans(place.rollout_id),
        await store.query_rollouts(run_id=place.run_id),
        [run for run in await store.query_runs() if run.run_id == place.run_id],
        await store.query_metrics(place.run_id),
        await store.query_checkpoints(place.run_id),
        await store.get_group(place.group_id),
        await store.query_resources(place.project),
        [worker for worker in await store.query_workers() if worker.worker_id == place.worker_id],
    ]


@pytest.fixture
async def insider(store, http) -> Caller:
    """Whoever may do most in project `a`, where there is something."""
    await furnish(store, "a", "a")
    return Caller(http, await issue(store, "admin", project="a"))


async def test_what_another_project_has_is_as_if_it_were_not(store, insider):
    place = await furnish(store, "elsewhere", "b")
    before = await everything(store, place)
    for kind, make in NAMING.items():
        status, text = await insider(make(place))
        assert status == 404, (kind, text)
        nowhere = await insider(make(replace(place, tag="nowhere")))
        assert (status, text.replace("elsewhere", "nowhere")) == nowhere, kind
    assert await everything(store, place) == before


async def test_an_id_that_is_named_again_and_again_is_looked_up_once(store, insider, monkeypatch):
    place = await furnish(store, "own", "a")
    asked: list[str] = []
    look_up = store.get_rollout_by_id
    monkeypatch.setattr(store, "get_rollout_by_id", lambda name: asked.append(name) or look_up(name))
    status, _ = await insider(calls.WaitForRollouts(rollout_ids=[place.rollout_id] * 1000, timeout=0))
    assert (status, asked) == (200, [place.rollout_id])


async def test_ids_of_another_project_cannot_be_taken_over(store, insider):
    place = await furnish(store, "elsewhere", "b")
    before = await everything(store, place)
    same = {"input": "input of elsewhere", "rollout_id": place.rollout_id}
    in_group = EnqueueRolloutRequest(input=1, group_id=place.group_id, group_index=0)
    for call in (
        calls.EnqueueRollouts(requests=[EnqueueRolloutRequest(**same)]),
        calls.EnqueueRollouts(requests=[EnqueueRolloutRequest(input=1), in_group]),
        calls.StartRollout(request=EnqueueRolloutRequest(**same)),
        calls.StartRollout(request=in_group),
        calls.StartRun(kind="train", manifest={}, run_id=place.run_id),
        calls.CreateGroup(size=1, run_id="run-a", group_id=place.group_id),
        calls.CreateGroup(size=1, run_id=place.run_id, group_id=place.group_id),
        calls.AddResources(resources={}, resources_id=place.resources_id),
        calls.AddResources(resources={}, run_id=place.run_id),
    ):
        status, text = await insider(call)
        assert status == 404, (call, text)
    assert await everything(store, place) == before
    assert len(await store.query_rollouts()) == 2


async def test_another_projects_leases_cannot_be_asked_for_again(store, insider):
    await store.perform(calls.EnqueueRollouts(requests=[EnqueueRolloutRequest(input="private", project="b")]))
    (theirs,) = await store.perform(calls.LeaseRollouts(project="b", lease_id="guessed"))
    request = EnqueueRolloutRequest(input=1)
    for call in (
        calls.LeaseRollouts(lease_id="guessed"),
        calls.StartRollout(request=request, attempt_id=theirs.attempt.attempt_id),
        calls.StartAttempt(rollout_id="rollout-a", attempt_id=theirs.attempt.attempt_id),
    ):
        status, text = await insider(call)
        assert status == 409 and theirs.rollout_id not in text and "private" not in text, text


async def test_lists_and_feeds_show_one_project(store, insider):
    place = await furnish(store, "elsewhere", "b")
    await furnish(store, "elsewhere-default", "default")
    await store.perform(calls.CancelRollout(rollout_id=place.rollout_id))
    everywhere = Condition("project", "in", ["a", "b", "default"])
    for call in (
        *(make(Place("a", "a")) for kind, make in NAMELESS.items() if kind not in OF_THE_WHOLE),
        calls.QueryRollouts(where=everywhere),
        calls.QuerySpans(where=everywhere),
        calls.FinishedAfter(),
        calls.UpdateWorker(worker_id="worker-a"),
    ):
        status, text = await insider(call)
        assert status == 200 and "elsewhere" not in text, (call, text)
    for project in ("b", "default", "*"):
        for call in (
            calls.QueryRollouts(project=project),
            calls.QuerySpans(project=project),
            calls.QueryRuns(project=project),
            calls.QueryResources(project=project),
            calls.GetLatestResources(project=project),
            calls.FinishedAfter(project=project),
            calls.LeaseRollouts(project=project),
            calls.StartRun(kind="train", manifest={}, project=project),
            calls.AddResources(resources={}, project=project),
            calls.IssueKey(name="k", scopes=["admin"], project=project),
            calls.DeleteRollouts(where=everywhere, project=project),
            calls.EnqueueRollouts(requests=[EnqueueRolloutRequest(input=1, project=project)]),
            calls.StartRollout(request=EnqueueRolloutRequest(input=1, project=project)),
        ):
            assert (await insider(call))[0] == 404, call


async def test_what_a_key_of_a_project_makes_is_in_that_project(store, insider):
    for call in (
        calls.EnqueueRollouts(requests=[EnqueueRolloutRequest(input="new", rollout_id="new-1")]),
        calls.StartRollout(request=EnqueueRolloutRequest(input="new", rollout_id="new-2")),
        calls.StartRun(kind="train", manifest={}, run_id="new"),
        calls.AddResources(resources={}, resources_id="new"),
    ):
        status, text = await insider(call)
        assert status == 200 and '"project":"a"' in text
    assert {rollout.project for rollout in await store.query_rollouts()} == {"a"}
    _, text = await insider(calls.IssueKey(name="k", scopes=["admin"]))
    assert json.loads(text)["project"] == "a"


async def test_deleting_everything_deletes_what_is_in_the_project(store, insider):
    place = await furnish(store, "elsewhere", "b")
    before = await everything(store, place)
    everywhere = Condition("start_time", "ge", 0.0)
    assert (await insider(calls.DeleteRollouts(where=everywhere, unfinished=True)))[0] == 200
    assert await everything(store, place) == before
    assert {rollout.project for rollout in await store.query_rollouts()} == {"b"}


async def test_groups_without_a_run_are_nobodys(store, insider):
    await store.perform(calls.CreateGroup(size=2, group_id="loose"))
    assert (await insider(calls.GetGroup(group_id="loose")))[0] == 404
    in_group = EnqueueRolloutRequest(input=1, group_id="loose", group_index=0)
    assert (await insider(calls.EnqueueRollouts(requests=[in_group])))[0] == 404
    status, text = await insider(calls.CreateGroup(size=2))
    assert status == 403 and "run_id" in text


async def test_workers_of_another_project_are_not_met_by_name(store, insider):
    place = await furnish(store, "elsewhere", "b")
    await store.update_worker(place.worker_id, {"load": 7})
    before = await everything(store, place)
    for call in (
        calls.UpdateWorker(worker_id=place.worker_id, heartbeat_stats={"load": 0}),
        calls.UpdateWorker(worker_id=place.worker_id),
        calls.LeaseRollouts(worker_id=place.worker_id),
    ):
        status, text = await insider(call)
        assert status == 200 and place.rollout_id not in text and "busy" not in text
    assert await everything(store, place) == before
    _, text = await insider(calls.UpdateWorker(worker_id="a/worker-a"))
    assert json.loads(text)["worker_id"] == "a/worker-a"


async def test_events_of_other_projects_are_not_heard(store, http, insider):
    headers = {"authorization": f"Bearer {insider.key}"}
    async with http.get("/api/v1/events", headers=headers, timeout=aiohttp.ClientTimeout(sock_read=30)) as stream:
        await stream.content.readuntil(b"reset")
        await furnish(store, "elsewhere", "b")
        await furnish(store, "last", "a")
        heard = await stream.content.readuntil(b'"rollout_id":"rollout-last"')
    assert b"elsewhere" not in heard and b'"b"' not in heard


async def test_exporters_reach_no_other_project(store, insider):
    place = await furnish(store, "elsewhere", "b")
    claim = span_of(place, 9, attributes={ROLLOUT_ID: place.rollout_id, ATTEMPT_ID: place.attempt_id})
    for path in ("/v1/traces", f"/rollout/{place.rollout_id}/attempt/{place.attempt_id}/v1/traces"):
        assert (await insider.request("POST", path, **otlp(claim)))[0] == 403
    assert len(await store.query_spans(place.rollout_id)) == 1
    assert (await insider(calls.AddSpans(spans=[span_of(place, rollout_id=UNATTRIBUTED, attempt_id=UNATTRIBUTED)])))[
        0
    ] == 404
    assert (await insider(calls.GetSpans(rollout_id=UNATTRIBUTED)))[0] == 404


async def test_a_key_of_the_default_project_keeps_what_nobody_claims(store, http):
    caller = Caller(http, await issue(store, "grader", project="default"))
    unclaimed = {
        "resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "7" * 32, "spanId": "7" * 16, "name": "n"}]}]}]
    }
    assert (await caller.request("POST", "/v1/traces", json=unclaimed))[0] == 200
    assert len(await store.query_spans(UNATTRIBUTED)) == 1
