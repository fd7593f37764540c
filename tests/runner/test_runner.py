"""The runner leases, runs, reports and survives what agents do."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import ConfigError, UnavailableError
from agentlightning.runner.runner import Runner
from agentlightning.runner.signals import handling_signals
from agentlightning.store.sql import SqlStore
from agentlightning.tracing.context import AttemptTracer
from agentlightning.types import AttemptedRollout, RolloutConfig
from tests.runner.world import (
    AGAIN,
    Waiting,
    enqueue,
    reason_of,
    run_to_end,
    running,
    statuses,
)

pytestmark = pytest.mark.anyio


# --- the ordinary life ----------------------------------------------------------------------------


async def test_agents_run_side_by_side_up_to_the_concurrency(store: SqlStore) -> None:
    now, most, together = 0, 0, threading.Barrier(8)

    async def counted(task: int) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1

    def in_threads(task: int) -> float:
        together.wait(10)
        agl.emit_message(str(task))
        return float(task)

    await run_to_end(store, counted, *range(20), concurrency=3)
    assert most == 3
    (worker,) = await store.query_workers()
    assert worker.heartbeat_stats == {"running": 0, "finished": 20, "concurrency": 3, "ended": True}
    for task, rollout in enumerate(await run_to_end(store, in_threads, *range(8))):
        message, _ = await store.query_spans(rollout.rollout_id)
        assert message.attributes["agentlightning.message.body"] == str(task)


# --- what agents do -------------------------------------------------------------------------------


async def test_interrupts_still_come_when_an_agent_has_put_the_handler_back(
    store: SqlStore,
) -> None:
    """As a web server does that an agent runs for a while."""
    came: list[signal.Signals] = []

    async def replace() -> None:
        signal.signal(signal.SIGINT, signal.signal(signal.SIGINT, signal.SIG_IGN))

    async def interrupted(times: int) -> list[signal.Signals]:
        came.clear()
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.05)
        return came

    async def serving(task: int) -> None:
        await replace()

    with handling_signals(came.append):
        await run_to_end(store, serving, 0)
        assert await interrupted(1) == [signal.SIGINT]
        await replace()  # while it runs, the first is taken for its own
        assert await interrupted(2) == [signal.SIGINT]


async def test_handlers_of_interrupts_may_end_in_any_order_and_come_back_when_they_have() -> None:
    came: list[signal.Signals] = []

    async def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.05)

    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(signal.Signals(number)))
    own = signal.getsignal(signal.SIGINT)
    try:
        first, second = handling_signals(print), handling_signals(print)
        first.__enter__()
        ended = signal.getsignal(signal.SIGINT)
        second.__enter__()
        first.__exit__(None, None, None)
        second.__exit__(None, None, None)
        assert signal.getsignal(signal.SIGINT) is own
        signal.signal(signal.SIGINT, ended)
        await interrupt()
        with handling_signals(print):
            pass
        await interrupt()
        assert came == [signal.SIGINT] * 2
    finally:
        signal.signal(signal.SIGINT, before)


async def test_failures_are_recorded_with_their_exceptions_and_do_not_flood_the_log(
    store: SqlStore, caplog: pytest.LogCaptureFixture
) -> None:
    def agent(task: int) -> float:
        raise ValueError(f"bad {task}\nflight")

    rollouts = await run_to_end(store, agent, *range(40))
    assert {rollout.status for rollout in rollouts} == {"failed"}
    (span,) = await store.query_spans(rollouts[39].rollout_id)
    assert (
        span.name == "agentlightning.exception"
        and span.attributes["exception.message"] == "bad 39\nflight"
    )
    assert "test_runner.py" in str(span.attributes["exception.stacktrace"])
    assert await reason_of(store, rollouts[39].rollout_id) == "ValueError: bad 39\nflight"
    warnings = [
        record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
    ]
    assert len(warnings) == 6  # 1, 2, 4, 8, 16, 32
    assert "bad" in warnings[0] and "\n" not in warnings[0]


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(3),
        GeneratorExit(),
        asyncio.CancelledError(),
        BaseException("odd"),
        ValueError("no file \udcff"),
    ],
)
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

    bad, good = await run_to_end(
        store, async_agent if kind == "async" else sync_agent, "bad", "good"
    )
    assert (bad.status, good.status) == ("failed", "succeeded")


async def test_a_hanging_agent_is_cancelled_at_its_timeout_and_a_later_answer_ignored(
    store: SqlStore,
) -> None:
    release, hanging = threading.Event(), Waiting()

    def sync_agent(task: str) -> float:
        release.wait(10)
        return 1.0

    async def stubborn_agent(task: str) -> float:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return 1.0
        return 0.0

    for agent in (sync_agent, stubborn_agent, hanging):
        (rollout,) = await run_to_end(store, agent, "x", config=RolloutConfig(timeout_seconds=0.2))
        release.set()
        assert (rollout.status, await statuses(store, rollout.rollout_id)) == (
            "failed",
            [["timeout"]],
        )
        assert agl.find_final_reward(await store.query_spans(rollout.rollout_id)) is None
    assert hanging.stopped.is_set()


async def test_an_agent_is_stopped_within_a_heartbeat_when_its_rollout_is_cancelled_or_superseded(
    brief_store: SqlStore,
) -> None:
    cancelled, superseded = await enqueue(brief_store, "x", "y", config=AGAIN)
    agent = Waiting()
    async with running(Runner(brief_store, agent, concurrency=1)):
        await agent.begun()
        await brief_store.cancel_rollout(cancelled)
        await asyncio.wait_for(agent.stopped.wait(), 60)
        agent.started.clear()
        agent.stopped.clear()
        await agent.begun()
        first = await brief_store.get_latest_attempt(superseded)
        assert first is not None
        await brief_store.update_attempt(superseded, first.attempt_id, status="unresponsive")
        second = await brief_store.dequeue_rollout("another")
        assert second is not None and second.lease is not None
        await asyncio.wait_for(agent.stopped.wait(), 60)
        ids = second.rollout_id, second.attempt.attempt_id
        await brief_store.update_attempt(*ids, status="succeeded", lease=second.lease.token)
    ended = await statuses(brief_store, cancelled, superseded)
    assert ended == [["cancelled"], ["unresponsive", "succeeded"]]


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

    rollout = await Runner(store, agent, hooks=[Keep()]).run_one("x")
    await asyncio.wait_for(chatters[0], 60)
    stored = await store.query_spans(rollout.rollout_id)
    assert {span.span_id for span in stored} == {
        span.span_id for span in tracers[0].get_last_trace()
    }


# --- hooks ----------------------------------------------------------------------------------------


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


async def test_hooks_run_in_order_may_emit_the_reward_and_run_when_the_agent_raises(
    store: SqlStore,
) -> None:
    async def agent(task: str) -> None:
        hook.note("agent")
        if task == "bad":
            raise ValueError("bad")
        agl.emit_message("one")

    hook = Notes()
    (rollout,) = await run_to_end(store, agent, "x", hooks=[hook])
    assert hook.seen == ["rollout_start", "trace_start", "agent", "trace_end", "rollout_end 2"]
    assert agl.find_final_reward(await store.query_spans(rollout.rollout_id)) == 0.25
    (failed,) = await run_to_end(store, agent, "bad", hooks=[hook])
    assert hook.seen[-2:] == ["trace_end", "rollout_end 2"]  # the hook's reward and the exception
    assert await reason_of(store, failed.rollout_id) == "ValueError: bad"


@pytest.mark.parametrize("failing", ["rollout_start", "trace_start", "trace_end", "rollout_end 1"])
async def test_a_hook_that_raises_fails_the_attempt(store: SqlStore, failing: str) -> None:
    (rollout,) = await run_to_end(store, lambda task: None, "x", hooks=[Notes(failing)])
    assert rollout.status == "failed"
    assert await reason_of(store, rollout.rollout_id) == f"RuntimeError: {failing} failed"


# --- the runner's own end -------------------------------------------------------------------------


async def test_a_cancelled_runner_hands_its_rollouts_to_another_at_once(store: SqlStore) -> None:
    agent = Waiting()
    (rollout_id,) = await enqueue(store, "x", config=AGAIN)
    task = asyncio.create_task(Runner(store, agent).run())
    await agent.begun()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with running(Runner(store, lambda task: 1.0)):
        await store.wait_for_rollouts([rollout_id], timeout=60)
    assert await statuses(store, rollout_id) == [["unresponsive", "succeeded"]]


async def test_what_is_leased_as_a_runner_is_cancelled_is_handed_back(tmp_path: Path) -> None:
    class Leasing(SqlStore):
        """Its lease is answered in the moment in which the runner is cancelled."""

        async def dequeue_many_rollouts(
            self, *arguments: Any, **options: Any
        ) -> list[AttemptedRollout]:
            leased = await super().dequeue_many_rollouts(*arguments, **options)
            task.cancel()
            return leased

    store = await Leasing.open(tmp_path / "store.db")
    rollout_ids = await enqueue(store, "x", "y", config=AGAIN)
    task = asyncio.create_task(Runner(store, lambda task: 1.0).run())
    with pytest.raises(asyncio.CancelledError):
        await task
    kept = [await store.get_rollout_by_id(rollout_id) for rollout_id in rollout_ids]
    assert [rollout and rollout.status for rollout in kept] == ["requeuing", "requeuing"]
    await store.close()


async def test_an_agent_that_cannot_run_is_refused_before_anything_is_leased(
    store: SqlStore,
) -> None:
    class Empty(agl.LitAgent[Any]):
        pass

    for agent, options, message in (
        (Empty(), {}, "does not define"),
        (Empty, {}, "pass an instance"),
        (lambda task: None, {"concurrency": 0}, "concurrency"),
        (lambda task: None, {"isolation": "proces"}, "did you mean 'process'"),
    ):
        with pytest.raises(ConfigError, match=message):
            Runner(store, agent, **options)  # type: ignore[arg-type]


async def test_a_store_that_stays_away_ends_the_runner_with_a_clear_error(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentlightning.runner.runner.PATIENCE_SECONDS", 0.3)
    await store.close()
    with pytest.raises(UnavailableError, match=r"did not answer for 0\.3 s"):
        await asyncio.wait_for(Runner(store, lambda task: None).run(), 10)
