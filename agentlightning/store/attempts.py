"""Attempts as rows: writes what the lifecycle decides, inside one transaction.

This module does not know threads, event loops or HTTP.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from agentlightning.errors import ConflictError, InvalidError, NotFoundError
from agentlightning.store import codec, keys, lifecycle
from agentlightning.store.database import Connection, Transaction
from agentlightning.store.lifecycle import Standing
from agentlightning.store.redaction import Redact, metadata_without_secrets
from agentlightning.store.rollouts import (
    ACTIVE,
    QUEUED,
    create_rollout,
    note_error,
    recall,
    require_rollout,
    set_status,
)
from agentlightning.store.tables import ATTEMPTS, ROLLOUTS
from agentlightning.store.workers import touch_worker
from agentlightning.types import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    EnqueueRolloutRequest,
    Heartbeat,
    Lease,
    Rollout,
    RolloutConfig,
    RolloutStatus,
)

_STANDING: Final = """
SELECT a.number, r.rollout_id, a.attempt_id, r.status, a.status, a.sequence_id, r.attempts,
       r.config, a.start_time, a.last_activity, a.lease_expires, a.end_time, a.last_heartbeat_time,
       a.held_until, a.held_seconds, a.span_sequence
FROM attempts a JOIN rollouts r ON r.rollout_id = a.rollout_id
"""
_MOVING: Final = (
    "last_activity",
    "end_time",
    "lease_expires",
    "last_heartbeat_time",
    "held_until",
    "held_seconds",
)
_config: Final = msgspec.json.Decoder(RolloutConfig).decode
_MOST_LEASED: Final = 1000  # rollouts in one transaction, so that nobody waits long


def _standing(row: Sequence[Any]) -> tuple[int, Standing]:
    """An attempt's row number and its standing, whose fields are in the order of the columns."""
    fields: list[Any] = [*row[1:7], _config(row[7]), *row[8:15]]
    return row[0], Standing(*fields)


def load_standing(connection: Connection, rollout_id: str, attempt_id: str) -> tuple[int, Standing]:
    """An attempt's row number and its standing. NotFoundError if the rollout has no such
    attempt."""
    return load_with_sequence(connection, rollout_id, attempt_id)[:2]


def load_with_sequence(
    connection: Connection, rollout_id: str, attempt_id: str
) -> tuple[int, Standing, int]:
    """Like `load_standing`, with the highest sequence id of the attempt's spans."""
    row = connection.execute(_STANDING + "WHERE a.attempt_id = ?", (attempt_id,)).fetchone()
    if row is None or row[1] != rollout_id:
        raise NotFoundError(f"there is no attempt {attempt_id!r} of a rollout {rollout_id!r}")
    return *_standing(row), row[-1]


def save_standing(
    tx: Transaction,
    number: int,
    before: Standing,
    after: Standing,
    span_sequence: int | None = None,
) -> None:
    """Write what the lifecycle changed in an attempt and its rollout, and the highest sequence id
    of its spans."""
    columns: dict[str, Any] = {}
    for name in _MOVING:  # what has not changed is left alone, and so are the indexes that it is in
        value = getattr(after, name)
        if value != getattr(before, name):
            columns[name] = value
    moved = after.attempt_status != before.attempt_status
    if moved:
        columns["status"] = after.attempt_status
    if moved and after.attempt_status in lifecycle.ACTIVE:
        columns["check_time"] = lifecycle.deadline(after)
        tx.changes.set_deadline(columns["check_time"])
    if span_sequence is not None:
        columns["span_sequence"] = span_sequence
    if columns:
        values = " = ?, ".join(columns)
        tx.connection.execute(
            f"UPDATE attempts SET {values} = ? WHERE number = ?", (*columns.values(), number)
        )
    heard = after.last_heartbeat_time != before.last_heartbeat_time
    if moved or heard or after.held_seconds != before.held_seconds:
        tx.changes.touched.append(after.rollout_id)
    if after.rollout_status != before.rollout_status:
        set_status(tx, after.rollout_id, after.rollout_status)


def update_rollout(
    tx: Transaction,
    rollout_id: str,
    status: RolloutStatus | None,
    metadata: Mapping[str, Any] | None,
    merge: Mapping[str, Any] | None,
) -> Rollout:
    """Change the status, where the lifecycle allows it, and replace the metadata or merge into
    it."""
    stored = require_rollout(tx.connection, rollout_id)
    if status is not None and status != stored.status:
        lifecycle.check_settable(rollout_id, stored.status, status)
        _decide(tx, rollout_id, status)
    if metadata is not None or merge is not None:
        # before the recursion, as it limits the depth
        codec.to_json(merge, "the change of the metadata")
        whole = codec.merged(stored.metadata if metadata is None else metadata, merge or {})
        text = codec.to_json(whole, "the metadata of the rollout")
        tx.connection.execute(
            "UPDATE rollouts SET metadata = ? WHERE rollout_id = ?", (text, rollout_id)
        )
        tx.changes.touched.append(rollout_id)
    return require_rollout(tx.connection, rollout_id)


def cancel_rollout(tx: Transaction, rollout_id: str) -> Rollout:
    """Cancel a rollout and its active attempts. A cancelled rollout stays unchanged."""
    current = require_rollout(tx.connection, rollout_id).status
    if current != "cancelled":
        lifecycle.check_rollout_move(rollout_id, current, "cancelled")
        _decide(tx, rollout_id, "cancelled")
    return require_rollout(tx.connection, rollout_id)


def _decide(tx: Transaction, rollout_id: str, status: RolloutStatus) -> None:
    """Set a rollout's status, which ends its active attempts."""
    set_status(tx, rollout_id, status)
    active = tx.connection.execute(
        _STANDING + f"WHERE a.rollout_id = ? AND a.status IN {ACTIVE}", (rollout_id,)
    ).fetchall()
    for number, standing in map(_standing, active):
        save_standing(tx, number, standing, lifecycle.overrule(standing, tx.now))


def lease(
    tx: Transaction, limit: int, worker_id: str | None, lease_id: str | None
) -> list[AttemptedRollout]:
    """Start an attempt on each of the first queued rollouts."""
    touch_worker(tx, worker_id)
    limit = min(limit, _MOST_LEASED)
    if lease_id is not None:
        codec.check_id(lease_id, "lease_id")
        earlier = _handed_out_again(tx, f"{lease_id}.0")
        if earlier is not None:
            names = (f"{lease_id}.{index}" for index in range(1, limit))
            rest = (_handed_out_again(tx, name) for name in names)
            return [earlier, *(rollout for rollout in rest if rollout is not None)]
    rollouts = ROLLOUTS.all(
        tx.connection, f"WHERE status IN {QUEUED} ORDER BY priority DESC, number LIMIT ?", (limit,)
    )
    names = (None if lease_id is None else f"{lease_id}.{index}" for index in range(len(rollouts)))
    return [
        _start(tx, rollout, worker_id, name) for rollout, name in zip(rollouts, names, strict=True)
    ]


def start_rollout(
    tx: Transaction,
    config: RolloutConfig | None,
    metadata: Mapping[str, Any] | None,
    worker_id: str | None,
    attempt_id: str | None,
    **asked: Any,
) -> AttemptedRollout:
    """Create a rollout and start its first attempt."""
    request = EnqueueRolloutRequest(
        config=config or RolloutConfig(), metadata=dict(metadata or {}), **asked
    )
    touch_worker(tx, worker_id)
    earlier = _handed_out_again(tx, attempt_id, request.rollout_id)
    return earlier or _start(tx, create_rollout(tx, request, queued=False), worker_id, attempt_id)


def start_attempt(
    tx: Transaction, rollout_id: str, worker_id: str | None, attempt_id: str | None
) -> AttemptedRollout:
    """Start another attempt. From now on only this attempt changes the rollout."""
    touch_worker(tx, worker_id)
    earlier = _handed_out_again(tx, attempt_id, rollout_id)
    return earlier or _start(tx, require_rollout(tx.connection, rollout_id), worker_id, attempt_id)


def _handed_out_again(
    tx: Transaction, attempt_id: str | None, rollout_id: str | None = None
) -> AttemptedRollout | None:
    """The attempt that was leased under this id, for a caller that did not get the answer. This
    counts as a sign of life. ConflictError if it is another rollout's."""
    if attempt_id is None:
        return None
    row = tx.connection.execute(_STANDING + "WHERE a.attempt_id = ?", (attempt_id,)).fetchone()
    if row is None:
        return None
    number, before = _standing(row)
    if rollout_id not in (None, before.rollout_id):
        raise ConflictError(
            f"attempt {attempt_id} is stored already, of another rollout; choose another id"
        )
    after = lifecycle.beat(before, tx.now, tx.lease_seconds)
    save_standing(tx, number, before, after)
    attempt = _numbered(tx.connection, number)
    rollout = require_rollout(tx.connection, before.rollout_id)  # as the sign of life left it
    return _handed_out(tx, rollout, attempt, Lease(token=number, expires=after.lease_expires))


def _handed_out(
    tx: Transaction, rollout: Rollout, attempt: Attempt, lease: Lease
) -> AttemptedRollout:
    ids = rollout.rollout_id, attempt.attempt_id
    return AttemptedRollout(
        **msgspec.structs.asdict(rollout),
        attempt=attempt,
        lease=lease,
        api_key=keys.sign(tx.secret, *ids),
        reward_key=keys.sign(tx.secret, *ids, rewards=True),
    )


def _start(
    tx: Transaction, rollout: Rollout, worker_id: str | None, attempt_id: str | None
) -> AttemptedRollout:
    lifecycle.check_rollout_move(rollout.rollout_id, rollout.status, "preparing")
    attempt_id = (
        codec.new_id("at") if attempt_id is None else codec.check_id(attempt_id, "attempt_id")
    )
    (sequence_id,) = tx.connection.execute(
        "UPDATE rollouts SET status = 'preparing', attempts = attempts + 1, reward = NULL, "
        "reward_order = NULL, error = NULL WHERE rollout_id = ? RETURNING attempts",
        (rollout.rollout_id,),
    ).fetchone()
    lease_expires = tx.now + tx.lease_seconds
    check_time = lifecycle.first_deadline(rollout.config, tx.now, lease_expires)
    attempt = Attempt(
        rollout_id=rollout.rollout_id,
        attempt_id=attempt_id,
        sequence_id=sequence_id,
        start_time=tx.now,
        worker_id=worker_id,
    )
    number = insert_attempt(tx.connection, attempt, lease_expires, check_time)
    tx.changes.set_deadline(check_time)
    tx.changes.touched.append(rollout.rollout_id)
    # Attempts are numbered as they are started and no number is used twice: that makes it a fencing
    # token.
    lease = Lease(token=number, expires=lease_expires)
    begun = msgspec.structs.replace(rollout, status="preparing", reward=None, error=None)
    return _handed_out(tx, begun, attempt, lease)


def insert_attempt(
    connection: Connection, attempt: Attempt, lease_expires: float, check_time: float
) -> int:
    """Insert an attempt, active from its start. Returns its row number."""
    clocks = {
        "last_activity": attempt.start_time,
        "lease_expires": lease_expires,
        "check_time": check_time,
    }
    return ATTEMPTS.insert(
        connection, attempt, "RETURNING number", **clocks, span_sequence=0
    ).fetchone()[0]


def withdraw(tx: Transaction, leased: Sequence[AttemptedRollout]) -> None:
    """Undo leases that no caller got: delete the attempts and queue their rollouts again. Leases
    that the caller has asked for again stay."""
    for rollout in leased:
        try:
            _, standing = load_standing(
                tx.connection, rollout.rollout_id, rollout.attempt.attempt_id
            )
        except NotFoundError:
            continue  # removed meanwhile
        asked_again = standing.last_heartbeat_time is not None
        if standing.attempt_status != "preparing" or not standing.is_latest or asked_again:
            continue
        tx.connection.execute("DELETE FROM attempts WHERE attempt_id = ?", (standing.attempt_id,))
        tx.connection.execute(
            "UPDATE rollouts SET attempts = attempts - 1 WHERE rollout_id = ?",
            (rollout.rollout_id,),
        )
        set_status(tx, rollout.rollout_id, "queuing" if standing.sequence_id == 1 else "requeuing")
        recall(tx.connection, rollout.rollout_id)


def query_attempts(tx: Transaction, rollout_id: str) -> list[Attempt]:
    attempts = ATTEMPTS.all(
        tx.connection, "WHERE rollout_id = ? ORDER BY sequence_id", (rollout_id,)
    )
    if not attempts:
        require_rollout(tx.connection, rollout_id)
    return attempts


def get_latest_attempt(tx: Transaction, rollout_id: str) -> Attempt | None:
    return ATTEMPTS.one(
        tx.connection, "WHERE rollout_id = ? ORDER BY sequence_id DESC LIMIT 1", rollout_id
    )


def _numbered(connection: Connection, number: int) -> Attempt:
    attempt = ATTEMPTS.one(connection, "WHERE number = ?", number)
    assert attempt is not None
    return attempt


def update_attempt(
    tx: Transaction,
    redact: Redact,
    rollout_id: str,
    attempt_id: str,
    status: AttemptStatus | None,
    metadata: Mapping[str, Any] | None,
    lease: int | None,
) -> Attempt:
    """Change an attempt's status, and with it its rollout's, and replace its metadata, of which
    `redact` cleans the reason."""
    number, before = load_standing(tx.connection, rollout_id, attempt_id)
    # to hear the end of it twice is harmless
    if status != before.attempt_status or lease != number:
        _check_token(before, number, lease)
    after = before
    if status is not None:
        after = lifecycle.update(before, status, tx.now, tx.lease_seconds)
        save_standing(tx, number, before, after)
    if metadata is not None:
        ids = rollout_id, attempt_id
        metadata = metadata_without_secrets(redact, ids, after.attempt_status, metadata)
        text = codec.to_json(metadata, "the metadata of the attempt")
        tx.connection.execute("UPDATE attempts SET metadata = ? WHERE number = ?", (text, number))
        note_error(tx.connection, rollout_id, before.sequence_id, metadata.get("reason"))
        tx.changes.touched.append(rollout_id)
    return _numbered(tx.connection, number)


def heartbeat(tx: Transaction, rollout_id: str, attempt_id: str, lease: int) -> Heartbeat:
    """Extend the lease of an active attempt; report the status of an ended one. ConflictError if a
    later attempt exists."""
    number, before = load_standing(tx.connection, rollout_id, attempt_id)
    _check_token(before, number, lease)
    after = lifecycle.beat(before, tx.now, tx.lease_seconds)
    save_standing(tx, number, before, after)
    tx.connection.execute(
        "UPDATE workers SET last_heartbeat_time = ? "
        "WHERE worker_id = (SELECT worker_id FROM attempts WHERE number = ?)",
        (tx.now, number),
    )
    active = after.attempt_status in lifecycle.ACTIVE
    return Heartbeat(
        status=after.attempt_status, lease_expires=after.lease_expires if active else None
    )


def _check_token(standing: Standing, number: int, token: int | None) -> None:
    """ConflictError unless the token, if given, is the attempt's, and the attempt is the rollout's
    latest."""
    if token is not None and (token != number or not standing.is_latest):
        followed = "" if standing.is_latest else ", which another one has followed"
        raise ConflictError(
            f"lease {token} does not hold attempt {standing.attempt_id} of rollout "
            f"{standing.rollout_id}{followed}; stop working on it and take a new rollout"
        )


def extend_attempts(tx: Transaction, attempts: Sequence[tuple[str, str]], seconds: float) -> None:
    """Stop the timeout and the unresponsive limit of active attempts. Skip attempts that have ended
    or are deleted."""
    if not 0 < seconds < math.inf:
        raise InvalidError(f"seconds is {seconds}; it must be positive and finite")
    for rollout_id, attempt_id in dict.fromkeys(attempts):
        try:
            number, before = load_standing(tx.connection, rollout_id, attempt_id)
        except NotFoundError:
            continue
        save_standing(tx, number, before, lifecycle.hold(before, tx.now, seconds))


def expire(tx: Transaction, unheard_since: float | None, limit: int = 500) -> int:
    """End up to `limit` attempts whose time has run out and return how many. Sets
    `changes.deadline`, the time of the next check. If nobody could be heard since a time, the
    clocks stood still from then on."""
    if unheard_since is not None:
        go_on_after(tx, unheard_since)
    rows = tx.connection.execute(
        _STANDING
        + f"WHERE a.status IN {ACTIVE} AND a.check_time <= ? ORDER BY a.check_time LIMIT ?",
        (tx.now, limit),
    ).fetchall()
    ended = 0
    for number, before in map(_standing, rows):
        after = lifecycle.expire(before, tx.now)
        if after == before:
            # Clocks only move later, so heartbeats, spans and holds leave the time of the check as
            # it is.
            check_time = lifecycle.deadline(before)
            tx.connection.execute(
                "UPDATE attempts SET check_time = ? WHERE number = ?", (check_time, number)
            )
        else:
            save_standing(tx, number, before, after)
            note_error(tx.connection, after.rollout_id, after.sequence_id, after.attempt_status)
            ended += 1
    (earliest,) = tx.connection.execute(
        f"SELECT MIN(check_time) FROM attempts WHERE status IN {ACTIVE}"
    ).fetchone()
    tx.changes.deadline = math.inf if earliest is None else earliest
    return ended


def go_on_after(tx: Transaction, began: float) -> None:
    """Since `began` the store could not be reached: the clocks of active attempts stood still, and
    leases start anew."""
    rows = tx.connection.execute(
        _STANDING + f"WHERE a.status IN {ACTIVE} AND a.start_time < ?", (began,)
    ).fetchall()
    for number, before in map(_standing, rows):
        held = lifecycle.hold(before, began, tx.now - began)
        lease_expires = max(held.lease_expires, tx.now + tx.lease_seconds)
        save_standing(
            tx, number, before, msgspec.structs.replace(held, lease_expires=lease_expires)
        )


def grant_grace(tx: Transaction) -> None:
    """The store was closed: leases and unresponsive limits start now, even if the machine's clock
    was set back. Whoever held calls says so again."""
    tx.connection.execute(
        "UPDATE attempts SET lease_expires = ?, last_activity = ?, held_until = ?, check_time = ? "
        f"WHERE status IN {ACTIVE}",
        (tx.now + tx.lease_seconds, *[tx.now] * 3),
    )
    tx.connection.execute(
        f"UPDATE attempts SET start_time = ? WHERE status IN {ACTIVE} AND start_time > ?",
        (tx.now, tx.now),
    )


def issue_attempt_key(tx: Transaction, rollout_id: str, attempt_id: str, rewards: bool) -> str:
    """A key of one attempt, with or without the right to write its rewards."""
    load_standing(tx.connection, rollout_id, attempt_id)
    return keys.sign(tx.secret, rollout_id, attempt_id, rewards=rewards)
