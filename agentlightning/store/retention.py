"""What keeps a store healthy over months: removing what is old, bringing in what was exported, finding what is wrong.

This module knows rows; when something is old, and who may remove it, is decided elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from agentlightning.errors import InvalidError
from agentlightning.semconv import REWARD
from agentlightning.store import calls, codec, fields, filters, lifecycle
from agentlightning.store.database import Connection
from agentlightning.store.queries import in_project
from agentlightning.store.rollouts import TERMINAL_STATUSES, insert_rollout, rollout_row
from agentlightning.store.spans import add_spans
from agentlightning.store.transaction import Transaction
from agentlightning.types import UNATTRIBUTED, Deleted

_AT_ONCE: Final = 200  # rollouts in one transaction, so that nobody waits long


# --- removing ----------------------------------------------------------------------------------------------------


def delete_rollouts(tx: Transaction, call: calls.DeleteRollouts) -> tuple[Deleted, bool]:
    """Remove some of the rollouts that match; True if there may be more."""
    matching = filters.where(in_project(call.where, call.project), fields.ROLLOUTS, tx.connection.dialect)
    terminal = "" if call.unfinished else f" AND rollouts.status IN {TERMINAL_STATUSES}"
    untrimmed = " AND rollouts.trimmed = 0" if call.keep_rewards else ""
    rows = tx.connection.execute(
        f"SELECT rollouts.rollout_id, rollouts.group_id FROM rollouts WHERE {matching.text}{terminal}{untrimmed} "
        f"ORDER BY rollouts.number LIMIT ?{tx.connection.for_update}",
        (*matching.parameters, _AT_ONCE),
    ).fetchall()
    deleted = Deleted()
    for rollout_id, group_id in rows:
        if call.keep_rewards:
            removed = _trim(tx.connection, rollout_id)
        else:
            removed = _remove(tx.connection, rollout_id, group_id)
        tx.changes.touched.append(rollout_id)
        deleted = summed(deleted, removed)
    return deleted, len(rows) == _AT_ONCE


def summed(one: Deleted, other: Deleted) -> Deleted:
    return Deleted(
        rollouts=one.rollouts + other.rollouts,
        rollouts_trimmed=one.rollouts_trimmed + other.rollouts_trimmed,
        attempts=one.attempts + other.attempts,
        spans=one.spans + other.spans,
    )


_SPANS_OF: Final = "attempt IN (SELECT number FROM attempts WHERE rollout_id = ?)"


def _remove(connection: Connection, rollout_id: str, group_id: str | None) -> Deleted:
    spans = connection.execute(f"DELETE FROM spans WHERE {_SPANS_OF}", (rollout_id,)).rowcount
    attempts = connection.execute("DELETE FROM attempts WHERE rollout_id = ?", (rollout_id,)).rowcount
    connection.execute("DELETE FROM rollouts WHERE rollout_id = ?", (rollout_id,))
    if group_id is not None:
        connection.execute(
            "DELETE FROM rollout_groups WHERE group_id = ? AND NOT EXISTS "
            "(SELECT 1 FROM rollouts WHERE rollouts.group_id = rollout_groups.group_id)",
            (group_id,),
        )
    return Deleted(rollouts=1, attempts=attempts, spans=spans)


def _trim(connection: Connection, rollout_id: str) -> Deleted:
    find = fields.FIND[connection.dialect]
    spans = connection.execute(
        f"DELETE FROM spans WHERE {_SPANS_OF} AND name <> ? AND {find}(attributes, ?) = 0",
        (rollout_id, REWARD, f'"{REWARD}.'),
    ).rowcount
    connection.execute("UPDATE rollouts SET input = 'null', trimmed = 1 WHERE rollout_id = ?", (rollout_id,))
    return Deleted(rollouts_trimmed=1, spans=spans)


# --- bringing in -------------------------------------------------------------------------------------------------


def import_rollout(tx: Transaction, call: calls.ImportRollout) -> bool:
    """Store a terminal rollout as it was elsewhere, with its attempts and spans; False if it is stored already."""
    rollout = call.rollout
    if rollout.status not in lifecycle.TERMINAL:
        raise InvalidError(f"rollout {rollout.rollout_id} is {rollout.status}; only finished rollouts can be imported")
    codec.check_id(rollout.rollout_id, "rollout_id")
    if rollout_row(tx.connection, rollout.rollout_id) is not None:
        return False
    insert_rollout(tx, rollout, len(call.attempts))
    for attempt in call.attempts:
        codec.check_id(attempt.attempt_id, "attempt_id")
        if attempt.rollout_id != rollout.rollout_id or attempt.status in lifecycle.ACTIVE:
            raise InvalidError(f"attempt {attempt.attempt_id} is not a finished attempt of {rollout.rollout_id}")
        tx.connection.execute(
            "INSERT INTO attempts (rollout_id, attempt_id, sequence_id, start_time, end_time, status, worker_id, "
            "last_heartbeat_time, metadata, last_activity, lease_expires, check_time, span_sequence) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0)",
            (
                attempt.rollout_id,
                attempt.attempt_id,
                attempt.sequence_id,
                attempt.start_time,
                attempt.end_time,
                attempt.status,
                attempt.worker_id,
                attempt.last_heartbeat_time,
                codec.to_json(attempt.metadata, "the metadata of the attempt"),
                *[attempt.start_time] * 3,
            ),
        )
    add_spans(tx, call.spans, [codec.span_columns(span) for span in call.spans])
    tx.changes.finished.append(rollout.rollout_id)
    return True


# --- what is wrong -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Rule:
    """`query` selects the id of everything that breaks the rule."""

    broken: str
    query: str


_RULES: Final[Sequence[_Rule]] = (
    _Rule(
        "attempts of a rollout that is not stored",
        "SELECT attempt_id FROM attempts a WHERE NOT EXISTS "
        "(SELECT 1 FROM rollouts r WHERE r.rollout_id = a.rollout_id)",
    ),
    _Rule(
        "spans of an attempt that is not stored",
        "SELECT span_id FROM spans s WHERE NOT EXISTS (SELECT 1 FROM attempts a WHERE a.number = s.attempt)",
    ),
    _Rule(
        "rollouts that do not have as many attempts as they count",
        "SELECT rollout_id FROM rollouts r WHERE attempts <> "
        "(SELECT count(*) FROM attempts a WHERE a.rollout_id = r.rollout_id)",
    ),
    _Rule(
        "finished rollouts without an end time or a number, or others with one",
        f"SELECT rollout_id FROM rollouts WHERE rollout_id <> '{UNATTRIBUTED}' AND "
        f"((status IN {TERMINAL_STATUSES}) <> (end_time IS NOT NULL) OR "
        f"(status IN {TERMINAL_STATUSES}) <> (finished_index IS NOT NULL))",
    ),
    _Rule(
        "rollouts at work without an attempt at work",
        "SELECT rollout_id FROM rollouts r WHERE status IN ('preparing', 'running') AND NOT EXISTS "
        "(SELECT 1 FROM attempts a WHERE a.rollout_id = r.rollout_id AND a.sequence_id = r.attempts "
        "AND a.status IN ('preparing', 'running'))",
    ),
    _Rule(
        "finished rollouts with an attempt still at work as their latest",
        f"SELECT r.rollout_id FROM rollouts r JOIN attempts a ON a.rollout_id = r.rollout_id "
        f"AND a.sequence_id = r.attempts WHERE r.status IN {TERMINAL_STATUSES} "
        "AND a.status IN ('preparing', 'running')",
    ),
    _Rule(
        "complete groups without a number",
        "SELECT group_id FROM rollout_groups g WHERE finished_index IS NULL AND size = "
        f"(SELECT count(*) FROM rollouts r WHERE r.group_id = g.group_id AND r.status IN {TERMINAL_STATUSES})",
    ),
    _Rule(
        "spans whose logprobs are not as long as their token ids",
        "SELECT span_id FROM spans WHERE logprobs IS NOT NULL AND length(logprobs) NOT IN (0, length(token_ids))",
    ),
)


def check(tx: Transaction, call: calls.CheckStore) -> list[str]:
    """Everything that is wrong, in words."""
    found: list[str] = []
    if tx.connection.dialect == "sqlite":
        problems = [row[0] for row in tx.connection.execute("PRAGMA integrity_check(20)")]
        found += [f"the file is damaged: {problem}" for problem in problems if problem != "ok"]
    for rule in _RULES:
        broken: list[Any] = [row[0] for row in tx.connection.execute(f"{rule.query} LIMIT 1000").fetchall()]
        if broken:
            named = ", ".join(map(str, broken[:5])) + (", …" if len(broken) > 5 else "")
            count = "1000 or more" if len(broken) == 1000 else str(len(broken))
            found.append(f"{count} {rule.broken}: {named}")
    return found
