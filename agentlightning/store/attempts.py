"""Attempts as rows, and whatever moves them: what the lifecycle decides is written here, inside one transaction.

This module does not know threads, event loops or HTTP.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from agentlightning.errors import ConflictError, NotFoundError
from agentlightning.store import codec, lifecycle
from agentlightning.store.lifecycle import Standing
from agentlightning.store.rollouts import (
    ROLLOUT_COLUMNS,
    config_from_json,
    create_rollout,
    require_rollout,
    rollout_from_row,
    set_status,
)
from agentlightning.store.transaction import Transaction
from agentlightning.types import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    EnqueueRolloutRequest,
    Heartbeat,
    Lease,
    Rollout,
    RolloutStatus,
)

_ATTEMPT: Final = (
    "rollout_id, attempt_id, sequence_id, start_time, end_time, status, worker_id, last_heartbeat_time, metadata"
)
_STANDING: Final = """
SELECT a.number, r.rollout_id, a.attempt_id, r.status, a.status, a.sequence_id, r.attempts, r.config, a.start_time,
       a.last_activity, a.lease_expires, a.end_time, r.end_time, a.last_heartbeat_time
FROM attempts a JOIN rollouts r ON r.rollout_id = a.rollout_id
"""
_QUEUED: Final = "('queuing', 'requeuing')"
_ACTIVE: Final = "('preparing', 'running')"


def attempt_from_row(row: Sequence[Any]) -> Attempt:
    return Attempt(
        rollout_id=row[0],
        attempt_id=row[1],
        sequence_id=row[2],
        start_time=row[3],
        end_time=row[4],
        status=row[5],
        worker_id=row[6],
        last_heartbeat_time=row[7],
        metadata=codec.from_json(row[8]),
    )


def _standing(row: Sequence[Any]) -> tuple[int, Standing]:
    return row[0], Standing(
        rollout_id=row[1],
        attempt_id=row[2],
        rollout_status=row[3],
        attempt_status=row[4],
        sequence_id=row[5],
        attempts=row[6],
        config=config_from_json(row[7]),
        start_time=row[8],
        last_activity=row[9],
        lease_expires=row[10],
        end_time=row[11],
        rollout_end_time=row[12],
        last_heartbeat_time=row[13],
    )


def load_standing(connection: sqlite3.Connection, rollout_id: str, attempt_id: str) -> tuple[int, Standing]:
    """An attempt's number in the store and its standing; NotFoundError if the rollout has no such attempt."""
    row = connection.execute(_STANDING + "WHERE a.attempt_id = ?", (attempt_id,)).fetchone()
    if row is None or row[1] != rollout_id:
        raise NotFoundError(f"there is no attempt {attempt_id!r} of a rollout {rollout_id!r}")
    return _standing(row)


def save_standing(tx: Transaction, number: int, before: Standing, after: Standing) -> None:
    """Write what the lifecycle changed of an attempt and of its rollout."""
    if after == before:
        return
    tx.connection.execute(
        "UPDATE attempts SET status = ?, end_time = ?, last_activity = ?, lease_expires = ?, last_heartbeat_time = ? "
        "WHERE number = ?",
        (
            after.attempt_status,
            after.end_time,
            after.last_activity,
            after.lease_expires,
            after.last_heartbeat_time,
            number,
        ),
    )
    if after.attempt_status != before.attempt_status or after.last_heartbeat_time != before.last_heartbeat_time:
        tx.changes.touched.append(after.rollout_id)
    if after.attempt_status != before.attempt_status and after.attempt_status in lifecycle.ACTIVE:
        _watch(tx, number, after)
    if after.rollout_status != before.rollout_status:
        set_status(tx, after.rollout_id, after.rollout_status)


def _watch(tx: Transaction, number: int, standing: Standing) -> None:
    """Note when the clocks of an active attempt are to be looked at. They only ever move later, so that a heartbeat
    or a span need not touch this."""
    check_time = lifecycle.deadline(standing)
    tx.connection.execute("UPDATE attempts SET check_time = ? WHERE number = ?", (check_time, number))
    tx.changes.deadline = min(tx.changes.deadline, check_time)


def update_rollout(
    tx: Transaction, rollout_id: str, status: RolloutStatus | None, metadata: Mapping[str, Any] | None
) -> Rollout:
    """Change the status by hand, where the lifecycle allows it, and replace the metadata."""
    current = require_rollout(tx.connection, rollout_id).status
    if status is not None and status != current:
        lifecycle.check_settable(rollout_id, current, status)
        _decide(tx, rollout_id, status)
    if metadata is not None:
        text = codec.to_json(metadata, "the metadata of the rollout")
        tx.connection.execute("UPDATE rollouts SET metadata = ? WHERE rollout_id = ?", (text, rollout_id))
        tx.changes.touched.append(rollout_id)
    return require_rollout(tx.connection, rollout_id)


def cancel_rollout(tx: Transaction, rollout_id: str) -> Rollout:
    """Cancel a rollout and whatever attempts of it are active; a cancelled one stays as it is."""
    current = require_rollout(tx.connection, rollout_id).status
    if current != "cancelled":
        lifecycle.check_rollout_move(rollout_id, current, "cancelled")
        _decide(tx, rollout_id, "cancelled")
    return require_rollout(tx.connection, rollout_id)


def _decide(tx: Transaction, rollout_id: str, status: RolloutStatus) -> None:
    """A rollout becomes `status` by somebody's word, so that whatever attempts of it are active have ended."""
    set_status(tx, rollout_id, status)
    active = tx.connection.execute(
        _STANDING + f"WHERE a.rollout_id = ? AND a.status IN {_ACTIVE}", (rollout_id,)
    ).fetchall()
    for number, standing in map(_standing, active):
        save_standing(tx, number, standing, lifecycle.overrule(standing, tx.now))


# --- attempts ----------------------------------------------------------------------------------------------------


def lease(tx: Transaction, limit: int, worker_id: str | None) -> list[AttemptedRollout]:
    """Start an attempt on each of the oldest queued rollouts."""
    rows = tx.connection.execute(
        f"SELECT {ROLLOUT_COLUMNS} FROM rollouts WHERE status IN {_QUEUED} ORDER BY number LIMIT ?", (limit,)
    ).fetchall()
    return [_start(tx, rollout_from_row(row), worker_id) for row in rows]


def start_rollout(tx: Transaction, request: EnqueueRolloutRequest, worker_id: str | None) -> AttemptedRollout:
    """Create a rollout and start its first attempt."""
    return _start(tx, create_rollout(tx, request, "queuing"), worker_id)


def start_attempt(tx: Transaction, rollout_id: str, worker_id: str | None) -> AttemptedRollout:
    """Start a further attempt, which from now on is the one that moves the rollout."""
    return _start(tx, require_rollout(tx.connection, rollout_id), worker_id)


def _start(tx: Transaction, rollout: Rollout, worker_id: str | None) -> AttemptedRollout:
    lifecycle.check_rollout_move(rollout.rollout_id, rollout.status, "preparing")
    attempt_id = codec.new_id("at")
    (sequence_id,) = tx.connection.execute(
        "UPDATE rollouts SET status = 'preparing', attempts = attempts + 1 WHERE rollout_id = ? RETURNING attempts",
        (rollout.rollout_id,),
    ).fetchone()
    standing = Standing(
        rollout_id=rollout.rollout_id,
        attempt_id=attempt_id,
        rollout_status="preparing",
        attempt_status="preparing",
        sequence_id=sequence_id,
        attempts=sequence_id,
        config=rollout.config,
        start_time=tx.now,
        last_activity=tx.now,
        lease_expires=tx.now + tx.lease_seconds,
    )
    check_time = lifecycle.deadline(standing)
    row = (rollout.rollout_id, attempt_id, sequence_id, tx.now, None, "preparing", worker_id, None, "{}")
    (number,) = tx.connection.execute(
        f"INSERT INTO attempts ({_ATTEMPT}, last_activity, lease_expires, check_time, span_sequence) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0) RETURNING number",
        (*row, tx.now, standing.lease_expires, check_time),
    ).fetchone()
    tx.changes.deadline = min(tx.changes.deadline, check_time)
    tx.changes.touched.append(rollout.rollout_id)
    fields = msgspec.structs.asdict(msgspec.structs.replace(rollout, status="preparing"))
    # Attempts are numbered as they are started and no number is used twice: that makes it a fencing token.
    return AttemptedRollout(
        **fields, attempt=attempt_from_row(row), lease=Lease(token=number, expires=standing.lease_expires)
    )


def withdraw(tx: Transaction, leased: Sequence[AttemptedRollout]) -> None:
    """Undo leases that nobody was told of: the attempts never were, and their rollouts are queued again."""
    for rollout in leased:
        _, standing = load_standing(tx.connection, rollout.rollout_id, rollout.attempt.attempt_id)
        if standing.attempt_status != "preparing" or not standing.is_latest:
            continue
        tx.connection.execute("DELETE FROM attempts WHERE attempt_id = ?", (standing.attempt_id,))
        tx.connection.execute("UPDATE rollouts SET attempts = attempts - 1 WHERE rollout_id = ?", (rollout.rollout_id,))
        set_status(tx, rollout.rollout_id, "queuing" if standing.sequence_id == 1 else "requeuing")


def query_attempts(connection: sqlite3.Connection, rollout_id: str) -> list[Attempt]:
    rows = connection.execute(
        f"SELECT {_ATTEMPT} FROM attempts WHERE rollout_id = ? ORDER BY sequence_id", (rollout_id,)
    ).fetchall()
    if not rows:
        require_rollout(connection, rollout_id)
    return [attempt_from_row(row) for row in rows]


def latest_attempt_row(connection: sqlite3.Connection, rollout_id: str) -> tuple[Any, ...] | None:
    return connection.execute(
        f"SELECT {_ATTEMPT} FROM attempts WHERE rollout_id = ? ORDER BY sequence_id DESC LIMIT 1", (rollout_id,)
    ).fetchone()


def update_attempt(
    tx: Transaction,
    rollout_id: str,
    attempt_id: str,
    status: AttemptStatus | None,
    metadata: Mapping[str, Any] | None,
    token: int | None,
) -> Attempt:
    """Move an attempt, its rollout following, and replace its metadata."""
    number, before = load_standing(tx.connection, rollout_id, attempt_id)
    _check_token(before, number, token)
    if status is not None:
        save_standing(tx, number, before, lifecycle.update(before, status, tx.now, tx.lease_seconds))
    if metadata is not None:
        text = codec.to_json(metadata, "the metadata of the attempt")
        tx.connection.execute("UPDATE attempts SET metadata = ? WHERE number = ?", (text, number))
        tx.changes.touched.append(rollout_id)
    return attempt_from_row(
        tx.connection.execute(f"SELECT {_ATTEMPT} FROM attempts WHERE number = ?", (number,)).fetchone()
    )


def heartbeat(tx: Transaction, rollout_id: str, attempt_id: str, token: int) -> Heartbeat:
    """Extend the lease of an active attempt; say how any other stands."""
    number, before = load_standing(tx.connection, rollout_id, attempt_id)
    _check_token(before, number, token)
    after = lifecycle.beat(before, tx.now, tx.lease_seconds)
    save_standing(tx, number, before, after)
    tx.connection.execute(
        "UPDATE workers SET last_heartbeat_time = ? "
        "WHERE worker_id = (SELECT worker_id FROM attempts WHERE number = ?)",
        (tx.now, number),
    )
    active = after.attempt_status in lifecycle.ACTIVE
    return Heartbeat(status=after.attempt_status, lease_expires=after.lease_expires if active else None)


def _check_token(standing: Standing, number: int, token: int | None) -> None:
    if token is not None and token != number:
        raise ConflictError(
            f"lease {token} does not hold attempt {standing.attempt_id} of rollout {standing.rollout_id}; "
            "stop working on it and take a new rollout"
        )


# --- the clocks --------------------------------------------------------------------------------------------------


def expire(tx: Transaction, limit: int = 500) -> int:
    """End attempts whose clock ran out, up to `limit`, and return how many ended. `changes.deadline` becomes the
    time of the next look."""
    rows = tx.connection.execute(
        _STANDING + f"WHERE a.status IN {_ACTIVE} AND a.check_time <= ? ORDER BY a.check_time LIMIT ?", (tx.now, limit)
    ).fetchall()
    ended = 0
    for number, before in map(_standing, rows):
        after = lifecycle.expire(before, tx.now)
        if after == before:
            _watch(tx, number, before)
        else:
            save_standing(tx, number, before, after)
            ended += 1
    (earliest,) = tx.connection.execute(f"SELECT MIN(check_time) FROM attempts WHERE status IN {_ACTIVE}").fetchone()
    tx.changes.deadline = math.inf if earliest is None else earliest
    return ended


def grant_grace(tx: Transaction) -> None:
    """While the store was closed nobody could be heard: leases and silence count from now at the earliest."""
    tx.connection.execute(
        f"UPDATE attempts SET lease_expires = MAX(lease_expires, ?), last_activity = MAX(last_activity, ?) "
        f"WHERE status IN {_ACTIVE}",
        (tx.now + tx.lease_seconds, tx.now),
    )
