"""Random operations on a real store and on a model of it (`lifecycle_model`); both must always
agree."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from agentlightning.errors import ConflictError, NotFoundError
from agentlightning.store.base import CALLS
from agentlightning.store.lifecycle import ROLLOUT_MOVES
from agentlightning.store.sql import SqlStore
from agentlightning.types import (
    AttemptStatus,
    Condition,
    EnqueueRolloutRequest,
    RolloutConfig,
    Span,
)
from tests.store.conftest import span_of
from tests.store.lifecycle_model import LEASE, QUEUED, TERMINAL, AttemptModel, RolloutModel

ENDS: list[AttemptStatus] = ["succeeded", "failed", "timeout", "unresponsive", "cancelled"]
GROUP_SIZE = 2


configs = st.builds(
    RolloutConfig,
    timeout_seconds=st.sampled_from([None, 40.0]),
    unresponsive_seconds=st.sampled_from([None, 15.0]),
    max_attempts=st.integers(1, 3),
    retry_condition=st.lists(st.sampled_from(ENDS[1:]), unique=True).map(tuple),
)


class StoreAgainstModel(RuleBasedStateMachine):
    """`new_address` gives that of an empty store; one in memory cannot be closed and opened
    again."""

    def __init__(self, new_address: Callable[[], str]) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.address = new_address()
        self.now = 1_000_000.0
        self.rollouts: list[RolloutModel] = []
        self.groups: dict[str, bool] = {}  # and whether they are complete
        self.number = itertools.count()
        self.last_lease: tuple[str, int, list[str]] | None = None
        self.cursor = 0
        self.seen: list[str] = []  # in the feed, oldest first
        self.deleted: set[str] = set()
        self.store: SqlStore | None = None
        self.open()

    def wait(self, call):
        return self.loop.run_until_complete(call)

    def open(self) -> None:
        opening = SqlStore.open(
            self.address, clock=lambda: self.now, lease_seconds=LEASE, synchronous="NORMAL"
        )
        self.store = self.wait(opening)

    @initialize()
    def start_run(self) -> None:
        self.wait(self.store.start_run("train", {}, "run"))

    def teardown(self) -> None:
        self.wait(self.store.close())
        self.loop.close()

    def pick(self, data) -> tuple[RolloutModel, AttemptModel]:
        pairs = [
            (rollout, attempt)
            for rollout in self.rollouts
            for attempt in rollout.attempts
            # Revived, it would be ended again by the watchdog, at a moment that no model knows.
            if not (rollout.revivable(attempt) and rollout.timed_out(attempt, self.now))
        ]
        assume(pairs)
        return data.draw(st.sampled_from(pairs))

    def pick_rollout(self, data) -> RolloutModel:
        return data.draw(st.sampled_from(self.rollouts))

    def find(self, attempt_id: str) -> tuple[RolloutModel, AttemptModel]:
        return next((r, a) for r in self.rollouts for a in r.attempts if a.id == attempt_id)

    def has_rollouts(self) -> bool:
        return bool(self.rollouts)

    def has_attempts(self) -> bool:
        return any(rollout.attempts for rollout in self.rollouts)

    def note_attempt(self, rollout: RolloutModel, leased) -> None:
        rollout.status = "preparing"
        new = AttemptModel(
            leased.attempt.attempt_id, leased.lease.token, self.now, self.now, self.now + LEASE
        )
        assert leased.lease.expires == new.lease
        assert all(new.token > attempt.token for one in self.rollouts for attempt in one.attempts)
        rollout.attempts.append(new)

    def note_repeated(self, attempt_id: str, leased) -> None:
        """An attempt was asked for again, by its own name."""
        rollout, attempt = self.find(attempt_id)
        rollout.beat(attempt, self.now)
        assert (leased.rollout_id, leased.attempt.attempt_id, leased.lease.token) == (
            rollout.id,
            attempt.id,
            attempt.token,
        )
        assert leased.attempt.status == attempt.status

    @rule(config=configs, priority=st.integers(0, 1), count=st.integers(1, 3))
    def enqueue(self, config, priority, count) -> None:
        requests = [
            EnqueueRolloutRequest(
                input=1, rollout_id=f"r{next(self.number)}", config=config, priority=priority
            )
            for _ in range(count)
        ]
        for _ in range(2):
            rollouts = self.wait(self.store.enqueue_many_rollouts(requests))
            assert [rollout.rollout_id for rollout in rollouts] == [
                request.rollout_id for request in requests
            ]
        self.rollouts += [
            RolloutModel(request.rollout_id, config, priority) for request in requests
        ]

    @rule(config=configs, data=st.data())
    def enqueue_into_a_group(self, config, data) -> None:
        taken = {rollout.group for rollout in self.rollouts}
        free = [
            (group, i)
            for group in self.groups
            for i in range(GROUP_SIZE)
            if (group, i) not in taken
        ]
        if not free:
            group = self.wait(self.store.create_group(GROUP_SIZE, "run", f"g{next(self.number)}"))
            self.groups[group.group_id] = False
            free = [(group.group_id, 0)]
        name, index = data.draw(st.sampled_from(free))
        request = EnqueueRolloutRequest(
            input=1,
            rollout_id=f"r{next(self.number)}",
            config=config,
            group_id=name,
            group_index=index,
        )
        (rollout,) = self.wait(self.store.enqueue_many_rollouts([request]))
        self.rollouts.append(RolloutModel(rollout.rollout_id, config, group=(name, index)))

    @rule(config=configs)
    def start_rollout(self, config) -> None:
        name = f"r{next(self.number)}"
        asked = {"config": config, "rollout_id": name, "attempt_id": f"a{next(self.number)}"}
        leased = self.wait(self.store.start_rollout(1, **asked))
        self.rollouts.append(RolloutModel(name, config))
        self.note_attempt(self.rollouts[-1], leased)
        self.note_repeated(asked["attempt_id"], self.wait(self.store.start_rollout(1, **asked)))

    @rule(limit=st.integers(1, 3))
    def lease(self, limit) -> None:
        name = f"l{next(self.number)}"
        leased = self.wait(self.store.dequeue_many_rollouts(limit, lease_id=name))
        queued = [one for one in self.rollouts if one.status in QUEUED]
        queued.sort(key=lambda one: -one.priority)
        assert [one.rollout_id for one in leased] == [one.id for one in queued[:limit]]
        for rollout, one in zip(queued, leased, strict=False):
            self.note_attempt(rollout, one)
        self.last_lease = (name, limit, [one.attempt.attempt_id for one in leased])

    @precondition(lambda self: self.last_lease is not None and self.last_lease[2])
    @rule()
    def lease_again_after_a_lost_answer(self) -> None:
        name, limit, attempts = self.last_lease
        kept = [
            one for one in attempts if any(a.id == one for r in self.rollouts for a in r.attempts)
        ]
        if kept[:1] != attempts[:1]:
            return  # the first was deleted: the store cannot tell any more
        leased = self.wait(self.store.dequeue_many_rollouts(limit, lease_id=name))
        assert [one.attempt.attempt_id for one in leased] == kept
        for one in leased:
            self.note_repeated(one.attempt.attempt_id, one)

    @precondition(has_rollouts)
    @rule(data=st.data())
    def start_attempt(self, data) -> None:
        rollout = self.pick_rollout(data)
        call = CALLS["start_attempt"](rollout_id=rollout.id, attempt_id=f"a{next(self.number)}")
        try:
            leased = self.wait(self.store.perform(call))
        except ConflictError:
            assert rollout.status in TERMINAL
            return
        assert rollout.status not in TERMINAL
        self.note_attempt(rollout, leased)
        self.note_repeated(call.attempt_id, self.wait(self.store.perform(call)))

    @precondition(has_attempts)
    @rule(data=st.data())
    def start_an_attempt_by_the_name_of_another(self, data) -> None:
        rollout, (holder, attempt) = self.pick_rollout(data), self.pick(data)
        call = CALLS["start_attempt"](rollout_id=rollout.id, attempt_id=attempt.id)
        try:
            leased = self.wait(self.store.perform(call))
        except ConflictError:
            assert rollout is not holder
            return
        assert rollout is holder
        self.note_repeated(attempt.id, leased)

    @precondition(has_rollouts)
    @rule(data=st.data())
    def cancel(self, data) -> None:
        rollout = self.pick_rollout(data)
        try:
            self.wait(self.store.cancel_rollout(rollout.id))
        except ConflictError:
            assert rollout.status in ("succeeded", "failed")
            return
        assert rollout.status not in ("succeeded", "failed")
        if rollout.status != "cancelled":
            rollout.decide("cancelled", self.now)

    @precondition(has_rollouts)
    @rule(data=st.data(), status=st.sampled_from(sorted(ROLLOUT_MOVES)))
    def set_by_hand(self, data, status) -> None:
        rollout = self.pick_rollout(data)
        allowed = (
            status in TERMINAL | {"requeuing"}
            if rollout.status in ("preparing", "running")
            else False
        )
        allowed = (
            allowed
            or (rollout.status in QUEUED and status == "cancelled")
            or status == rollout.status
        )
        try:
            self.wait(self.store.update_rollout(rollout.id, status=status))
        except ConflictError:
            assert not allowed
            return
        assert allowed
        if status != rollout.status:
            rollout.decide(status, self.now)

    @precondition(has_rollouts)
    @rule(data=st.data(), unfinished=st.booleans())
    def delete(self, data, unfinished) -> None:
        self.note_finished()
        rollout = self.pick_rollout(data)
        where = Condition("rollout_id", "eq", rollout.id)
        deleted = self.wait(self.store.delete_rollouts(where=where, unfinished=unfinished))
        assert deleted.rollouts == int(unfinished or rollout.status in TERMINAL)
        if not deleted.rollouts:
            return
        assert deleted.attempts == len(rollout.attempts)
        if rollout.status not in TERMINAL:
            rollout.decide("cancelled", self.now)
        self.note_complete_groups()
        self.rollouts.remove(rollout)
        self.deleted.add(rollout.id)
        if rollout.group is not None and not any(
            one.group and one.group[0] == rollout.group[0] for one in self.rollouts
        ):
            del self.groups[rollout.group[0]]

    @precondition(has_attempts)
    @rule(data=st.data(), count=st.integers(1, 3))
    def add_spans(self, data, count) -> None:
        rollout, attempt = self.pick(data)
        names = [f"s{next(self.number)}" for _ in range(count)]
        stored = self.wait(
            self.store.add_many_spans([self.span(rollout, attempt, name) for name in names])
        )
        assert [span.sequence_id for span in stored] == [
            len(attempt.spans) + 1 + i for i in range(count)
        ]
        attempt.spans.update((span.span_id, span.sequence_id) for span in stored)
        rollout.hear(attempt, self.now)

    @precondition(
        lambda self: any(attempt.spans for rollout in self.rollouts for attempt in rollout.attempts)
    )
    @rule(data=st.data())
    def add_a_span_again(self, data) -> None:
        pairs = [
            (rollout, attempt)
            for rollout in self.rollouts
            for attempt in rollout.attempts
            if attempt.spans
        ]
        rollout, attempt = data.draw(st.sampled_from(pairs))
        name = data.draw(st.sampled_from(sorted(attempt.spans)))
        stored = self.wait(self.store.add_span(self.span(rollout, attempt, name)))
        assert stored.sequence_id == attempt.spans[name]
        rollout.hear(attempt, self.now)

    def span(self, rollout: RolloutModel, attempt: AttemptModel, name: str) -> Span:
        return span_of((rollout.id, attempt.id), name, start_time=self.now, end_time=self.now)

    @precondition(has_attempts)
    @rule(data=st.data())
    def heartbeat(self, data) -> None:
        rollout, attempt = self.pick(data)
        if attempt is not rollout.attempts[-1]:
            with pytest.raises(ConflictError, match="another one has followed"):
                self.wait(self.store.heartbeat(rollout.id, attempt.id, attempt.token))
            return
        beat = self.wait(self.store.heartbeat(rollout.id, attempt.id, attempt.token))
        rollout.beat(attempt, self.now)
        assert beat.status == attempt.status
        assert beat.lease_expires == (attempt.lease if attempt.active else None)

    @precondition(has_attempts)
    @rule(data=st.data(), seconds=st.sampled_from([1.0, 10.0, 25.0]))
    def hold_calls_back(self, data, seconds) -> None:
        held = [self.pick(data) for _ in range(2)]
        names = [(rollout.id, attempt.id) for rollout, attempt in held]
        self.wait(self.store.extend_attempts([*names, ("nowhere", "nothing")], seconds))
        for rollout, attempt in held:
            rollout.hold(attempt, self.now, seconds)

    @precondition(has_attempts)
    @rule(data=st.data(), status=st.sampled_from(["running", *ENDS]))
    def update(self, data, status) -> None:
        rollout, attempt = self.pick(data)
        follows = (
            attempt.status == "preparing"
            or (attempt.status == "running" and status != "running")
            or rollout.revivable(attempt)
        )
        allowed = status == attempt.status or (follows and attempt is rollout.attempts[-1])
        try:
            self.wait(
                self.store.update_attempt(
                    rollout.id, attempt.id, status=status, lease=attempt.token
                )
            )
        except ConflictError:
            assert not allowed
            return
        assert allowed
        if status == attempt.status:
            return
        if rollout.revivable(attempt):
            rollout.hear(attempt, self.now)
        if status == "running":
            rollout.run(attempt)
        else:
            rollout.end(attempt, status, self.now)

    @precondition(has_attempts)
    @rule(data=st.data(), status=st.sampled_from(ENDS), count=st.integers(0, 2))
    def end_with_spans(self, data, status, count) -> None:
        rollout, attempt = self.pick(data)
        is_open = attempt.active or rollout.revivable(attempt)
        allowed = status == attempt.status or (is_open and attempt is rollout.attempts[-1])
        spans = [self.span(rollout, attempt, f"s{next(self.number)}") for _ in range(count)]
        end = self.store.end_attempt(rollout.id, attempt.id, status, spans, lease=attempt.token)
        try:
            stored = self.wait(end)
        except ConflictError:
            assert not allowed
            return
        assert allowed
        assert stored == [len(attempt.spans) + 1 + i for i in range(count)]
        attempt.spans.update(zip((span.span_id for span in spans), stored, strict=True))
        if spans:
            rollout.hear(attempt, self.now)
        if attempt.status == status:
            return
        if rollout.revivable(attempt):
            rollout.hear(attempt, self.now)
        rollout.end(attempt, status, self.now)

    @precondition(has_attempts)
    @rule(data=st.data(), status=st.sampled_from(["running", *ENDS]))
    def update_with_an_old_token(self, data, status) -> None:
        rollout, attempt = self.pick(data)
        with pytest.raises(ConflictError, match="does not hold"):
            self.wait(
                self.store.update_attempt(
                    rollout.id, attempt.id, status=status, lease=attempt.token - 1
                )
            )
        with pytest.raises(ConflictError, match="does not hold"):
            self.wait(self.store.heartbeat(rollout.id, attempt.id, attempt.token - 1))

    @rule(seconds=st.sampled_from([1.0, 8.0, 20.0, 31.0]))
    def time_passes(self, seconds) -> None:
        self.now += seconds
        self.wait(self.store.expire_overdue())
        for rollout in self.rollouts:
            rollout.expire(self.now)

    @precondition(lambda self: self.address != ":memory:")
    @rule(seconds=st.sampled_from([0.0, 50.0, -500.0]))
    def close_and_open(self, seconds) -> None:
        self.note_finished()
        self.wait(self.store.close())
        self.now += seconds
        for rollout in self.rollouts:
            for attempt in rollout.attempts:
                if attempt.active:
                    attempt.lease, attempt.heard = self.now + LEASE, self.now
                    attempt.start = min(attempt.start, self.now)
                    attempt.release()
            rollout.expire(self.now)
        self.open()

    def note_finished(self) -> None:
        """What has finished since the last look is in the feed behind the cursor, each once and
        nothing else."""
        page = self.wait(self.store.finished_after(self.cursor, limit=1000))
        new = [rollout.rollout_id for rollout in page.rollouts]
        finished = {rollout.id for rollout in self.rollouts if rollout.status in TERMINAL}
        assert len(new) == len(set(new))
        assert set(new) == finished - set(self.seen)
        self.seen += new
        self.cursor = page.cursor

    def note_complete_groups(self) -> None:
        for group in self.groups:
            members = [
                rollout for rollout in self.rollouts if rollout.group and rollout.group[0] == group
            ]
            if len(members) == GROUP_SIZE and all(
                rollout.status in TERMINAL for rollout in members
            ):
                self.groups[group] = True

    @invariant()
    def the_feeds_agree(self) -> None:
        self.note_finished()
        everything = self.wait(self.store.finished_after(0, limit=1000)).rollouts
        assert [one.rollout_id for one in everything] == [
            one for one in self.seen if one not in self.deleted
        ]
        self.note_complete_groups()
        try:
            groups = self.wait(self.store.complete_groups_after("run", 0, limit=1000))
        except NotFoundError:
            assert not self.groups, "the run is not there before the first rule"
            return
        assert {group.group_id for group in groups} == {
            name for name, complete in self.groups.items() if complete
        }
        numbers = [group.finished_index for group in groups]
        assert numbers == sorted(set(numbers))

    @invariant()
    def both_agree(self) -> None:
        stored = self.wait(self.store.query_rollouts())
        assert [(r.rollout_id, r.status) for r in stored] == [
            (r.id, r.status) for r in self.rollouts
        ]
        for rollout, kept in zip(self.rollouts, stored, strict=True):
            attempts = self.wait(self.store.query_attempts(rollout.id))
            expected = [(a.id, a.status, a.held) for a in rollout.attempts]
            assert [(a.attempt_id, a.status, a.held_seconds) for a in attempts] == expected
            assert all(
                (a.end_time is None) == (a.status in ("preparing", "running")) for a in attempts
            )
            assert (kept.end_time is None) == (kept.status not in TERMINAL)
            assert self.wait(self.store.get_rollout_by_id(rollout.id)) == kept, (
                "what is kept in memory is not stale"
            )
            latest = self.wait(self.store.get_latest_attempt(rollout.id))
            assert latest == (attempts[-1] if attempts else None)
            spans = self.wait(self.store.query_spans(rollout.id)) if attempts else []
            expected = {
                (a.id, name): number for a in rollout.attempts for name, number in a.spans.items()
            }
            assert {(span.attempt_id, span.span_id): span.sequence_id for span in spans} == expected

    @invariant()
    def nothing_is_wrong(self) -> None:
        assert self.wait(self.store.check_store()) == []


def agree(new_address: Callable[[], str], examples: int, steps: int = 40) -> None:
    run_state_machine_as_test(
        lambda: StoreAgainstModel(new_address),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("examples", [25, pytest.param(400, marks=pytest.mark.soak)])
def test_a_store_in_memory_agrees_with_the_model(examples: int) -> None:
    agree(lambda: ":memory:", examples)


@pytest.mark.slow
@pytest.mark.parametrize("examples", [10, pytest.param(150, marks=pytest.mark.soak)])
def test_a_store_in_a_file_agrees_with_the_model(examples: int, tmp_path: Path) -> None:
    number = itertools.count()
    agree(lambda: str(tmp_path / f"{next(number)}.db"), examples)


@pytest.mark.parametrize(
    ("examples", "steps"), [(2, 12), pytest.param(10, 40, marks=pytest.mark.soak)]
)
def test_a_store_in_postgresql_agrees_with_the_model(
    examples: int, steps: int, postgres_database: str
) -> None:
    number = itertools.count()
    with psycopg.connect(postgres_database, autocommit=True) as connection:

        def new_address() -> str:
            schema = f"example_{next(number)}"
            connection.execute(f"CREATE SCHEMA {schema}".encode())
            return f"{postgres_database}?options=-csearch_path%3D{schema}"

        agree(new_address, examples, steps)
