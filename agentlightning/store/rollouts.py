"""Rollouts and their groups as rows.

A function that writes takes a `Transaction` and leaves in its `changes` what somebody may be waiting for. This module
does not know threads, event loops or HTTP.
"""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from agentlightning.errors import ConflictError, InvalidError, NotFoundError
from agentlightning.store import codec, lifecycle
from agentlightning.store.transaction import Transaction
from agentlightning.types import (
    EnqueueRolloutRequest,
    Group,
    Rollout,
    RolloutConfig,
    RolloutStatus,
)

ROLLOUT_COLUMNS: Final = (
    "rollout_id, input, start_time, end_time, status, mode, resources_id, run_id, group_id, group_index, "
    "config, metadata"
)
_TERMINAL: Final = "('succeeded', 'failed', 'cancelled')"


# --- rows and nouns ----------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def config_from_json(text: str) -> RolloutConfig:
    return msgspec.json.decode(text, type=RolloutConfig)


def rollout_from_row(row: Sequence[Any]) -> Rollout:
    return Rollout(
        rollout_id=row[0],
        input=codec.from_json(row[1]),
        start_time=row[2],
        end_time=row[3],
        status=row[4],
        mode=row[5],
        resources_id=row[6],
        run_id=row[7],
        group_id=row[8],
        group_index=row[9],
        config=config_from_json(row[10]),
        metadata=codec.from_json(row[11]),
    )


def set_status(tx: Transaction, rollout_id: str, status: RolloutStatus) -> None:
    end_time = tx.now if status in lifecycle.TERMINAL else None
    row = tx.connection.execute(
        "UPDATE rollouts SET status = ?, end_time = ? WHERE rollout_id = ? RETURNING group_id",
        (status, end_time, rollout_id),
    ).fetchone()
    tx.changes.touched.append(rollout_id)
    if status in lifecycle.QUEUED:
        tx.changes.queued = True
    if status in lifecycle.TERMINAL:
        tx.changes.finished.append(rollout_id)
        if row[0] is not None:
            _complete_group(tx, row[0])


def _complete_group(tx: Transaction, group_id: str) -> None:
    """Number the group if all its rollouts are terminal now."""
    row = tx.connection.execute(
        "SELECT g.run_id FROM rollout_groups g WHERE g.group_id = ? AND g.finished_index IS NULL AND g.size = "
        f"(SELECT count(*) FROM rollouts r WHERE r.group_id = g.group_id AND r.status IN {_TERMINAL})",
        (group_id,),
    ).fetchone()
    if row is None:
        return
    tx.connection.execute(
        "UPDATE rollout_groups SET finished_index = "
        "(SELECT COALESCE(MAX(finished_index), 0) + 1 FROM rollout_groups WHERE run_id = ?) WHERE group_id = ?",
        (row[0], group_id),
    )
    tx.changes.runs_with_groups.append(row[0])


# --- rollouts ----------------------------------------------------------------------------------------------------


def enqueue(tx: Transaction, requests: Sequence[EnqueueRolloutRequest]) -> list[Rollout]:
    """Queue rollouts, all or none."""
    rollouts = [create_rollout(tx, request, "queuing") for request in requests]
    tx.changes.queued = tx.changes.queued or bool(rollouts)
    return rollouts


def create_rollout(tx: Transaction, request: EnqueueRolloutRequest, status: RolloutStatus) -> Rollout:
    text = codec.to_json(request.input, "the input of the rollout")
    if request.rollout_id is not None:
        codec.check_id(request.rollout_id, "rollout_id")
        stored = rollout_row(tx.connection, request.rollout_id)
        if stored is not None:
            if not codec.same_json(stored[1], text):
                raise ConflictError(f"rollout {request.rollout_id} is stored already, with another input")
            return rollout_from_row(stored)
    if request.resources_id is not None:
        require(tx.connection, "resources", "resources_id", request.resources_id)
    row = (
        request.rollout_id or codec.new_id("ro"),
        text,
        tx.now,
        None,
        status,
        request.mode,
        request.resources_id,
        _run_of(tx, request),
        request.group_id,
        request.group_index,
        codec.to_json(request.config, "the config of the rollout"),
        codec.to_json(request.metadata, "the metadata of the rollout"),
    )
    tx.connection.execute(
        f"INSERT INTO rollouts ({ROLLOUT_COLUMNS}, attempts) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0)", row
    )
    return rollout_from_row(row)


def _run_of(tx: Transaction, request: EnqueueRolloutRequest) -> str | None:
    """The run a requested rollout belongs to: that of its group, where it has one."""
    if request.group_id is None:
        if request.group_index is not None:
            raise InvalidError(f"group_index is {request.group_index} but there is no group_id; give both or neither")
        if request.run_id is not None:
            require(tx.connection, "runs", "run_id", request.run_id)
        return request.run_id
    group = get_group(tx.connection, request.group_id)
    if group is None:
        raise NotFoundError(f"there is no group {request.group_id!r}; create it with create_group first")
    if request.group_index is None or not 0 <= request.group_index < group.size:
        raise InvalidError(
            f"group_index is {request.group_index}; group {group.group_id} of {group.size} takes 0 to {group.size - 1}"
        )
    if request.run_id not in (None, group.run_id):
        raise InvalidError(f"group {group.group_id} belongs to run {group.run_id}, not to {request.run_id}")
    taken = tx.connection.execute(
        "SELECT rollout_id FROM rollouts WHERE group_id = ? AND group_index = ?", (group.group_id, request.group_index)
    ).fetchone()
    if taken is not None:
        raise ConflictError(f"index {request.group_index} of group {group.group_id} is taken by rollout {taken[0]}")
    return group.run_id


def require(connection: sqlite3.Connection, table: str, column: str, value: str) -> None:
    if connection.execute(f"SELECT 1 FROM {table} WHERE {column} = ?", (value,)).fetchone() is None:
        raise NotFoundError(f"there is no {column} {value!r} in the store")


def rollout_row(connection: sqlite3.Connection, rollout_id: str) -> tuple[Any, ...] | None:
    return connection.execute(f"SELECT {ROLLOUT_COLUMNS} FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone()


def require_rollout(connection: sqlite3.Connection, rollout_id: str) -> Rollout:
    """The rollout, or NotFoundError."""
    row = rollout_row(connection, rollout_id)
    if row is None:
        raise NotFoundError(f"there is no rollout {rollout_id!r}")
    return rollout_from_row(row)


def query(
    connection: sqlite3.Connection,
    equal: Mapping[str, str | None],
    one_of: Mapping[str, Sequence[str] | None],
    limit: int | None,
    offset: int,
) -> list[Rollout]:
    """Rollouts whose columns equal, or are one of, what is given (None: any), in the order they were enqueued."""
    if offset < 0 or (limit is not None and limit < 0):
        raise InvalidError(f"limit is {limit} and offset {offset}; neither may be negative")
    conditions = [f"{column} = ?" for column, value in equal.items() if value is not None]
    values: list[Any] = [value for value in equal.values() if value is not None]
    for column, choices in one_of.items():
        if choices is not None:
            # One JSON parameter for any number of choices: a database bounds the number of its parameters.
            conditions.append(f"{column} IN (SELECT value FROM json_each(?))")
            values.append(codec.to_json(list(choices), column))
    where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
    rows = connection.execute(
        f"SELECT {ROLLOUT_COLUMNS} FROM rollouts {where} ORDER BY number LIMIT ? OFFSET ?",
        (*values, -1 if limit is None else limit, offset),
    )
    return [rollout_from_row(row) for row in rows]


def terminal_among(connection: sqlite3.Connection, rollout_ids: Iterable[str]) -> list[Rollout]:
    """The terminal ones, in the order given; NotFoundError names an id that is not stored."""
    terminal: list[Rollout] = []
    for rollout_id in rollout_ids:
        rollout = require_rollout(connection, rollout_id)
        if rollout.status in lifecycle.TERMINAL:
            terminal.append(rollout)
    return terminal


# --- groups ------------------------------------------------------------------------------------------------------


def create_group(tx: Transaction, size: int, run_id: str | None, group_id: str | None) -> Group:
    """Declare a group; an id that is stored already must have the same size and run."""
    if size < 1:
        raise InvalidError(f"the size of a group is {size}; it must be at least 1")
    if run_id is not None:
        require(tx.connection, "runs", "run_id", run_id)
    name = codec.new_id("gr") if group_id is None else codec.check_id(group_id, "group_id")
    stored = get_group(tx.connection, name)
    if stored is not None:
        if (stored.size, stored.run_id) != (size, run_id):
            raise ConflictError(f"group {name} is stored already, with size {stored.size} in run {stored.run_id}")
        return stored
    tx.connection.execute(
        "INSERT INTO rollout_groups (group_id, run_id, size, finished_index) VALUES (?, ?, ?, NULL)",
        (name, run_id or "", size),
    )
    return Group(group_id=name, run_id=run_id, size=size)


_GROUP: Final = "SELECT group_id, run_id, size, finished_index FROM rollout_groups "


def get_group(connection: sqlite3.Connection, group_id: str) -> Group | None:
    row = connection.execute(_GROUP + "WHERE group_id = ?", (group_id,)).fetchone()
    return None if row is None else _group(connection, row)


def complete_groups(connection: sqlite3.Connection, run_id: str, cursor: int, limit: int) -> list[Group]:
    """Complete groups of a run numbered above `cursor`, in the order they became complete."""
    require(connection, "runs", "run_id", run_id)
    rows = connection.execute(
        _GROUP + "WHERE run_id = ? AND finished_index > ? ORDER BY finished_index LIMIT ?", (run_id, cursor, limit)
    ).fetchall()
    return [_group(connection, row) for row in rows]


def _group(connection: sqlite3.Connection, row: Sequence[Any]) -> Group:
    members = connection.execute("SELECT rollout_id FROM rollouts WHERE group_id = ? ORDER BY group_index", (row[0],))
    return Group(
        group_id=row[0],
        run_id=row[1] or None,
        size=row[2],
        rollout_ids=tuple(member[0] for member in members),
        finished_index=row[3],
    )
