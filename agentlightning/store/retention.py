"""Maintenance of a store: deletes, imports and checks.

This module knows rows. Others decide what is old and who may delete it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec.structs import replace

from agentlightning.errors import InvalidError
from agentlightning.semconv import CALL_FLAG
from agentlightning.store import codec, lifecycle, query
from agentlightning.store.attempts import cancel_rollout, insert_attempt
from agentlightning.store.database import Connection, Transaction
from agentlightning.store.prompts import SpanRow
from agentlightning.store.query import Query
from agentlightning.store.redaction import Redact, metadata_without_secrets
from agentlightning.store.rollouts import ACTIVE, TERMINAL, find_rollout, insert_rollout, recall
from agentlightning.store.spans import add_spans
from agentlightning.types import UNATTRIBUTED, And, Attempt, Condition, Deleted, Filter, Rollout

_AT_ONCE: Final = 200  # rollouts in one transaction, so that nobody waits long
_SECONDS_AT_ONCE: Final = 0.2


def ended_before(time: float) -> Filter:
    """Rollouts that ended before a time of the store's clock, `get_time`, with all of their group,
    since an incomplete group may be awaited. Spans without an attempt have no age: more may be
    added at any time."""
    return And(
        [
            # the next condition says so too, and takes longer to find out
            Condition("end_time", "lt", time),
            Condition("group_end_time", "lt", time),
            Condition("rollout_id", "ne", UNATTRIBUTED),
        ]
    )


def find(tx: Transaction, where: Filter, unfinished: bool, after: int) -> list[int]:
    """The row numbers of the first rollouts to delete after a row number. Sources of forks that
    somebody waits for stay, unless `unfinished` ones are deleted too."""
    stay = "" if unfinished else f" AND NOT EXISTS ({_AWAITED})"
    return [row[0] for row in _matching(tx, where, unfinished, f"number > {after}{stay}")]


def cancel_active(tx: Transaction, where: Filter, numbers: Sequence[int]) -> list[int]:
    """Cancel the unfinished ones of these rollouts, in a transaction of its own, so that workers
    and waiting callers notice and groups complete. Returns those that still match."""
    matching = _matching(tx, where, True, f"number IN ({', '.join(map(str, numbers))})")
    for _, rollout_id, status, _ in matching:
        if status not in lifecycle.TERMINAL:
            cancel_rollout(tx, rollout_id)
    return [row[0] for row in matching]


def delete_some(
    tx: Transaction, where: Filter, numbers: Sequence[int]
) -> tuple[Deleted, Sequence[int]]:
    """Delete those of these rollouts that match and have ended, each after its forks, for a short
    time; returns the rest."""
    matching = _matching(tx, where, False, f"number IN ({', '.join(map(str, numbers))})")
    give_up = time.monotonic() + _SECONDS_AT_ONCE
    deleted = Deleted()
    for done, (_, rollout_id, _, group_id) in enumerate(matching):
        for fork_id, group in [*_forks(tx, rollout_id), (rollout_id, group_id)]:
            if time.monotonic() > give_up and deleted.rollouts:
                return deleted, [row[0] for row in matching[done:]]
            deleted = summed(deleted, _remove(tx.connection, fork_id, group))
            tx.changes.removed.append(fork_id)
            tx.changes.touched.append(fork_id)
    return deleted, ()


# forks of a rollout in a group that somebody waits for
_AWAITED: Final = (
    "SELECT 1 FROM rollouts f JOIN rollout_groups g ON f.group_id = g.group_id WHERE "
    "f.source_id = rollouts.rollout_id AND g.finished_index IS NULL"
)


def _forks(tx: Transaction, rollout_id: str) -> list[tuple[str, str | None]]:
    """Id and group of the forks of a rollout, after their own forks; unfinished ones are
    cancelled."""
    found: list[tuple[str, str | None]] = []
    rows = tx.connection.execute(
        "SELECT rollout_id, group_id, status FROM rollouts WHERE source_id = ?", (rollout_id,)
    ).fetchall()
    for fork_id, group_id, status in rows:
        if status not in lifecycle.TERMINAL:
            cancel_rollout(tx, fork_id)
        found += [*_forks(tx, fork_id), (fork_id, group_id)]
    return found


def _matching(tx: Transaction, where: Filter, unfinished: bool, condition: str) -> list[Any]:
    """Row number, id, status and group of the first rollouts that match and may be deleted."""
    if not unfinished:
        condition += f" AND status IN {TERMINAL}"
    matching = Query(where, query.ROLLOUTS, tx.connection)
    rest = f" AND {condition} ORDER BY number"
    return list(matching.rows("number, rollout_id, status, group_id", rest, most=_AT_ONCE))


def summed(first: Deleted, second: Deleted) -> Deleted:
    return Deleted(
        rollouts=first.rollouts + second.rollouts,
        attempts=first.attempts + second.attempts,
        spans=first.spans + second.spans,
    )


def _remove(connection: Connection, rollout_id: str, group_id: str | None) -> Deleted:
    spans = connection.execute(
        "DELETE FROM spans WHERE attempt IN (SELECT number FROM attempts WHERE rollout_id = ?)",
        (rollout_id,),
    ).rowcount
    attempts = connection.execute(
        "DELETE FROM attempts WHERE rollout_id = ?", (rollout_id,)
    ).rowcount
    rollouts = connection.execute(
        "DELETE FROM rollouts WHERE rollout_id = ?", (rollout_id,)
    ).rowcount
    if group_id is not None:
        connection.execute(
            "DELETE FROM rollout_groups WHERE group_id = ? AND NOT EXISTS "
            "(SELECT 1 FROM rollouts WHERE rollouts.group_id = rollout_groups.group_id)",
            (group_id,),
        )
    return Deleted(rollouts=rollouts, attempts=attempts, spans=spans)


def import_rollout(
    tx: Transaction,
    redact: Redact,
    rollout: Rollout,
    attempts: Sequence[Attempt],
    rows: Sequence[SpanRow],
) -> bool:
    """Store another store's finished rollout with its attempts, whose reasons `redact` cleans, and
    spans. False if it is stored already. The database refuses an attempt, or an index in a group,
    that belongs to another rollout."""
    attempts = sorted(attempts, key=lambda attempt: attempt.sequence_id)
    _check_whole(rollout, attempts, rows)
    if rollout.rollout_id == UNATTRIBUTED:
        add_spans(tx, rows)  # beside those of this store's own
        return True
    if find_rollout(tx.connection, rollout.rollout_id) is not None:
        return False
    rollout = replace(rollout, reward=None, error=None)  # its attempts and spans say them
    insert_rollout(tx.connection, rollout, len(attempts))
    for attempt in attempts:
        ids = attempt.rollout_id, attempt.attempt_id
        metadata = metadata_without_secrets(redact, ids, attempt.status, attempt.metadata)
        attempt = replace(attempt, metadata=metadata)
        insert_attempt(tx.connection, attempt, attempt.start_time, attempt.start_time)
    add_spans(tx, rows)
    recall(tx.connection, rollout.rollout_id)
    tx.changes.touched.append(rollout.rollout_id)
    tx.changes.finished.append(rollout.rollout_id)
    if rollout.group_id is not None:
        tx.changes.groups.append(rollout.group_id)
    return True


def _check_whole(rollout: Rollout, attempts: Sequence[Attempt], rows: Sequence[SpanRow]) -> None:
    """InvalidError unless these are a finished rollout, its finished attempts and their spans."""
    if rollout.status not in lifecycle.TERMINAL or rollout.end_time is None:
        raise InvalidError(
            f"rollout {rollout.rollout_id} is {rollout.status}; only finished rollouts can be "
            "imported"
        )
    for name in ("rollout_id", "run_id", "group_id", "resources_id"):
        value = getattr(rollout, name)
        if value is not None:
            codec.check_id(value, name)
    if (rollout.group_id is None) != (rollout.group_index is None):
        raise InvalidError(
            f"rollout {rollout.rollout_id} needs both a group_id and a group_index, or neither"
        )
    times = [rollout.start_time, rollout.end_time]
    for position, attempt in enumerate(attempts, start=1):
        codec.check_id(attempt.attempt_id, "attempt_id")
        if attempt.rollout_id != rollout.rollout_id or attempt.status in lifecycle.ACTIVE:
            raise InvalidError(
                f"attempt {attempt.attempt_id} is not a finished attempt of {rollout.rollout_id}"
            )
        if attempt.sequence_id != position:
            raise InvalidError(
                f"attempt {position} of {rollout.rollout_id} is missing; import all of them"
            )
        times += [
            attempt.start_time,
            attempt.end_time or 0.0,
            attempt.last_heartbeat_time or 0.0,
            attempt.held_seconds,
        ]
    if not all(map(math.isfinite, times)):
        raise InvalidError(f"a time of rollout {rollout.rollout_id} is not a finite number")
    names = {attempt.attempt_id for attempt in attempts}
    for row in rows:
        if row.rollout_id != rollout.rollout_id or row.attempt_id not in names:
            span_id = "" if row.columns is None else row.columns.span_id
            raise InvalidError(
                f"span {span_id} is not of an attempt of rollout {rollout.rollout_id}"
            )


_RULES: Final[Mapping[str, str]] = {
    "attempts of a rollout that is not stored": (
        "SELECT attempt_id FROM attempts a WHERE NOT EXISTS "
        "(SELECT 1 FROM rollouts r WHERE r.rollout_id = a.rollout_id)"
    ),
    "spans of an attempt that is not stored": (
        "SELECT span_id FROM spans s WHERE NOT EXISTS (SELECT 1 FROM attempts a WHERE a.number = "
        "s.attempt)"
    ),
    "calls that go on from one that is not stored": (
        "SELECT span_id FROM spans s WHERE base IS NOT NULL AND NOT EXISTS "
        "(SELECT 1 FROM spans b WHERE b.attempt = s.attempt AND b.span_id = s.base)"
    ),
    "rollouts that do not have as many attempts as they count": (
        "SELECT rollout_id FROM rollouts r WHERE attempts <> "
        "(SELECT count(*) FROM attempts a WHERE a.rollout_id = r.rollout_id)"
    ),
    "finished rollouts without an end time or a number, or others with one": (
        f"SELECT rollout_id FROM rollouts WHERE rollout_id <> '{UNATTRIBUTED}' AND "
        f"((status IN {TERMINAL}) <> (end_time IS NOT NULL) OR "
        f"(status IN {TERMINAL}) <> (finished_index IS NOT NULL))"
    ),
    "rollouts at work without an attempt at work": (
        f"SELECT rollout_id FROM rollouts r WHERE status IN {ACTIVE} AND NOT EXISTS (SELECT 1 "
        "FROM attempts a WHERE a.rollout_id = r.rollout_id AND a.sequence_id = r.attempts AND "
        f"a.status IN {ACTIVE})"
    ),
    "finished rollouts with an attempt still at work as their latest": (
        f"SELECT r.rollout_id FROM rollouts r JOIN attempts a ON a.rollout_id = r.rollout_id "
        f"AND a.sequence_id = r.attempts WHERE r.status IN {TERMINAL} "
        f"AND a.status IN {ACTIVE}"
    ),
    "complete groups without a number": (
        "SELECT group_id FROM rollout_groups g WHERE finished_index IS NULL AND size = (SELECT "
        f"count(*) FROM rollouts r WHERE r.group_id = g.group_id AND r.status IN {TERMINAL})"
    ),
    "spans that may be trained and whose logprobs are not as long as their token ids": (
        "SELECT span_id FROM spans WHERE logprobs IS NOT NULL AND length(logprobs) NOT IN (0, "
        f"length(token_ids)) AND replace(attributes, '\"{CALL_FLAG}\"', '') = attributes"
    ),
}
"""What is wrong, and a query for the id of everything that is."""


def check_store(tx: Transaction) -> list[str]:
    """A sentence for each problem."""
    found: list[str] = []
    if tx.connection.dialect == "sqlite":
        problems = [row[0] for row in tx.connection.execute("PRAGMA integrity_check(20)")]
        found += [f"the file is damaged: {problem}" for problem in problems if problem != "ok"]
    for wrong, query_of_it in _RULES.items():
        try:
            broken: list[Any] = [
                row[0] for row in tx.connection.execute(f"{query_of_it} LIMIT 1000").fetchall()
            ]
        except Exception as error:
            if tx.connection.dialect != "sqlite" or tx.connection.trouble(error) is None:
                raise
            found.append(f"{wrong} cannot be looked for: {error}")
            continue
        if broken:
            named = ", ".join(map(str, broken[:5])) + (", …" if len(broken) > 5 else "")
            count = "1000 or more" if len(broken) == 1000 else str(len(broken))
            found.append(f"{count} {wrong}: {named}")
    return found
