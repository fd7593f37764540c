"""Rollouts, with the reward and the error of their latest attempt, and their groups as rows.

Functions that write take a `Transaction` and note in `changes` what callers may be waiting for.
This module does not know threads, event loops or HTTP."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from agentlightning.errors import ConflictError, InvalidError, NotFoundError
from agentlightning.semconv import REWARD_FINAL, REWARD_RETURNED, reward_value
from agentlightning.store import codec, lifecycle
from agentlightning.store.database import FIND, Changes, Connection, Transaction, take_rows
from agentlightning.store.sources import with_source
from agentlightning.store.tables import ROLLOUTS
from agentlightning.types import (
    UNATTRIBUTED,
    EnqueueRolloutRequest,
    FinishedRollouts,
    Group,
    Rollout,
    RolloutStatus,
)

_RETURNED: Final = 1e11
"""Seconds by which a reward that was returned comes after every other reward, as `tracing.rewards`
has it."""
MOST_BYTES: Final = 16 * 1024 * 1024  # of one page, after the row that exceeds it


def _listed(statuses: Iterable[str]) -> str:
    return f"({', '.join(map(repr, sorted(statuses)))})"


TERMINAL: Final = _listed(lifecycle.TERMINAL)
QUEUED: Final = _listed(lifecycle.QUEUED)
ACTIVE: Final = _listed(lifecycle.ACTIVE)
"""The statuses of the lifecycle as SQL has them: `('preparing', 'running')`."""


def set_status(tx: Transaction, rollout_id: str, status: RolloutStatus) -> None:
    end_time = tx.now if status in lifecycle.TERMINAL else None
    (group_id,) = tx.connection.execute(
        "UPDATE rollouts SET status = ?, end_time = ? WHERE rollout_id = ? RETURNING group_id",
        (status, end_time, rollout_id),
    ).fetchone()
    tx.changes.touched.append(rollout_id)
    if status in lifecycle.QUEUED:
        tx.changes.queued += 1
    if status in lifecycle.TERMINAL:
        tx.changes.finished.append(rollout_id)
        if group_id is not None:
            tx.changes.groups.append(group_id)


def number_finished(connection: Connection, changes: Changes) -> None:
    """Number the rollouts and groups that this transaction finished, as its last step.

    There is one writing connection, so numbers become visible in order, and none appears before a
    cursor."""
    if not changes.finished:
        return
    finished = list(dict.fromkeys(changes.finished))
    (last,) = connection.execute(
        "UPDATE counters SET value = value + ? WHERE name = 'finished' RETURNING value",
        (len(finished),),
    ).fetchone()
    for index, rollout_id in enumerate(finished, last - len(finished) + 1):
        # Unless it was deleted since, and another rollout was given its id.
        connection.execute(
            f"UPDATE rollouts SET finished_index = ? WHERE rollout_id = ? AND status IN {TERMINAL}",
            (index, rollout_id),
        )
    for group_id in dict.fromkeys(changes.groups):
        _complete_group(connection, group_id, changes)


def _complete_group(connection: Connection, group_id: str, changes: Changes) -> None:
    """Number the group if all its rollouts have ended."""
    row = connection.execute(
        "SELECT g.run_id FROM rollout_groups g WHERE g.group_id = ? AND g.finished_index IS NULL "
        "AND g.size = (SELECT count(*) FROM rollouts r WHERE r.group_id = g.group_id AND "
        f"r.status IN {TERMINAL})",
        (group_id,),
    ).fetchone()
    if row is None:
        return
    # Counted, as groups are removed: a cursor may be past the number of any that is left.
    (index,) = connection.execute(
        "INSERT INTO counters (name, value) VALUES (?, 1) "
        "ON CONFLICT (name) DO UPDATE SET value = counters.value + 1 RETURNING value",
        (f"groups of {row[0]}",),
    ).fetchone()
    connection.execute(
        "UPDATE rollout_groups SET finished_index = ? WHERE group_id = ?", (index, group_id)
    )
    changes.runs_with_groups.append(row[0])


def finished_after(
    tx: Transaction, cursor: int, limit: int, run_id: str | None
) -> FinishedRollouts:
    """Rollouts finished after a cursor, oldest first."""
    check_page(limit, 0)
    if cursor < 0:
        raise InvalidError(f"cursor is {cursor}; the first is 0, and each answer names the next")
    (last,) = tx.connection.execute("SELECT value FROM counters WHERE name = 'finished'").fetchone()
    of_run, values = ("", ()) if run_id is None else ("AND run_id = ? ", (run_id,))
    found = tx.connection.stream(
        f"SELECT {ROLLOUTS.columns}, finished_index FROM rollouts WHERE finished_index > ? AND "
        f"finished_index <= ? {of_run}ORDER BY finished_index LIMIT ?",
        (cursor, last, *values, limit),
    )
    rows, whole = take_rows(found, MOST_BYTES)
    if whole and len(rows) < limit:
        cursor = max(cursor, last)
    elif rows:
        cursor = rows[-1][-1]
    return FinishedRollouts(rollouts=tuple(map(ROLLOUTS.noun, rows)), cursor=cursor)


def enqueue_many_rollouts(
    tx: Transaction, requests: Sequence[EnqueueRolloutRequest]
) -> list[Rollout]:
    """Queue rollouts, all or none."""
    return [create_rollout(tx, request) for request in requests]


def create_rollout(
    tx: Transaction, request: EnqueueRolloutRequest, *, queued: bool = True
) -> Rollout:
    """Queue a rollout, or return the stored rollout with this id and input."""
    if request.rollout_id is not None:
        codec.check_id(request.rollout_id, "rollout_id")
        if request.rollout_id == UNATTRIBUTED:
            raise InvalidError(
                f"rollout_id {UNATTRIBUTED!r} is reserved for unattributed spans; use another"
            )
        stored = find_rollout(tx.connection, request.rollout_id)
        if stored is not None:
            if not codec.same(stored.input, request.input, "the input of the rollout"):
                raise ConflictError(
                    f"rollout {request.rollout_id} is stored already, with another input"
                )
            return stored
    run_id = _run_of(tx, request)
    rollout_id = request.rollout_id or codec.new_id("ro")
    if request.source is not None:
        request = with_source(tx.connection, request, rollout_id, run_id)
    rollout = Rollout(
        rollout_id=rollout_id,
        input=request.input,
        start_time=tx.now,
        priority=request.priority,
        mode=request.mode,
        resources_id=request.resources_id,
        run_id=run_id,
        group_id=request.group_id,
        group_index=request.group_index,
        config=request.config,
        metadata=request.metadata,
        source=request.source,
    )
    if request.resources_id is not None:
        require(tx.connection, "resources", "resources_id", request.resources_id)
    insert_rollout(tx.connection, rollout, attempts=0)
    if queued:
        tx.changes.queued += 1
    return rollout


def insert_rollout(connection: Connection, rollout: Rollout, attempts: int) -> None:
    source_id = rollout.source and rollout.source.rollout_id
    ROLLOUTS.insert(connection, rollout, attempts=attempts, source_id=source_id)


def _run_of(tx: Transaction, request: EnqueueRolloutRequest) -> str | None:
    """The run of a requested rollout, or that of its group."""
    if request.group_id is None:
        if request.group_index is not None:
            raise InvalidError(
                f"group_index is {request.group_index} but there is no group_id; give both or "
                "neither"
            )
        return request.run_id
    group = tx.connection.execute(_GROUP + "WHERE group_id = ?", (request.group_id,)).fetchone()
    if group is None:
        raise NotFoundError(
            f"there is no group {request.group_id!r}; create it with create_group first"
        )
    run_id = group[1] or None
    size = group[2]
    if request.group_index is None or not 0 <= request.group_index < size:
        raise InvalidError(
            f"group_index is {request.group_index}; group {request.group_id} of {size} takes 0 to "
            f"{size - 1}"
        )
    if request.run_id not in (None, run_id):
        raise InvalidError(
            f"group {request.group_id} belongs to run {run_id}, not to {request.run_id}"
        )
    taken = tx.connection.execute(
        "SELECT rollout_id FROM rollouts WHERE group_id = ? AND group_index = ?",
        (request.group_id, request.group_index),
    ).fetchone()
    if taken is not None:
        raise ConflictError(
            f"index {request.group_index} of group {request.group_id} is taken by rollout "
            f"{taken[0]}"
        )
    return run_id


def require(connection: Connection, table: str, column: str, value: str) -> None:
    if connection.execute(f"SELECT 1 FROM {table} WHERE {column} = ?", (value,)).fetchone() is None:
        raise NotFoundError(f"there is no {column} {value!r} in the store")


def find_rollout(connection: Connection, rollout_id: str) -> Rollout | None:
    return ROLLOUTS.one(connection, "WHERE rollout_id = ?", rollout_id)


def get_rollout_by_id(tx: Transaction, rollout_id: str) -> Rollout | None:
    return find_rollout(tx.connection, rollout_id)


def require_rollout(connection: Connection, rollout_id: str) -> Rollout:
    """The rollout, or NotFoundError."""
    rollout = find_rollout(connection, rollout_id)
    if rollout is None:
        raise NotFoundError(f"there is no rollout {rollout_id!r}")
    return rollout


def terminal_among(tx: Transaction, rollout_ids: Iterable[str]) -> list[Rollout]:
    """Those that have ended, in the order given. NotFoundError for an unknown id."""
    rollouts = [require_rollout(tx.connection, rollout_id) for rollout_id in rollout_ids]
    return [rollout for rollout in rollouts if rollout.status in lifecycle.TERMINAL]


def check_page(limit: int | None, offset: int) -> None:
    if offset < 0 or (limit is not None and limit < 0):
        raise InvalidError(f"limit is {limit} and offset {offset}; neither may be negative")


def create_group(
    tx: Transaction, size: int, run_id: str | None, group_id: str | None, source_id: str | None
) -> Group:
    """Create a group. A stored group must have the same size, run and source."""
    if size < 1:
        raise InvalidError(f"the size of a group is {size}; it must be at least 1")
    if run_id is not None:
        require(tx.connection, "runs", "run_id", run_id)
    if source_id is not None:
        require(tx.connection, "rollout_groups", "group_id", source_id)
    name = codec.new_id("gr") if group_id is None else codec.check_id(group_id, "group_id")
    stored = get_group(tx, name)
    if stored is not None:
        if (stored.size, stored.run_id, stored.source_id) != (size, run_id, source_id):
            forks = f", of forks of {stored.source_id}" if stored.source_id else ""
            raise ConflictError(
                f"group {name} is stored already, with size {stored.size} in run "
                f"{stored.run_id}{forks}"
            )
        return stored
    tx.connection.execute(
        "INSERT INTO rollout_groups (group_id, run_id, size, finished_index, source_id) "
        "VALUES (?, ?, ?, NULL, ?)",
        (name, run_id or "", size, source_id),
    )
    return Group(group_id=name, run_id=run_id, size=size, source_id=source_id)


_GROUP: Final = "SELECT group_id, run_id, size, finished_index, source_id FROM rollout_groups "


def get_group(tx: Transaction, group_id: str) -> Group | None:
    row = tx.connection.execute(_GROUP + "WHERE group_id = ?", (group_id,)).fetchone()
    return None if row is None else _group(tx.connection, row)


def complete_groups_after(tx: Transaction, run_id: str, cursor: int, limit: int) -> list[Group]:
    """Complete groups of a run numbered above `cursor`, in the order they became complete."""
    check_page(limit, 0)
    require(tx.connection, "runs", "run_id", run_id)
    rows = tx.connection.execute(
        _GROUP + "WHERE run_id = ? AND finished_index > ? ORDER BY finished_index LIMIT ?",
        (run_id, cursor, limit),
    ).fetchall()
    return [_group(tx.connection, row) for row in rows]


def _group(connection: Connection, row: Sequence[Any]) -> Group:
    members = connection.execute(
        "SELECT rollout_id FROM rollouts WHERE group_id = ? ORDER BY group_index", (row[0],)
    )
    return Group(
        group_id=row[0],
        run_id=row[1] or None,
        size=row[2],
        rollout_ids=tuple(member[0] for member in members),
        finished_index=row[3],
        source_id=row[4],
    )


class FinalReward(NamedTuple):
    """A final reward of an attempt, of which the last one counts, and what was returned before
    all."""

    value: float
    time: float
    returned: bool


def final_reward(attributes: Mapping[str, Any], start_time: float) -> FinalReward | None:
    """The final reward in a span, if it has one."""
    value = attributes.get(reward_value(0))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if attributes.get(REWARD_FINAL, True) is False:
        return None
    return FinalReward(float(value), start_time, attributes.get(REWARD_RETURNED) is True)


def note_reward(
    connection: Connection,
    rollout_id: str,
    sequence_id: int,
    reward: FinalReward | None,
    now: float = math.inf,
) -> None:
    """Note a final reward in a span of this attempt, which arrives `now`: an agent whose clock is
    ahead gave it no later than that."""
    if reward is not None:
        order = min(reward.time, now) + _RETURNED * reward.returned
        connection.execute(
            "UPDATE rollouts SET reward = ?, reward_order = ? WHERE rollout_id = ? AND attempts = "
            "? AND (reward_order IS NULL OR reward_order <= ?)",
            (reward.value, order, rollout_id, sequence_id, order),
        )


def note_error(connection: Connection, rollout_id: str, sequence_id: int, error: object) -> None:
    """Note why this attempt ended, if that is a text."""
    if isinstance(error, str):
        connection.execute(
            "UPDATE rollouts SET error = ? WHERE rollout_id = ? AND attempts = ?",
            (codec.text(error), rollout_id, sequence_id),
        )


def recall(connection: Connection, rollout_id: str) -> None:
    """Note reward and error again, from what is stored of the attempt that has become the latest
    again."""
    row = connection.execute(
        "SELECT a.number, a.sequence_id, a.status, a.metadata FROM attempts a JOIN rollouts r "
        "ON r.rollout_id = a.rollout_id AND r.attempts = a.sequence_id WHERE r.rollout_id = ?",
        (rollout_id,),
    ).fetchone()
    if row is None:
        return
    number, sequence_id, status, metadata = row
    reason = codec.from_json(metadata).get("reason")
    if reason or status in ("timeout", "unresponsive"):
        note_error(connection, rollout_id, sequence_id, reason or status)
    spans = connection.execute(
        "SELECT attributes, start_time FROM spans WHERE attempt = ? "
        f"AND {FIND[connection.dialect]}(attributes, ?) > 0 ORDER BY sequence_id",
        (number, f'"{reward_value(0)}"'),
    ).fetchall()
    for attributes, start_time in spans:
        note_reward(
            connection,
            rollout_id,
            sequence_id,
            final_reward(codec.from_json(attributes), start_time),
        )
