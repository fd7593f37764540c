"""The lifecycle of rollouts and attempts: tables of allowed moves, and pure functions from standing
to standing.

A worker that leases a rollout gets an attempt, the time when the lease ends, and a fencing token:
the attempt's row number, which only grows. A heartbeat with the token extends the lease (`beat`).
When the lease ends, the watchdog ends the attempt as unresponsive (`expire`), and the rollout is
queued again or fails (`move`). A call or span of the attempt revives it until its retry has started
(`record_activity`). From then on it is no longer the latest, its token is refused, and it changes
nothing.

This module knows which status may follow which, which of the three clocks runs out first, and when
to retry. It does not know SQL, HTTP or the time: `now` is always an argument, in seconds since the
epoch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

from agentlightning.errors import ConflictError
from agentlightning.types import AttemptStatus, RolloutConfig, RolloutStatus

TERMINAL: Final[frozenset[RolloutStatus]] = frozenset({"succeeded", "failed", "cancelled"})
QUEUED: Final[frozenset[RolloutStatus]] = frozenset({"queuing", "requeuing"})
ACTIVE: Final[frozenset[AttemptStatus]] = frozenset({"preparing", "running"})

ROLLOUT_MOVES: Final[Mapping[RolloutStatus, frozenset[RolloutStatus]]] = {
    "queuing": frozenset({"preparing", "cancelled"}),
    "preparing": frozenset({"preparing", "running", "requeuing", *TERMINAL}),
    "running": frozenset({"preparing", "requeuing", *TERMINAL}),
    "requeuing": frozenset({"preparing", "running", "cancelled"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
}
"""Where a rollout may go. `preparing` again is a further attempt; requeuing → running is a
revival."""

ENDS: Final[frozenset[AttemptStatus]] = frozenset(
    {"succeeded", "failed", "timeout", "unresponsive", "cancelled"}
)

ATTEMPT_MOVES: Final[Mapping[AttemptStatus, frozenset[AttemptStatus]]] = {
    "preparing": frozenset({"running", *ENDS}),
    "running": ENDS,
    "unresponsive": frozenset({"running"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "timeout": frozenset(),
    "cancelled": frozenset(),
}
"""Where an attempt may go. unresponsive → running is a revival, possible until the retry has
started."""

FOLLOWS: Final[Mapping[AttemptStatus, RolloutStatus]] = {
    "preparing": "preparing",
    "running": "running",
    "succeeded": "succeeded",
    "failed": "failed",
    "timeout": "failed",
    "unresponsive": "failed",
    "cancelled": "cancelled",
}
"""What a rollout becomes when its latest attempt moves and no retry is due."""

SETTABLE: Final[frozenset[RolloutStatus]] = frozenset({"requeuing", *TERMINAL})
"""What a caller may set a rollout to; `preparing` and `running` are only ever reached by an
attempt."""


class Standing(msgspec.Struct, frozen=True):
    """Everything that decides what happens next to an attempt and its rollout. Times are seconds
    since the epoch.

    `attempts` counts the rollout's attempts so far: the attempt is the latest if this equals
    `sequence_id`. `last_activity` is the time of the last call or span, plus how long calls were
    held since. At `lease_expires` the worker counts as gone. Calls are held until `held_until`, for
    `held_seconds` in all."""

    rollout_id: str
    attempt_id: str
    rollout_status: RolloutStatus
    attempt_status: AttemptStatus
    sequence_id: int
    attempts: int
    config: RolloutConfig
    start_time: float
    last_activity: float
    lease_expires: float
    end_time: float | None = None
    last_heartbeat_time: float | None = None
    held_until: float = 0.0
    held_seconds: float = 0.0

    @property
    def is_latest(self) -> bool:
        return self.sequence_id == self.attempts

    @property
    def is_revivable(self) -> bool:
        """Whether an unresponsive attempt can come back: its retry is queued and has not
        started."""
        return (
            self.attempt_status == "unresponsive"
            and self.is_latest
            and self.rollout_status == "requeuing"
        )


def check_rollout_move(rollout_id: str, current: RolloutStatus, wanted: RolloutStatus) -> None:
    """ConflictError unless a rollout may go from `current` to `wanted`."""
    if wanted in ROLLOUT_MOVES[current]:
        return
    if current in TERMINAL:
        raise ConflictError(
            f"rollout {rollout_id} is {current}, which is final; it cannot become {wanted}"
        )
    allowed = ", ".join(sorted(ROLLOUT_MOVES[current]))
    raise ConflictError(
        f"rollout {rollout_id} is {current}; it cannot become {wanted}, only one of: {allowed}"
    )


def check_settable(rollout_id: str, current: RolloutStatus, wanted: RolloutStatus) -> None:
    """ConflictError unless a caller may set a rollout's status from `current` to `wanted`."""
    if wanted not in SETTABLE:
        raise ConflictError(
            f"rollout {rollout_id} cannot be set to {wanted} by hand; it gets there by its "
            f"attempts. Settable are: {', '.join(sorted(SETTABLE))}"
        )
    check_rollout_move(rollout_id, current, wanted)


def move(standing: Standing, status: AttemptStatus, now: float) -> Standing:
    """Set an attempt's status; its rollout follows if the attempt is its latest and it has not
    ended. An ended attempt is no longer held, should it be revived.

    ConflictError if the attempt may not move there."""
    current = standing.attempt_status
    if status not in ATTEMPT_MOVES[current]:
        raise ConflictError(
            f"attempt {standing.attempt_id} of rollout {standing.rollout_id} has ended as "
            f"{current}; it cannot become {status}"
        )
    end_time, held_until = (now, 0.0) if status in ENDS else (None, standing.held_until)
    moved = replace(standing, attempt_status=status, end_time=end_time, held_until=held_until)
    if not standing.is_latest or standing.rollout_status in TERMINAL:
        return moved
    follows = _rollout_status_after(standing, status)
    if follows == standing.rollout_status:
        return moved
    check_rollout_move(standing.rollout_id, standing.rollout_status, follows)
    return replace(moved, rollout_status=follows)


def overrule(standing: Standing, now: float) -> Standing:
    """The rollout's status was set by a caller: an active attempt ends like the rollout, or
    cancelled if it is requeued."""
    status = standing.rollout_status
    ended = "cancelled" if status == "requeuing" else status
    assert ended in ENDS, f"a rollout cannot be set to {status}"
    return replace(standing, attempt_status=ended, end_time=now)


def _rollout_status_after(standing: Standing, status: AttemptStatus) -> RolloutStatus:
    """Requeuing if the attempt's end is a retry condition and attempts remain; otherwise by
    `FOLLOWS`."""
    config = standing.config
    if (
        status in ENDS
        and status in config.retry_condition
        and standing.sequence_id < config.max_attempts
    ):
        return "requeuing"
    return FOLLOWS[status]


def update(standing: Standing, status: AttemptStatus, now: float, lease_seconds: float) -> Standing:
    """The attempt's owner reports its status. Reporting it twice changes nothing. An unresponsive
    attempt whose retry has not started is revived first."""
    if status == standing.attempt_status:
        return standing
    if standing.is_revivable:
        standing = record_activity(standing, now, lease_seconds)
        return standing if status == "running" else move(standing, status, now)
    if standing.attempt_status == "unresponsive":
        raise ConflictError(
            f"attempt {standing.attempt_id} of rollout {standing.rollout_id} was given up as "
            f"unresponsive and the rollout is {standing.rollout_status} now; it cannot become "
            f"{status}"
        )
    return move(standing, status, now)


def record_activity(standing: Standing, now: float, lease_seconds: float) -> Standing:
    """A call or span of the attempt arrived: it is running, or revived. An attempt stays as it is
    if it has ended, or is not the latest of an unfinished rollout."""
    # of several calls one may be held on while another is answered
    silent_from = max(now, standing.held_until)
    if standing.attempt_status == "running":
        return replace(standing, last_activity=silent_from)
    if standing.attempt_status == "preparing":
        return replace(move(standing, "running", now), last_activity=silent_from)
    if standing.is_revivable:
        lease_expires = max(standing.lease_expires, now + lease_seconds)
        return replace(
            move(standing, "running", now), last_activity=silent_from, lease_expires=lease_expires
        )
    return standing


def hold(standing: Standing, now: float, seconds: float) -> Standing:
    """The gateway holds the calls of an active attempt for the next `seconds`: its timeout and
    unresponsive limit stand still. Seconds for which it is held already count once.

    Held at 100 for 5 seconds and at 103 for 5 again: until 108, for 8 seconds in all."""
    added = seconds - max(0.0, standing.held_until - now)
    if standing.attempt_status not in ACTIVE or added <= 0:
        return standing
    return replace(
        standing,
        held_until=now + seconds,
        held_seconds=standing.held_seconds + added,
        last_activity=standing.last_activity + added,
    )


def beat(standing: Standing, now: float, lease_seconds: float) -> Standing:
    """A heartbeat extends the lease of an active attempt, and revives an attempt whose lease ran
    out. It does not revive an attempt that fell silent: a hung agent may still send heartbeats."""
    lost_lease = standing.end_time is not None and standing.end_time >= standing.lease_expires
    if standing.is_revivable and lost_lease:
        standing = move(standing, "running", now)
    if standing.attempt_status not in ACTIVE:
        return standing
    return replace(standing, lease_expires=now + lease_seconds, last_heartbeat_time=now)


def deadline(standing: Standing) -> float:
    """When the first of an active attempt's three clocks runs out."""
    return min(when for when, _ in _clocks(standing))


def first_deadline(config: RolloutConfig, now: float, lease_expires: float) -> float:
    """When the first clock runs out for an attempt that starts now."""
    limits = (config.timeout_seconds or math.inf, config.unresponsive_seconds or math.inf)
    return min(lease_expires, *(now + limit for limit in limits))


def expire(standing: Standing, now: float) -> Standing:
    """End an active attempt by the clock that ran out first; otherwise change nothing."""
    if standing.attempt_status not in ACTIVE:
        return standing
    when, status = min(_clocks(standing), key=lambda clock: clock[0])
    return move(standing, status, now) if when <= now else standing


def _clocks(standing: Standing) -> list[tuple[float, AttemptStatus]]:
    config = standing.config
    clocks: list[tuple[float, AttemptStatus]] = [(standing.lease_expires, "unresponsive")]
    if config.timeout_seconds is not None:
        clocks.append(
            (standing.start_time + standing.held_seconds + config.timeout_seconds, "timeout")
        )
    if config.unresponsive_seconds is not None:
        clocks.append((standing.last_activity + config.unresponsive_seconds, "unresponsive"))
    return clocks
