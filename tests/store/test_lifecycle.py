"""The lifecycle as tables: what may follow what, which clock ends an attempt, and when a retry
happens."""

from __future__ import annotations

import typing

import pytest
from msgspec.structs import replace

from agentlightning.errors import ConflictError
from agentlightning.store import lifecycle
from agentlightning.store.lifecycle import Standing
from agentlightning.types import AttemptStatus, RolloutConfig, RolloutStatus

LEASE = 30.0


def standing(
    rollout="running", attempt="running", *, config=None, sequence_id=1, attempts=1, **fields
) -> Standing:
    defaults = {"start_time": 100.0, "last_activity": 100.0, "lease_expires": 130.0}
    return Standing(
        rollout_id="ro-1",
        attempt_id="at-1",
        rollout_status=rollout,
        attempt_status=attempt,
        sequence_id=sequence_id,
        attempts=attempts,
        config=config or RolloutConfig(),
        **{**defaults, **fields},
    )


def retrying(*ends: AttemptStatus, max_attempts: int = 2, **clocks: float) -> RolloutConfig:
    return RolloutConfig(max_attempts=max_attempts, retry_condition=ends, **clocks)


def test_the_tables_speak_of_every_status():
    assert set(lifecycle.ROLLOUT_MOVES) == set(typing.get_args(RolloutStatus))
    assert (
        set(lifecycle.ATTEMPT_MOVES)
        == set(lifecycle.FOLLOWS)
        == set(typing.get_args(AttemptStatus))
    )
    assert all(not lifecycle.ROLLOUT_MOVES[status] for status in lifecycle.TERMINAL)


def test_the_end_of_the_latest_attempt_ends_its_rollout_once():
    rollout = {"timeout": "failed", "unresponsive": "failed"}
    for end in sorted(lifecycle.ENDS):
        after = lifecycle.move(standing(), end, 120.0)
        assert (after.attempt_status, after.rollout_status, after.end_time) == (
            end,
            rollout.get(end, end),
            120.0,
        )
        assert lifecycle.hold(after, 121.0, 5.0) == after
        for stays in (standing(terminal) for terminal in lifecycle.TERMINAL):
            assert lifecycle.move(stays, end, 120.0).rollout_status == stays.rollout_status
        assert (
            lifecycle.move(standing("preparing", attempts=2), end, 120.0).rollout_status
            == "preparing"
        )


@pytest.mark.parametrize("end", ["failed", "timeout", "unresponsive", "cancelled"])
def test_a_retry_happens_iff_the_end_is_a_retry_condition_and_attempts_remain(end):
    assert lifecycle.move(standing(config=retrying(end)), end, 1.0).rollout_status == "requeuing"
    last = standing(config=retrying(end), sequence_id=2, attempts=2)
    assert lifecycle.move(last, end, 1.0).rollout_status in lifecycle.TERMINAL
    others = {"failed", "timeout", "unresponsive", "cancelled"} - {end}
    assert (
        lifecycle.move(standing(config=retrying(*others)), end, 1.0).rollout_status
        in lifecycle.TERMINAL
    )


@pytest.mark.parametrize("end", ["succeeded", "failed", "timeout", "cancelled"])
@pytest.mark.parametrize(
    "wanted", ["running", "succeeded", "failed", "timeout", "unresponsive", "cancelled"]
)
def test_an_ended_attempt_stays_as_it_ended(end, wanted):
    ended = standing("failed", end, end_time=110.0)
    if wanted == end:
        assert lifecycle.update(ended, wanted, 120.0, LEASE) == ended
    else:
        with pytest.raises(ConflictError, match=end):
            lifecycle.update(ended, wanted, 120.0, LEASE)


@pytest.mark.parametrize(
    ("config", "now", "status"),
    [
        (RolloutConfig(), 129.9, "running"),
        (RolloutConfig(), 130.0, "unresponsive"),
        (RolloutConfig(timeout_seconds=20), 119.9, "running"),
        (RolloutConfig(timeout_seconds=20), 120.0, "timeout"),
        (RolloutConfig(unresponsive_seconds=5), 105.0, "unresponsive"),
        (RolloutConfig(timeout_seconds=20, unresponsive_seconds=25), 200.0, "timeout"),
        (RolloutConfig(timeout_seconds=25, unresponsive_seconds=20), 200.0, "unresponsive"),
    ],
)
def test_the_clock_that_runs_out_first_ends_the_attempt(config, now, status):
    after = lifecycle.expire(standing(config=config), now)
    assert after.attempt_status == status
    assert after.end_time == (None if status == "running" else now)


def test_heartbeats_and_spans_move_each_their_own_clock():
    config = RolloutConfig(timeout_seconds=20, unresponsive_seconds=15)
    beaten = lifecycle.beat(standing(config=config), 110.0, LEASE)
    assert (beaten.lease_expires, beaten.last_heartbeat_time, beaten.last_activity) == (
        140.0,
        110.0,
        100.0,
    )
    heard = lifecycle.record_activity(
        standing("preparing", "preparing", config=config), 104.0, LEASE
    )
    assert (heard.attempt_status, heard.rollout_status, lifecycle.deadline(heard)) == (
        "running",
        "running",
        119.0,
    )
    assert (heard.lease_expires, heard.start_time) == (130.0, 100.0)
    held = lifecycle.hold(standing(config=config), 100.0, 5.0)
    within, later = (lifecycle.record_activity(held, now, LEASE) for now in (103.0, 112.0))
    assert (within.last_activity, later.last_activity, later.held_seconds) == (105.0, 112.0, 5.0)


BOTH = RolloutConfig(timeout_seconds=20, unresponsive_seconds=15)


@pytest.mark.parametrize("status", sorted(lifecycle.ACTIVE))
def test_a_hold_stops_timeout_and_silence_and_not_the_lease(status):
    after = lifecycle.hold(standing(status, status, config=BOTH), 110.0, 5.0)
    assert (after.attempt_status, after.rollout_status, after.held_seconds) == (status, status, 5.0)
    assert after.lease_expires == 130.0
    assert lifecycle.expire(after, 119.9).attempt_status == status
    assert lifecycle.expire(after, 120.0).attempt_status == "unresponsive"
    talking = lifecycle.record_activity(after, 119.0, LEASE)
    assert lifecycle.expire(talking, 124.9).attempt_status == "running"
    assert lifecycle.expire(talking, 125.0).attempt_status == "timeout"


def test_seconds_that_several_holds_speak_of_count_once():
    held = lifecycle.hold(standing(), 100.0, 5.0)
    assert lifecycle.hold(held, 100.0, 5.0) == held, "the same again"
    assert lifecycle.hold(held, 102.0, 3.0) == held
    longer = lifecycle.hold(held, 103.0, 5.0)
    assert (longer.held_until, longer.held_seconds) == (108.0, 8.0)
    assert lifecycle.hold(longer, 110.0, 2.0).held_seconds == 10.0


def test_a_hold_ends_with_the_attempt_and_does_not_come_back_with_it():
    held = lifecycle.hold(standing(config=retrying("unresponsive")), 128.0, 5.0)
    revived = lifecycle.record_activity(lifecycle.expire(held, 130.0), 131.0, LEASE)
    assert (revived.attempt_status, revived.last_activity, revived.held_seconds) == (
        "running",
        131.0,
        5.0,
    )


def unresponsive(at: float = 130.0, **fields) -> Standing:
    defaults = {"config": retrying("unresponsive"), "end_time": at}
    return standing("requeuing", "unresponsive", **{**defaults, **fields})


def test_an_unresponsive_attempt_that_speaks_before_its_retry_is_revived():
    after = lifecycle.record_activity(unresponsive(), 135.0, LEASE)
    assert (after.attempt_status, after.rollout_status, after.end_time) == (
        "running",
        "running",
        None,
    )
    assert lifecycle.expire(after, 135.0) == after, (
        "it gets a new lease, or it would be given up again at once"
    )
    assert lifecycle.update(unresponsive(), "succeeded", 135.0, LEASE).rollout_status == "succeeded"


def test_after_its_retry_has_started_it_is_not_revived():
    late = unresponsive(attempts=2)
    late = replace(late, rollout_status="preparing")
    assert lifecycle.record_activity(late, 135.0, LEASE) == late
    assert lifecycle.beat(late, 135.0, LEASE) == late
    with pytest.raises(ConflictError, match="given up"):
        lifecycle.update(late, "succeeded", 135.0, LEASE)


def test_a_heartbeat_revives_whoever_lost_the_lease_but_not_whoever_fell_silent():
    lost = lifecycle.beat(unresponsive(at=130.0), 135.0, LEASE)
    assert (lost.attempt_status, lost.rollout_status, lost.lease_expires) == (
        "running",
        "running",
        165.0,
    )
    silent = unresponsive(at=105.0, lease_expires=130.0)
    assert lifecycle.beat(silent, 106.0, LEASE) == silent


@pytest.mark.parametrize("current", typing.get_args(RolloutStatus))
@pytest.mark.parametrize("wanted", typing.get_args(RolloutStatus))
def test_what_a_caller_may_set_a_rollout_to(current, wanted):
    allowed = {
        "queuing": {"cancelled"},
        "preparing": {"succeeded", "failed", "cancelled", "requeuing"},
        "running": {"succeeded", "failed", "cancelled", "requeuing"},
        "requeuing": {"cancelled"},
    }
    if wanted in allowed.get(current, set()):
        lifecycle.check_settable("ro-1", current, wanted)
    else:
        with pytest.raises(ConflictError, match="ro-1"):
            lifecycle.check_settable("ro-1", current, wanted)
