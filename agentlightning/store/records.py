"""Spans, resources, runs, metrics and workers as rows.

Every writing function takes a `Transaction`. This module does not know threads, event loops or HTTP.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from agentlightning.errors import ConflictError, InvalidError, NotFoundError
from agentlightning.store import codec, lifecycle
from agentlightning.store.attempts import load_standing, save_standing
from agentlightning.store.codec import SpanColumns
from agentlightning.store.rollouts import require, require_rollout
from agentlightning.store.transaction import Transaction
from agentlightning.types import (
    Metrics,
    NamedResources,
    ResourcesUpdate,
    Run,
    RunStatus,
    Span,
    Worker,
)

_SPAN: Final = ", ".join(SpanColumns._fields)
_INSERT_SPAN: Final = (
    f"INSERT INTO spans (attempt, {_SPAN}) VALUES (?{', ?' * len(SpanColumns._fields)}) "
    "ON CONFLICT (attempt, span_id) DO NOTHING"
)


# --- spans -------------------------------------------------------------------------------------------------------


def add_spans(tx: Transaction, spans: Sequence[Span], columns: Sequence[SpanColumns]) -> list[Span]:
    """Store spans with the columns they were written into, all or none; return them as they are stored."""
    by_attempt: dict[tuple[str, str], list[int]] = {}
    for index, span in enumerate(spans):
        by_attempt.setdefault((span.rollout_id, span.attempt_id), []).append(index)
    stored = list(spans)
    for (rollout_id, attempt_id), indices in by_attempt.items():
        number, before = load_standing(tx.connection, rollout_id, attempt_id)
        (highest,) = tx.connection.execute("SELECT span_sequence FROM attempts WHERE number = ?", (number,)).fetchone()
        for index in indices:
            sequence_id = columns[index].sequence_id or highest + 1
            row = columns[index]._replace(sequence_id=sequence_id)
            if tx.connection.execute(_INSERT_SPAN, (number, *row)).rowcount == 0:
                stored[index] = _stored_span(tx.connection, number, spans[index])
                continue
            highest = max(highest, sequence_id)
            if spans[index].sequence_id != sequence_id:
                stored[index] = msgspec.structs.replace(spans[index], sequence_id=sequence_id)
        tx.connection.execute("UPDATE attempts SET span_sequence = ? WHERE number = ?", (highest, number))
        save_standing(tx, number, before, lifecycle.hear(before, tx.now, tx.lease_seconds))
    return stored


def _stored_span(connection: sqlite3.Connection, number: int, span: Span) -> Span:
    row = connection.execute(
        f"SELECT {_SPAN} FROM spans WHERE attempt = ? AND span_id = ?", (number, span.span_id)
    ).fetchone()
    return codec.span_from_columns(span.rollout_id, span.attempt_id, row)


def next_span_sequence(tx: Transaction, rollout_id: str, attempt_id: str) -> int:
    number, _ = load_standing(tx.connection, rollout_id, attempt_id)
    (sequence_id,) = tx.connection.execute(
        "UPDATE attempts SET span_sequence = span_sequence + 1 WHERE number = ? RETURNING span_sequence", (number,)
    ).fetchone()
    return sequence_id


def query_spans(connection: sqlite3.Connection, rollout_id: str, attempt_id: str | None) -> list[Span]:
    """Spans of one attempt (`latest`: the last one) or of all, by start time, then sequence id."""
    attempts: list[tuple[int, str]] = connection.execute(
        "SELECT number, attempt_id FROM attempts WHERE rollout_id = ? ORDER BY sequence_id", (rollout_id,)
    ).fetchall()
    if not attempts:
        require_rollout(connection, rollout_id)
    if attempt_id == "latest":
        attempts = attempts[-1:]
    elif attempt_id is not None:
        attempts = [attempt for attempt in attempts if attempt[1] == attempt_id]
        if not attempts:
            raise NotFoundError(f"there is no attempt {attempt_id!r} of a rollout {rollout_id!r}")
    spans = [
        codec.span_from_columns(rollout_id, name, row)
        for number, name in attempts
        for row in connection.execute(f"SELECT {_SPAN} FROM spans WHERE attempt = ?", (number,))
    ]
    return sorted(spans, key=lambda span: (span.start_time, span.sequence_id))


# --- resources ---------------------------------------------------------------------------------------------------

_RESOURCES: Final = "resources_id, resources, version, create_time, metadata"


def add_resources(
    tx: Transaction, resources: NamedResources, metadata: Mapping[str, Any], resources_id: str | None
) -> ResourcesUpdate:
    """Store a new version. An id of the caller's choice that is stored already must have the same content."""
    text = codec.to_json(resources, "the resources")
    if resources_id is not None:
        codec.check_id(resources_id, "resources_id")
        stored = _resources_row(tx.connection, resources_id)
        if stored is not None:
            if not codec.same_json(stored[1], text):
                raise ConflictError(f"resources {resources_id} are stored with other content; versions are immutable")
            return _resources(stored)
    row = tx.connection.execute(
        f"INSERT INTO resources ({_RESOURCES}) "
        f"SELECT ?, ?, COALESCE(MAX(version), 0) + 1, ?, ? FROM resources RETURNING {_RESOURCES}",
        (resources_id or codec.new_id("rs"), text, tx.now, codec.to_json(metadata, "the metadata of the resources")),
    ).fetchone()
    return _resources(row)


def get_resources(connection: sqlite3.Connection, resources_id: str) -> ResourcesUpdate | None:
    row = _resources_row(connection, resources_id)
    return None if row is None else _resources(row)


def latest_resources(connection: sqlite3.Connection) -> ResourcesUpdate | None:
    row = connection.execute(f"SELECT {_RESOURCES} FROM resources ORDER BY version DESC LIMIT 1").fetchone()
    return None if row is None else _resources(row)


def query_resources(connection: sqlite3.Connection) -> list[ResourcesUpdate]:
    return [_resources(row) for row in connection.execute(f"SELECT {_RESOURCES} FROM resources ORDER BY version")]


def _resources_row(connection: sqlite3.Connection, resources_id: str) -> tuple[Any, ...] | None:
    return connection.execute(f"SELECT {_RESOURCES} FROM resources WHERE resources_id = ?", (resources_id,)).fetchone()


def _resources(row: Sequence[Any]) -> ResourcesUpdate:
    return ResourcesUpdate(
        resources_id=row[0],
        resources=msgspec.json.decode(row[1], type=NamedResources),
        version=row[2],
        create_time=row[3],
        metadata=codec.from_json(row[4]),
    )


# --- runs and metrics --------------------------------------------------------------------------------------------

_RUN: Final = "run_id, kind, status, start_time, end_time, policy_version, manifest"


def start_run(tx: Transaction, kind: str, manifest: Mapping[str, Any], run_id: str | None) -> Run:
    """Record a run, or set the stored one of that id back to running."""
    name = codec.new_id("run") if run_id is None else codec.check_id(run_id, "run_id")
    row = tx.connection.execute(
        f"INSERT INTO runs ({_RUN}) VALUES (?, ?, 'running', ?, NULL, 0, ?) "
        f"ON CONFLICT (run_id) DO UPDATE SET status = 'running', end_time = NULL RETURNING {_RUN}",
        (name, kind, tx.now, codec.to_json(manifest, "the manifest of the run")),
    ).fetchone()
    if row[1] != kind:
        raise ConflictError(f"run {name} is stored already, as a run of kind {row[1]!r}, not {kind!r}")
    return _run(row)


def update_run(tx: Transaction, run_id: str, status: RunStatus) -> Run:
    row = tx.connection.execute(
        f"UPDATE runs SET status = ?, end_time = ? WHERE run_id = ? RETURNING {_RUN}",
        (status, None if status == "running" else tx.now, run_id),
    ).fetchone()
    if row is None:
        raise NotFoundError(f"there is no run {run_id!r}")
    return _run(row)


def query_runs(connection: sqlite3.Connection) -> list[Run]:
    return [_run(row) for row in connection.execute(f"SELECT {_RUN} FROM runs ORDER BY start_time, run_id")]


def next_policy_version(tx: Transaction, run_id: str) -> int:
    row = tx.connection.execute(
        "UPDATE runs SET policy_version = policy_version + 1 WHERE run_id = ? RETURNING policy_version", (run_id,)
    ).fetchone()
    if row is None:
        raise NotFoundError(f"there is no run {run_id!r}")
    return row[0]


def _run(row: Sequence[Any]) -> Run:
    return Run(
        run_id=row[0],
        kind=row[1],
        status=row[2],
        start_time=row[3],
        end_time=row[4],
        policy_version=row[5],
        manifest=codec.from_json(row[6]),
    )


def add_metrics(tx: Transaction, metrics: Metrics) -> None:
    require(tx.connection, "runs", "run_id", metrics.run_id)
    text = codec.to_json(metrics.values, f"metrics of step {metrics.step}")
    tx.connection.execute(
        "INSERT INTO metrics (run_id, step, time, measured) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (run_id, step) DO UPDATE SET time = excluded.time, measured = excluded.measured",
        (metrics.run_id, metrics.step, metrics.time, text),
    )


def query_metrics(connection: sqlite3.Connection, run_id: str) -> list[Metrics]:
    require(connection, "runs", "run_id", run_id)
    rows = connection.execute("SELECT step, time, measured FROM metrics WHERE run_id = ? ORDER BY step", (run_id,))
    return [
        Metrics(run_id=run_id, step=step, time=time, values=msgspec.json.decode(measured, type=dict[str, float]))
        for step, time, measured in rows
    ]


# --- workers and the whole ---------------------------------------------------------------------------------------

_GONE_AFTER_LEASES: Final = 3
"""A worker that has not been heard for this many lease times, and holds nothing, counts as gone."""


def touch_worker(tx: Transaction, worker_id: str, stats: Mapping[str, Any] | None) -> None:
    """Note that a worker is alive, and what it reports of itself (None: as before)."""
    if not worker_id:
        raise InvalidError("worker_id is empty; give each worker a name of its own, or None")
    text = None if stats is None else codec.to_json(stats, "heartbeat_stats")
    tx.connection.execute(
        "INSERT INTO workers (worker_id, last_heartbeat_time, heartbeat_stats) VALUES (?, ?, COALESCE(?, '{}')) "
        "ON CONFLICT (worker_id) DO UPDATE SET last_heartbeat_time = excluded.last_heartbeat_time, "
        "heartbeat_stats = COALESCE(?, workers.heartbeat_stats)",
        (worker_id, tx.now, text, text),
    )


def query_workers(
    connection: sqlite3.Connection, now: float, lease_seconds: float, worker_id: str | None = None
) -> list[Worker]:
    """All workers, or one, with the newest attempt each is busy with."""
    holding: dict[str, tuple[str, str]] = {
        worker: (rollout_id, attempt_id)
        for worker, rollout_id, attempt_id in connection.execute(
            "SELECT worker_id, rollout_id, attempt_id FROM attempts "
            "WHERE status IN ('preparing', 'running') AND worker_id IS NOT NULL ORDER BY number"
        )
    }
    rows = connection.execute(
        "SELECT worker_id, last_heartbeat_time, heartbeat_stats FROM workers WHERE ? IS NULL OR worker_id = ? "
        "ORDER BY worker_id",
        (worker_id, worker_id),
    )
    workers: list[Worker] = []
    for name, last_heartbeat_time, stats in rows:
        rollout_id, attempt_id = holding.get(name, (None, None))
        silent = now - last_heartbeat_time > _GONE_AFTER_LEASES * lease_seconds
        workers.append(
            Worker(
                worker_id=name,
                status="busy" if attempt_id else "gone" if silent else "idle",
                last_heartbeat_time=last_heartbeat_time,
                current_rollout_id=rollout_id,
                current_attempt_id=attempt_id,
                heartbeat_stats=codec.from_json(stats),
            )
        )
    return workers


def statistics(connection: sqlite3.Connection) -> dict[str, int]:
    """`rollouts`, `rollouts_<status>`, `attempts`, `spans`, `resources`, `runs`, `groups` and `workers`."""
    counts = {f"rollouts_{status}": 0 for status in lifecycle.ROLLOUT_MOVES}
    for status, count in connection.execute("SELECT status, count(*) FROM rollouts GROUP BY status"):
        counts[f"rollouts_{status}"] = count
    counts["rollouts"] = sum(counts.values())
    tables = {name: name for name in ("attempts", "spans", "resources", "runs", "workers")}
    for name, table in {**tables, "groups": "rollout_groups"}.items():
        counts[name] = connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
    return counts
