"""Resources, runs, metrics, checkpoints and workers as rows.

A function that writes takes a `Transaction`. This module does not know threads, event loops or HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from agentlightning.errors import ConflictError, InvalidError, NotFoundError
from agentlightning.store import calls, codec, lifecycle
from agentlightning.store.attempts import touch_worker
from agentlightning.store.database import Connection
from agentlightning.store.rollouts import project_of, require
from agentlightning.store.transaction import Transaction
from agentlightning.types import DEFAULT_PROJECT, Checkpoint, Metrics, NamedResources, ResourcesUpdate, Run, Worker

# --- resources ---------------------------------------------------------------------------------------------------

_RESOURCES: Final = "resources_id, resources, version, create_time, project, run_id, parent_id, metadata"


def add_resources(tx: Transaction, call: calls.AddResources) -> ResourcesUpdate:
    """Store a new version. An id of the caller's choice that is stored already must have the same content."""
    text = codec.to_json(call.resources, "the resources")
    if call.resources_id is not None:
        codec.check_id(call.resources_id, "resources_id")
        stored = _resources_row(tx.connection, call.resources_id)
        if stored is not None:
            if not codec.same_json(stored[1], text):
                raise ConflictError(
                    f"resources {call.resources_id} are stored with other content; versions are immutable"
                )
            return _resources(stored)
    if call.parent_id is not None:
        require(tx.connection, "resources", "resources_id", call.parent_id)
    project = project_of(tx.connection, call.project, call.run_id)
    # Whoever numbers holds the counter until the commit, as in `rollouts.settle`.
    tx.connection.execute("SELECT value FROM counters WHERE name = 'finished'" + tx.connection.for_update)
    (version,) = tx.connection.execute("SELECT COALESCE(MAX(version), 0) + 1 FROM resources").fetchone()
    row = (
        call.resources_id or codec.new_id("rs"),
        text,
        version,
        tx.now,
        project,
        call.run_id,
        call.parent_id,
        codec.to_json(call.metadata or {}, "the metadata of the resources"),
    )
    tx.connection.execute(f"INSERT INTO resources ({_RESOURCES}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
    return _resources(row)


def get_resources(connection: Connection, call: calls.GetResources) -> ResourcesUpdate | None:
    row = _resources_row(connection, call.resources_id)
    return None if row is None else _resources(row)


def latest_resources(connection: Connection, call: calls.GetLatestResources) -> ResourcesUpdate | None:
    of_project, values = _of_project(call.project)
    row = connection.execute(
        f"SELECT {_RESOURCES} FROM resources {of_project} ORDER BY version DESC LIMIT 1", values
    ).fetchone()
    return None if row is None else _resources(row)


def query_resources(connection: Connection, call: calls.QueryResources) -> list[ResourcesUpdate]:
    of_project, values = _of_project(call.project)
    rows = connection.execute(f"SELECT {_RESOURCES} FROM resources {of_project} ORDER BY version", values)
    return [_resources(row) for row in rows]


def _of_project(project: str | None) -> tuple[str, tuple[str, ...]]:
    return ("", ()) if project is None else ("WHERE project = ?", (project,))


def _resources_row(connection: Connection, resources_id: str) -> tuple[Any, ...] | None:
    return connection.execute(f"SELECT {_RESOURCES} FROM resources WHERE resources_id = ?", (resources_id,)).fetchone()


def _resources(row: Sequence[Any]) -> ResourcesUpdate:
    return ResourcesUpdate(
        resources_id=row[0],
        resources=msgspec.json.decode(row[1], type=NamedResources),
        version=row[2],
        create_time=row[3],
        project=row[4],
        run_id=row[5],
        parent_id=row[6],
        metadata=codec.from_json(row[7]),
    )


# --- runs --------------------------------------------------------------------------------------------------------

_RUN: Final = "run_id, kind, status, start_time, end_time, policy_version, manifest, project"


def start_run(tx: Transaction, call: calls.StartRun) -> Run:
    """Record a run, or set the stored one of that id back to running."""
    name = codec.new_id("run") if call.run_id is None else codec.check_id(call.run_id, "run_id")
    manifest = codec.to_json(call.manifest, "the manifest of the run")
    project = DEFAULT_PROJECT if call.project is None else codec.check_id(call.project, "project")
    row = tx.connection.execute(
        f"INSERT INTO runs ({_RUN}) VALUES (?, ?, 'running', ?, NULL, 0, ?, ?) "
        f"ON CONFLICT (run_id) DO UPDATE SET status = 'running', end_time = NULL RETURNING {_RUN}",
        (name, call.kind, tx.now, manifest, project),
    ).fetchone()
    run = _run(row)
    tx.changes.runs.append(name)
    if (run.kind, run.project) != (call.kind, project):
        raise ConflictError(
            f"run {name} is stored already, of kind {run.kind!r} in project {run.project}, not {call.kind!r} in "
            f"{project}"
        )
    return run


def update_run(tx: Transaction, call: calls.UpdateRun) -> Run:
    row = tx.connection.execute(
        f"UPDATE runs SET status = ?, end_time = ? WHERE run_id = ? RETURNING {_RUN}",
        (call.status, None if call.status == "running" else tx.now, call.run_id),
    ).fetchone()
    if row is None:
        raise NotFoundError(f"there is no run {call.run_id!r}")
    tx.changes.runs.append(call.run_id)
    return _run(row)


def query_runs(connection: Connection, call: calls.QueryRuns) -> list[Run]:
    of_project, values = _of_project(call.project)
    rows = connection.execute(f"SELECT {_RUN} FROM runs {of_project} ORDER BY start_time, run_id", values)
    return [_run(row) for row in rows]


def next_policy_version(tx: Transaction, call: calls.NextPolicyVersion) -> int:
    row = tx.connection.execute(
        "UPDATE runs SET policy_version = policy_version + 1 WHERE run_id = ? RETURNING policy_version", (call.run_id,)
    ).fetchone()
    if row is None:
        raise NotFoundError(f"there is no run {call.run_id!r}")
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
        project=row[7],
    )


def add_metrics(tx: Transaction, call: calls.AddMetrics) -> None:
    metrics = call.metrics
    _check_run(tx.connection, call.run_id, metrics.run_id)
    text = codec.to_json(metrics.values, f"metrics of step {metrics.step}")
    tx.connection.execute(
        "INSERT INTO metrics (run_id, step, time, measured) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (run_id, step) DO UPDATE SET time = excluded.time, measured = excluded.measured",
        (metrics.run_id, metrics.step, metrics.time, text),
    )
    tx.changes.runs.append(call.run_id)


def query_metrics(connection: Connection, call: calls.QueryMetrics) -> list[Metrics]:
    require(connection, "runs", "run_id", call.run_id)
    rows = connection.execute("SELECT step, time, measured FROM metrics WHERE run_id = ? ORDER BY step", (call.run_id,))
    return [
        Metrics(run_id=call.run_id, step=step, time=time, values=msgspec.json.decode(measured, type=dict[str, float]))
        for step, time, measured in rows
    ]


_CHECKPOINT: Final = "run_id, step, path, time, policy_version, metadata"


def add_checkpoint(tx: Transaction, call: calls.AddCheckpoint) -> None:
    one = call.checkpoint
    _check_run(tx.connection, call.run_id, one.run_id)
    tx.connection.execute(
        f"INSERT INTO checkpoints ({_CHECKPOINT}) VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (run_id, step) DO UPDATE SET "
        "path = excluded.path, time = excluded.time, policy_version = excluded.policy_version, "
        "metadata = excluded.metadata",
        (one.run_id, one.step, one.path, one.time, one.policy_version, codec.to_json(one.metadata, "the metadata")),
    )


def query_checkpoints(connection: Connection, call: calls.QueryCheckpoints) -> list[Checkpoint]:
    require(connection, "runs", "run_id", call.run_id)
    rows = connection.execute(f"SELECT {_CHECKPOINT} FROM checkpoints WHERE run_id = ? ORDER BY step", (call.run_id,))
    return [
        Checkpoint(
            run_id=row[0],
            step=row[1],
            path=row[2],
            time=row[3],
            policy_version=row[4],
            metadata=codec.from_json(row[5]),
        )
        for row in rows
    ]


def _check_run(connection: Connection, run_id: str, named: str) -> None:
    if named != run_id:
        raise InvalidError(f"what is to be recorded for run {run_id} names run {named}")
    require(connection, "runs", "run_id", run_id)


# --- workers and the whole ---------------------------------------------------------------------------------------

_GONE_AFTER_LEASES: Final = 3
"""A worker that has not been heard for this many lease times, and holds nothing, counts as gone."""


def update_worker(tx: Transaction, call: calls.UpdateWorker) -> Worker:
    stats = None if call.heartbeat_stats is None else codec.to_json(call.heartbeat_stats, "heartbeat_stats")
    touch_worker(tx, call.worker_id, stats)
    return query_workers(tx, call.worker_id)[0]


def query_workers(tx: Transaction, worker_id: str | None = None) -> list[Worker]:
    """All workers, or the one of that name, with the newest attempt each is busy with."""
    of_worker, values = ("", ()) if worker_id is None else ("AND worker_id = ? ", (worker_id,))
    holding: dict[str, tuple[str, str]] = {
        worker: (rollout_id, attempt_id)
        for worker, rollout_id, attempt_id in tx.connection.execute(
            "SELECT worker_id, rollout_id, attempt_id FROM attempts "
            f"WHERE status IN ('preparing', 'running') AND worker_id IS NOT NULL {of_worker}ORDER BY number",
            values,
        )
    }
    workers: list[Worker] = []
    for name, last_heartbeat_time, stats in tx.connection.execute(
        f"SELECT worker_id, last_heartbeat_time, heartbeat_stats FROM workers WHERE true {of_worker}ORDER BY worker_id",
        values,
    ):
        rollout_id, attempt_id = holding.get(name, (None, None))
        silent = tx.now - last_heartbeat_time > _GONE_AFTER_LEASES * tx.lease_seconds
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


def statistics(connection: Connection) -> dict[str, int]:
    """`rollouts`, `rollouts_<status>`, `attempts`, `spans`, `resources`, `runs`, `groups` and `workers`."""
    counts = {f"rollouts_{status}": 0 for status in lifecycle.ROLLOUT_MOVES}
    for status, count in connection.execute("SELECT status, count(*) FROM rollouts GROUP BY status"):
        counts[f"rollouts_{status}"] = count
    counts["rollouts"] = sum(counts.values())
    tables = {name: name for name in ("attempts", "spans", "resources", "runs", "workers")}
    for name, table in {**tables, "groups": "rollout_groups"}.items():
        counts[name] = connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
    return counts
