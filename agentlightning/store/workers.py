"""Workers as rows: who has been heard of, what each holds, and what its key opens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from agentlightning.errors import ConflictError, InvalidError
from agentlightning.store import codec, keys
from agentlightning.store.database import Transaction
from agentlightning.store.rollouts import ACTIVE
from agentlightning.types import Credential, Worker

_LONGEST_ID: Final = 500  # what PostgreSQL can index, and more than any host's name
_FORGOTTEN_SECONDS: Final = 86_400.0  # of silence
_GONE_AFTER_LEASES: Final = 3
"""A worker that has not been heard for this many lease times, and holds nothing, counts as gone."""


def touch_worker(tx: Transaction, worker_id: str | None, stats: str | None = None) -> None:
    """Note that a named worker is alive, and its report as JSON (None: unchanged)."""
    if worker_id is None:
        return
    if not worker_id.strip(".") or len(worker_id) > _LONGEST_ID:
        raise InvalidError(
            f"worker_id is {worker_id[:100]!r}, of {len(worker_id)} characters; give each worker a "
            f"unique name of at most {_LONGEST_ID}, not of dots alone, or None"
        )
    worker_id = codec.text(worker_id)
    reported, values = ("", ()) if stats is None else (", heartbeat_stats = ?", (stats,))
    known = tx.connection.execute(
        f"UPDATE workers SET last_heartbeat_time = ?{reported} WHERE worker_id = ?",
        (tx.now, *values, worker_id),
    )
    if known.rowcount:
        return
    # now that there is one more, so that there are never more than came within a day
    _forget_workers(tx)
    tx.connection.execute(
        "INSERT INTO workers (worker_id, last_heartbeat_time, heartbeat_stats) VALUES (?, ?, ?)",
        (worker_id, tx.now, stats or "{}"),
    )


def _forget_workers(tx: Transaction) -> None:
    """Delete workers that have been silent for long and hold nothing."""
    tx.connection.execute(
        "DELETE FROM workers WHERE worker_id IN (SELECT worker_id FROM workers WHERE "
        "last_heartbeat_time < ? AND worker_id NOT IN (SELECT worker_id FROM attempts WHERE "
        f"status IN {ACTIVE} AND worker_id IS NOT NULL))",
        (tx.now - _FORGOTTEN_SECONDS,),
    )


def update_worker(
    tx: Transaction, worker_id: str, heartbeat_stats: Mapping[str, Any] | None
) -> Worker:
    stats = None if heartbeat_stats is None else codec.to_json(heartbeat_stats, "heartbeat_stats")
    touch_worker(tx, worker_id, stats)
    return _workers(tx, codec.text(worker_id))[0]


def query_workers(tx: Transaction) -> list[Worker]:
    return _workers(tx)


def _workers(tx: Transaction, worker_id: str | None = None) -> list[Worker]:
    """All workers, or the named one, with the newest attempt that each is busy with."""
    of_worker, values = ("", ()) if worker_id is None else ("AND worker_id = ? ", (worker_id,))
    holding: dict[str, tuple[str, str]] = {
        worker: (rollout_id, attempt_id)
        for worker, rollout_id, attempt_id in tx.connection.execute(
            "SELECT worker_id, rollout_id, attempt_id FROM attempts "
            f"WHERE status IN {ACTIVE} AND worker_id IS NOT NULL {of_worker}ORDER BY number",
            values,
        )
    }
    workers: list[Worker] = []
    for name, last_heartbeat_time, stats in tx.connection.execute(
        "SELECT worker_id, last_heartbeat_time, heartbeat_stats FROM workers WHERE true "
        f"{of_worker}ORDER BY worker_id",
        values,
    ):
        rollout_id, attempt_id = holding.get(name, (None, None))
        silent = tx.now - last_heartbeat_time > _GONE_AFTER_LEASES * tx.lease_seconds
        status = "gone" if silent else "idle"
        workers.append(
            Worker(
                worker_id=name,
                status="busy" if attempt_id else status,
                last_heartbeat_time=last_heartbeat_time,
                current_rollout_id=rollout_id,
                current_attempt_id=attempt_id,
                heartbeat_stats=codec.from_json(stats),
            )
        )
    return workers


def issue_worker_key(tx: Transaction, worker_id: str) -> str:
    """The key of one worker."""
    touch_worker(tx, worker_id)
    return keys.sign_worker(tx.secret, worker_id)


def find_worker(tx: Transaction, worker_id: str) -> Credential:
    """The credential of a worker's key: the attempt that it holds, which is the active one, or else
    an unresponsive one that it can still revive. ConflictError if it holds none, or several."""
    held = (
        tx.connection.execute(
            "SELECT rollout_id, attempt_id FROM attempts WHERE status IN ('preparing', 'running') "
            "AND worker_id = ?",
            (worker_id,),
        ).fetchall()
        or tx.connection.execute(
            "SELECT a.rollout_id, a.attempt_id FROM rollouts r JOIN attempts a ON a.rollout_id = "
            "r.rollout_id AND a.sequence_id = r.attempts WHERE r.status IN ('queuing', "
            "'requeuing') AND a.status = 'unresponsive' AND a.worker_id = ?",
            (worker_id,),
        ).fetchall()
    )
    if len(held) == 1:
        rollout_id, attempt_id = held[0]
        return Credential(
            name=f"worker {worker_id}", worker_id=worker_id, attempt=(rollout_id, attempt_id)
        )
    hint = (
        "a worker whose key is used leases one rollout at a time"
        if held
        else "call during a rollout only"
    )
    raise ConflictError(
        f"the key is for the attempt of worker {worker_id}, which holds {len(held) or 'none'} at "
        f"present; {hint}"
    )
