"""The runner leases, runs, reports and survives what agents do."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import ConfigError, UnavailableError
from agentlightning.runner.runner import Runner
from agentlightning.store.sql import SqlStore
from agentlightning.tracing.context import AttemptTracer
from agentlightning.types import LLM, AttemptedRollout, EnqueueRolloutRequest, RolloutConfig, Span
from tests.runner.world import LEASE_SECONDS, Endpoint, running

pytestmark = pytest.mark.anyio


async def enqueue(
    store: SqlStore, tasks: list[Any], config: RolloutConfig | None = None, mode: Any = "train"
) -> list[str]:
    requests = [EnqueueRolloutRequest(input=task, mode=mode, config=config or RolloutConfig()) for task in tasks]
    return [rollout.rollout_id for rollout in await store.enqueue_many_rollouts(requests)]


async def run_to_end(
    store: SqlStore, agent: Any, tasks: list[Any], config: RolloutConfig | None = None, **options: Any
):
    """Enqueue tasks, run the agent on them and return the terminal rollouts in the order of the tasks."""
    rollout_ids = await enqueue(store, tasks, config)
    async with running(Runner(store, agent, **options)):
        done = await store.wait_for_rollouts(rollout_ids, timeout=60)
    by_id = {rollout.rollout_id: rollout for rollout in done}
    return [by_id[rollout_id] for rollout_id in rollout_ids]


async def reason_of(store: SqlStore, rollout_id: str) -> str:
    attempt = await store.get_latest_attempt(rollout_id)
    assert attempt is not None
    return str(attempt.metadata.get("reason"))


# --- the ordinary life -------------------------------------------------------------------------------------------


async def test_a_returned_number_is_the_final_reward_of_a_succeeded_rollout(store: SqlStore) -> None:
    @agl.rollout
    async def agent(task: float) -> float:
        agl.emit_reward(99.0)
        return task

    (rollout,) = await run_to_end(store, agent, [0.3])
    assert rollout.status == "succeeded"
    spans = await store.query_spans(rollout.rollout_id)
    assert agl.find_final_reward(spans) == 0.3
    attempt = await store.get_latest_attempt(rollout.rollout_id)
    assert attempt is not None and attempt.status == "succeeded"
    assert attempt.worker_id


async def test_without_a_returned_value_the_emitted_reward_counts_and_none_is_fine(store: SqlStore) -> None:
    def agent(task: float | None) -> None:
        if task is not None:
            agl.emit_reward(task)

    rewarded, unrewarded = await run_to_end(store, agent, [0.5, None])
    assert rewarded.status == unrewarded.status == "succeeded"
    assert agl.find_final_reward(await store.query_spans(rewarded.rollout_id)) == 0.5
    assert agl.find_final_reward(await store.query_spans(unrewarded.rollout_id)) is None


async def test_returned_spans_become_the_attempts_own(store: SqlStore) -> None:
    def agent(task: Any, rollout: AttemptedRollout) -> list[Span]:
        return [
            Span(
                rollout_id="?",
                attempt_id="?",
                sequence_id=0,
                trace_id="1" * 32,
                span_id="2" * 16,
                name="mine",
                start_time=1.0,
                end_time=2.0,
            )
        ]

    (rollout,) = await run_to_end(store, agent, ["x"])
    (span,) = await store.query_spans(rollout.rollout_id)
    assert (span.name, span.rollout_id) == ("mine", rollout.rollout_id)


@pytest.mark.slow
async def test_hundreds_of_concurrent_attempts_are_attributed_right(store: SqlStore, endpoint: Endpoint) -> None:
    """By URL, by key and by contextvar, each attempt's calls and spans are its own."""
    await store.add_resources({"llm": LLM(endpoint=endpoint.url, model="policy", gateway=True)})
    keys: dict[str, tuple[str, str]] = {}
    together = asyncio.Barrier(200)

    @agl.rollout
    async def agent(task: int, llm: LLM, rollout: agl.AttemptedRollout) -> float:
        await together.wait()
        client = agl.openai_client(llm)
        for _ in range(2):
            answer = await client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": "hi"}])
            agl.emit_message(f"{task} {answer.choices[0].message.content}")
        keys[rollout.rollout_id] = (rollout.attempt.attempt_id, f"Bearer {llm.api_key}")
        return task / 1000

    rollouts = await run_to_end(store, agent, list(range(200)), concurrency=200)
    for task, rollout in enumerate(rollouts):
        attempt_id, key = keys[rollout.rollout_id]
        path = f"/rollout/{rollout.rollout_id}/attempt/{attempt_id}/v1/chat/completions"
        assert endpoint.calls[path, key] == 2
        found = await store.find_key(api_key=key.removeprefix("Bearer "))
        assert found is not None and found.attempt == (rollout.rollout_id, attempt_id)
        spans = await store.query_spans(rollout.rollout_id)
        assert agl.find_final_reward(spans) == task / 1000
        assert [span.attributes["agentlightning.message.body"] for span in spans[:2]] == [f"{task} hello"] * 2
    assert sum(endpoint.calls.values()) == 400


async def test_no_more_than_concurrency_run_at_once(store: SqlStore) -> None:
    now, most = 0, 0

    async def agent(task: int) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1

    await run_to_end(store, agent, list(range(20)), concurrency=3)
    assert most == 3


async def test_sync_agents_run_side_by_side_in_threads_with_their_binding(store: SqlStore) -> None:
    together = threading.Barrier(8)

    @agl.rollout
    def agent(task: int) -> float:
        together.wait(10)
        agl.emit_message(str(task))
        return float(task)

    rollouts = await run_to_end(store, agent, list(range(8)))
    for task, rollout in enumerate(rollouts):
        message, _ = await store.query_spans(rollout.rollout_id)
        assert message.attributes["agentlightning.message.body"] == str(task)


async def test_the_mode_chooses_the_method(store: SqlStore) -> None:
    class Agent(agl.LitAgent[str]):
        async def training_rollout_async(self, task: str, resources: Any, rollout: Any) -> float:
            return 1.0

        def validation_rollout(self, task: str, resources: Any, rollout: Any) -> float:
            return 2.0

    train, val, test = [(await enqueue(store, ["t"], mode=mode))[0] for mode in ("train", "val", "test")]
    async with running(Runner(store, Agent())):
        await store.wait_for_rollouts([train, val, test], timeout=60)
    rewards = [agl.find_final_reward(await store.query_spans(rollout_id)) for rollout_id in (train, val, test)]
    assert rewards == [1.0, 2.0, 2.0]


async def test_run_one_returns_the_ended_rollout_and_raises_what_the_agent_raises(store: SqlStore) -> None:
    @agl.rollout
    async def agent(task: float, resources: agl.NamedResources) -> float:
        return task / len(resources)

    runner = Runner(store, agent)
    resources: agl.NamedResources = {"llm": LLM(endpoint="http://127.0.0.1:1/v1", model="m")}
    rollout = await runner.run_one(0.5, resources)
    assert rollout.status == "succeeded"
    assert agl.find_final_reward(await store.query_spans(rollout.rollout_id)) == 0.5
    with pytest.raises(ZeroDivisionError):
        await runner.run_one(0.5, {})


# --- what agents do ----------------------------------------------------------------------------------------------


async def test_an_agent_that_raises_fails_its_attempt_and_only_that(
    store: SqlStore, caplog: pytest.LogCaptureFixture
) -> None:
    @agl.rollout
    async def agent(task: str) -> float:
        if task == "bad":
            raise ValueError("no such flight")
        return 1.0

    bad, good = await run_to_end(store, agent, ["bad", "good"])
    assert (bad.status, good.status) == ("failed", "succeeded")
    (span,) = await store.query_spans(bad.rollout_id)
    assert span.name == "agentlightning.exception"
    assert span.attributes["exception.message"] == "no such flight"
    assert "test_runner.py" in str(span.attributes["exception.stacktrace"])
    assert await reason_of(store, bad.rollout_id) == "ValueError: no such flight"
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "no such flight" in warning.getMessage() and "\n" not in warning.getMessage()


async def test_an_agent_that_always_fails_does_not_flood_the_log(
    store: SqlStore, caplog: pytest.LogCaptureFixture
) -> None:
    def agent(task: int) -> float:
        raise ValueError(f"bad {task}")

    rollouts = await run_to_end(store, agent, list(range(40)))
    assert {rollout.status for rollout in rollouts} == {"failed"}
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 6  # 1, 2, 4, 8, 16, 32
    assert await reason_of(store, rollouts[39].rollout_id) == "ValueError: bad 39"


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), asyncio.CancelledError(), BaseException("odd"),
                                   ValueError("no file \udcff")])  # fmt: skip
@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_not_even_the_worst_exceptions_of_an_agent_end_the_runner(
    store: SqlStore, error: BaseException, kind: str
) -> None:
    async def async_agent(task: str) -> float:
        return sync_agent(task)

    def sync_agent(task: str) -> float:
        if task == "bad":
            raise error
        return 1.0

    bad, good = await run_to_end(store, async_agent if kind == "async" else sync_agent, ["bad", "good"])
    assert (bad.status, good.status) == ("failed", "succeeded")


@pytest.mark.parametrize("nonsense", ["1.0", math.nan, math.inf, 1j, {"a": 1.0, "b": 2.0}, [1.0], object()])
async def test_a_nonsense_result_fails_the_attempt_and_says_what_was_expected(store: SqlStore, nonsense: Any) -> None:
    def agent(task: str) -> Any:
        return nonsense

    (rollout,) = await run_to_end(store, agent, ["x"])
    assert rollout.status == "failed"
    reason = await reason_of(store, rollout.rollout_id)
    assert "the agent" in reason and ("expected" in reason or "must be" in reason)
    assert agl.find_final_reward(await store.query_spans(rollout.rollout_id)) is None


async def test_a_hanging_agent_is_cancelled_at_its_timeout(store: SqlStore) -> None:
    cleaned = asyncio.Event()

    async def agent(task: str) -> float:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()
        return 1.0

    (rollout,) = await run_to_end(store, agent, ["x"], RolloutConfig(timeout_seconds=0.2))
    attempt = await store.get_latest_attempt(rollout.rollout_id)
    assert (rollout.status, attempt and attempt.status) == ("failed", "timeout")
    assert cleaned.is_set()


async def test_an_answer_after_the_timeout_is_ignored(store: SqlStore) -> None:
    release = threading.Event()

    def sync_agent(task: str) -> float:
        release.wait(10)
        return 1.0

    async def stubborn_agent(task: str) -> float:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return 1.0
        return 0.0

    for agent in (sync_agent, stubborn_agent):
        (rollout,) = await run_to_end(store, agent, ["x"], RolloutConfig(timeout_seconds=0.2))
        release.set()
        assert rollout.status == "failed"
        assert agl.find_final_reward(await store.query_spans(rollout.rollout_id)) is None


async def test_cancelling_a_rollout_reaches_its_agent_within_a_heartbeat(brief_store: SqlStore) -> None:
    started, stopped = asyncio.Event(), asyncio.Event()

    async def agent(task: str) -> float:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        return 1.0

    (rollout_id,) = await enqueue(brief_store, ["x"])
    async with running(Runner(brief_store, agent)):
        await asyncio.wait_for(started.wait(), 60)
        await brief_store.cancel_rollout(rollout_id)
        await asyncio.wait_for(stopped.wait(), 60)
    rollout = await brief_store.get_rollout_by_id(rollout_id)
    assert rollout is not None and rollout.status == "cancelled"


@pytest.mark.slow
async def test_heartbeats_keep_a_long_attempt_alive_and_bring_its_spans(brief_store: SqlStore) -> None:
    release = asyncio.Event()

    async def agent(task: str) -> float:
        agl.emit_message("so far")
        await release.wait()
        return 1.0

    (rollout_id,) = await enqueue(brief_store, ["x"])
    async with running(Runner(brief_store, agent)):
        await asyncio.sleep(2 * LEASE_SECONDS)
        assert [span.name for span in await brief_store.query_spans(rollout_id)] == ["agentlightning.message"]
        release.set()
        (rollout,) = await brief_store.wait_for_rollouts([rollout_id], timeout=60)
    assert rollout.status == "succeeded"
    assert len(await brief_store.query_attempts(rollout_id)) == 1


async def test_what_is_recorded_while_an_attempt_ends_is_stored_or_dropped_aloud(
    store: SqlStore, caplog: pytest.LogCaptureFixture
) -> None:
    tracers: list[AttemptTracer] = []
    chatters: list[asyncio.Task[None]] = []

    class Keep(agl.Hook):
        async def on_trace_start(self, *, tracer: AttemptTracer, **_: Any) -> None:
            tracers.append(tracer)

    async def chatter() -> None:
        while "it is dropped" not in caplog.text:
            agl.emit_message("still here")
            await asyncio.sleep(0)

    async def agent(task: str) -> float:
        chatters.append(asyncio.create_task(chatter()))
        return 1.0

    runner = Runner(store, agent, hooks=[Keep()])
    rollout = await runner.run_one("x")
    await asyncio.wait_for(chatters[0], 60)
    stored = await store.query_spans(rollout.rollout_id)
    assert {span.span_id for span in stored} == {span.span_id for span in tracers[0].get_last_trace()}


# --- hooks -------------------------------------------------------------------------------------------------------


class Notes(agl.Hook):
    def __init__(self, failing: str | None = None) -> None:
        self.seen: list[str] = []
        self.failing = failing

    def note(self, name: str) -> None:
        self.seen.append(name)
        if name == self.failing:
            raise RuntimeError(f"{name} failed")

    async def on_rollout_start(self, **arguments: Any) -> None:
        assert set(arguments) == {"agent", "runner", "rollout"}
        self.note("rollout_start")

    async def on_trace_start(self, **arguments: Any) -> None:
        assert set(arguments) == {"agent", "runner", "tracer", "rollout"}
        self.note("trace_start")

    async def on_trace_end(self, *, tracer: Any, **arguments: Any) -> None:
        self.note("trace_end")
        agl.emit_reward(0.25 * len(tracer.get_last_trace()))

    async def on_rollout_end(self, *, spans: Any, **arguments: Any) -> None:
        self.note(f"rollout_end {len(spans)}")


async def test_hooks_run_in_order_and_may_emit_the_reward(store: SqlStore) -> None:
    async def agent(task: str) -> None:
        hook.note("agent")
        agl.emit_message("one")

    hook = Notes()
    (rollout,) = await run_to_end(store, agent, ["x"], hooks=[hook])
    assert hook.seen == ["rollout_start", "trace_start", "agent", "trace_end", "rollout_end 2"]
    assert agl.find_final_reward(await store.query_spans(rollout.rollout_id)) == 0.25


@pytest.mark.parametrize("failing", ["rollout_start", "trace_start", "trace_end", "rollout_end 2"])
async def test_a_hook_that_raises_fails_the_attempt(store: SqlStore, failing: str) -> None:
    async def agent(task: str) -> None:
        agl.emit_message("one")

    (rollout,) = await run_to_end(store, agent, ["x"], hooks=[Notes(failing)])
    assert rollout.status == "failed"
    assert await reason_of(store, rollout.rollout_id) == f"RuntimeError: {failing} failed"


async def test_end_hooks_run_when_the_agent_raises(store: SqlStore) -> None:
    async def agent(task: str) -> None:
        raise ValueError("bad")

    hook = Notes()
    (rollout,) = await run_to_end(store, agent, ["x"], hooks=[hook])
    assert hook.seen[-2:] == ["trace_end", "rollout_end 2"]  # the hook's reward and the exception
    assert await reason_of(store, rollout.rollout_id) == "ValueError: bad"


# --- the runner's own end ----------------------------------------------------------------------------------------


async def test_stop_finishes_what_is_in_flight_and_leases_nothing_more(store: SqlStore) -> None:
    started, release = asyncio.Event(), asyncio.Event()

    async def agent(task: str) -> float:
        started.set()
        await release.wait()
        return 1.0

    first, second = await enqueue(store, ["a", "b"])
    runner = Runner(store, agent, concurrency=1)
    task = asyncio.create_task(runner.run())
    await asyncio.wait_for(started.wait(), 60)
    runner.stop()
    release.set()
    await asyncio.wait_for(task, 60)
    states = [(await store.get_rollout_by_id(rollout_id)) for rollout_id in (first, second)]
    assert [state and state.status for state in states] == ["succeeded", "queuing"]


async def test_a_cancelled_runner_hands_its_rollouts_to_another_at_once(store: SqlStore) -> None:
    started = asyncio.Event()

    async def hanging(task: str) -> float:
        started.set()
        await asyncio.Event().wait()
        return 0.0

    retry = RolloutConfig(max_attempts=2, retry_condition=("unresponsive",))
    (rollout_id,) = await enqueue(store, ["x"], retry)
    task = asyncio.create_task(Runner(store, hanging).run())
    await asyncio.wait_for(started.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with running(Runner(store, lambda task: 1.0)):
        (rollout,) = await store.wait_for_rollouts([rollout_id], timeout=60)
    attempts = await store.query_attempts(rollout_id)
    assert rollout.status == "succeeded"
    assert [attempt.status for attempt in attempts] == ["unresponsive", "succeeded"]


async def test_what_is_leased_as_a_runner_is_cancelled_is_handed_back(tmp_path: Path) -> None:
    class Leasing(SqlStore):
        """Its lease is answered in the moment in which the runner is cancelled."""

        async def dequeue_many_rollouts(self, *arguments: Any, **options: Any) -> list[AttemptedRollout]:
            leased = await super().dequeue_many_rollouts(*arguments, **options)
            task.cancel()
            return leased

    store = await Leasing.open(tmp_path / "store.db")
    retry = RolloutConfig(max_attempts=2, retry_condition=("unresponsive",))
    rollout_ids = await enqueue(store, ["x", "y"], retry)
    task = asyncio.create_task(Runner(store, lambda task: 1.0).run())
    with pytest.raises(asyncio.CancelledError):
        await task
    kept = [await store.get_rollout_by_id(rollout_id) for rollout_id in rollout_ids]
    assert [rollout and rollout.status for rollout in kept] == ["requeuing", "requeuing"]
    await store.close()


async def test_the_agent_of_a_superseded_attempt_is_stopped(brief_store: SqlStore) -> None:
    started, stopped = asyncio.Event(), asyncio.Event()

    async def agent(task: str) -> float:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        return 1.0

    (rollout_id,) = await enqueue(brief_store, ["x"], RolloutConfig(max_attempts=2, retry_condition=("unresponsive",)))
    runner = Runner(brief_store, agent, concurrency=1)
    task = asyncio.create_task(runner.run())
    await asyncio.wait_for(started.wait(), 60)
    first = await brief_store.get_latest_attempt(rollout_id)
    assert first is not None
    await brief_store.update_attempt(rollout_id, first.attempt_id, status="unresponsive")
    second = await brief_store.dequeue_rollout("another")
    assert second is not None and second.rollout_id == rollout_id
    await asyncio.wait_for(stopped.wait(), 60)
    assert second.lease is not None
    await brief_store.update_attempt(
        rollout_id, second.attempt.attempt_id, status="succeeded", lease=second.lease.token
    )
    runner.stop()
    await asyncio.wait_for(task, 60)
    assert [attempt.status for attempt in await brief_store.query_attempts(rollout_id)] == ["unresponsive", "succeeded"]


async def test_an_agent_that_cannot_run_is_refused_before_anything_is_leased(store: SqlStore) -> None:
    class Empty(agl.LitAgent[Any]):
        pass

    with pytest.raises(ConfigError, match="does not define"):
        Runner(store, Empty())
    with pytest.raises(ConfigError, match="pass an instance"):
        Runner(store, Empty)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="concurrency"):
        Runner(store, lambda task: None, concurrency=0)


async def test_a_store_that_stays_away_ends_the_runner_with_a_clear_error(store: SqlStore) -> None:
    await store.close()
    before = time.monotonic()
    with pytest.raises(UnavailableError, match=r"did not answer for 0\.3 s"):
        await Runner(store, lambda task: None, patience_seconds=0.3).run()
    assert time.monotonic() - before < 10


@pytest.mark.slow
async def test_workers_report_themselves(brief_store: SqlStore) -> None:
    release = asyncio.Event()

    async def agent(task: str) -> None:
        await release.wait()

    (rollout_id,) = await enqueue(brief_store, ["x"])
    async with running(Runner(brief_store, agent, worker_id="worker-1")):
        await asyncio.sleep(LEASE_SECONDS)
        worker = await brief_store.get_worker_by_id("worker-1")
        release.set()
        await brief_store.wait_for_rollouts([rollout_id], timeout=60)
    assert worker is not None and worker.current_rollout_id == rollout_id
