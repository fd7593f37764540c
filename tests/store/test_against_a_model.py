"""Random operations on a real store and on a model of it that fits on one page; both must always agree."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentlightning.errors import ConflictError
from agentlightning.store.sql import SqlStore
from agentlightning.types import AttemptStatus, EnqueueRolloutRequest, RolloutConfig, Span

LEASE = 30.0
ENDS: list[AttemptStatus] = ["succeeded", "failed", "timeout", "unresponsive", "cancelled"]
TERMINAL = {"succeeded", "failed", "cancelled"}


@dataclass
class AttemptModel:
    id: str
    token: int
    start: float
    heard: float
    lease: float
    status: str = "preparing"
    ended_at: float = 0.0
    spans: int = 0

    @property
    def active(self) -> bool:
        return self.status in ("preparing", "running")


@dataclass
class RolloutModel:
    id: str
    config: RolloutConfig
    status: str = "queuing"
    attempts: list[AttemptModel] = field(default_factory=list)

    def end(self, attempt: AttemptModel, status: str, now: float) -> None:
        attempt.status, attempt.ended_at = status, now
        if attempt is not self.attempts[-1] or self.status in TERMINAL:
            return
        if status in self.config.retry_condition and len(self.attempts) < self.config.max_attempts:
            self.status = "requeuing"
        else:
            self.status = status if status in TERMINAL else "failed"

    def run(self, attempt: AttemptModel) -> None:
        attempt.status = "running"
        if attempt is self.attempts[-1] and self.status not in TERMINAL:
            self.status = "running"

    def revivable(self, attempt: AttemptModel) -> bool:
        return attempt.status == "unresponsive" and attempt is self.attempts[-1] and self.status == "requeuing"


configs = st.builds(
    RolloutConfig,
    timeout_seconds=st.sampled_from([None, 40.0]),
    unresponsive_seconds=st.sampled_from([None, 15.0]),
    max_attempts=st.integers(1, 3),
    retry_condition=st.lists(st.sampled_from(ENDS[1:]), unique=True).map(tuple),
)


class StoreAgainstModel(RuleBasedStateMachine):
    @initialize()
    def open(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.now = 1000.0
        self.store = self.wait(SqlStore.open(":memory:", clock=lambda: self.now, lease_seconds=LEASE))
        self.rollouts: list[RolloutModel] = []
        self.number = 0

    def wait(self, call):
        return self.loop.run_until_complete(call)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.wait(self.store.close())
            self.loop.close()

    def pick(self, data) -> tuple[RolloutModel, AttemptModel]:
        pairs = [(rollout, attempt) for rollout in self.rollouts for attempt in rollout.attempts]
        return data.draw(st.sampled_from(pairs))

    def has_attempts(self) -> bool:
        return any(rollout.attempts for rollout in self.rollouts)

    @rule(config=configs)
    def enqueue(self, config) -> None:
        request = EnqueueRolloutRequest(input=len(self.rollouts), config=config)
        (rollout,) = self.wait(self.store.enqueue_many_rollouts([request]))
        self.rollouts.append(RolloutModel(rollout.rollout_id, config))

    def note_attempt(self, rollout: RolloutModel, leased) -> None:
        rollout.status = "preparing"
        new = AttemptModel(leased.attempt.attempt_id, leased.lease.token, self.now, self.now, self.now + LEASE)
        rollout.attempts.append(new)

    @rule()
    def lease(self) -> None:
        leased = self.wait(self.store.dequeue_rollout())
        queued = [rollout for rollout in self.rollouts if rollout.status in ("queuing", "requeuing")]
        assert (leased is None) == (not queued)
        if leased is not None:
            assert leased.rollout_id == queued[0].id
            self.note_attempt(queued[0], leased)

    @precondition(lambda self: self.rollouts)
    @rule(data=st.data())
    def start_attempt(self, data) -> None:
        rollout = data.draw(st.sampled_from(self.rollouts))
        try:
            leased = self.wait(self.store.start_attempt(rollout.id))
        except ConflictError:
            assert rollout.status in TERMINAL
        else:
            assert rollout.status not in TERMINAL
            self.note_attempt(rollout, leased)

    @precondition(lambda self: self.rollouts)
    @rule(data=st.data())
    def cancel(self, data) -> None:
        rollout = data.draw(st.sampled_from(self.rollouts))
        try:
            self.wait(self.store.cancel_rollout(rollout.id))
        except ConflictError:
            assert rollout.status in ("succeeded", "failed")
            return
        assert rollout.status not in ("succeeded", "failed")
        if rollout.status != "cancelled":
            rollout.status = "cancelled"
            for attempt in rollout.attempts:
                if attempt.active:
                    attempt.status = "cancelled"

    @precondition(has_attempts)
    @rule(data=st.data())
    def add_span(self, data) -> None:
        rollout, attempt = self.pick(data)
        self.number += 1
        self.wait(
            self.store.add_span(
                Span(
                    rollout_id=rollout.id,
                    attempt_id=attempt.id,
                    sequence_id=0,
                    trace_id="t",
                    span_id=str(self.number),
                    name="n",
                    start_time=self.now,
                    end_time=self.now,
                )
            )
        )
        attempt.spans += 1
        if rollout.revivable(attempt):
            attempt.lease = max(attempt.lease, self.now + LEASE)
            rollout.run(attempt)
        elif attempt.status == "preparing":
            rollout.run(attempt)
        if attempt.active:
            attempt.heard = self.now

    @precondition(has_attempts)
    @rule(data=st.data())
    def heartbeat(self, data) -> None:
        rollout, attempt = self.pick(data)
        beat = self.wait(self.store.heartbeat(rollout.id, attempt.id, attempt.token))
        if rollout.revivable(attempt) and attempt.ended_at >= attempt.lease:
            rollout.run(attempt)
        if attempt.active:
            attempt.lease = self.now + LEASE
        assert beat.status == attempt.status

    @precondition(has_attempts)
    @rule(data=st.data(), status=st.sampled_from(["running", *ENDS]))
    def update(self, data, status) -> None:
        rollout, attempt = self.pick(data)
        allowed = (
            status == attempt.status
            or attempt.status == "preparing"
            or (attempt.status == "running" and status != "running")
            or rollout.revivable(attempt)
        )
        try:
            self.wait(self.store.update_attempt(rollout.id, attempt.id, status=status))
        except ConflictError:
            assert not allowed
            return
        assert allowed
        if status == attempt.status:
            return
        if rollout.revivable(attempt):
            attempt.heard, attempt.lease = self.now, max(attempt.lease, self.now + LEASE)
            rollout.run(attempt)
        if status == "running":
            rollout.run(attempt)
        else:
            rollout.end(attempt, status, self.now)

    @rule(seconds=st.sampled_from([1.0, 8.0, 20.0, 31.0]))
    def time_passes(self, seconds) -> None:
        self.now += seconds
        self.wait(self.store.expire_overdue())
        for rollout in self.rollouts:
            for attempt in rollout.attempts:
                clocks = [(attempt.lease, "unresponsive")]
                if rollout.config.timeout_seconds:
                    clocks.append((attempt.start + rollout.config.timeout_seconds, "timeout"))
                if rollout.config.unresponsive_seconds:
                    clocks.append((attempt.heard + rollout.config.unresponsive_seconds, "unresponsive"))
                when, status = min(clocks, key=lambda clock: clock[0])
                if attempt.active and when <= self.now:
                    rollout.end(attempt, status, self.now)

    @invariant()
    def both_agree(self) -> None:
        if not hasattr(self, "store"):
            return
        stored = self.wait(self.store.query_rollouts())
        assert [(r.rollout_id, r.status) for r in stored] == [(r.id, r.status) for r in self.rollouts]
        for rollout, kept in zip(self.rollouts, stored, strict=True):
            attempts = self.wait(self.store.query_attempts(rollout.id))
            assert [(a.attempt_id, a.status) for a in attempts] == [(a.id, a.status) for a in rollout.attempts]
            assert all((a.end_time is None) == (a.status in ("preparing", "running")) for a in attempts)
            assert (kept.end_time is None) == (kept.status not in TERMINAL)
            assert self.wait(self.store.get_rollout_by_id(rollout.id)) == kept, "what is kept in memory is not stale"
            latest = self.wait(self.store.get_latest_attempt(rollout.id))
            assert latest == (attempts[-1] if attempts else None)
            spans = self.wait(self.store.query_spans(rollout.id)) if attempts else []
            assert len(spans) == sum(attempt.spans for attempt in rollout.attempts)


TestStoreAgainstModel = StoreAgainstModel.TestCase
TestStoreAgainstModel.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
