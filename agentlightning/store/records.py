"""Resources, runs, metrics and workers as rows.

A function that writes takes a `Transaction`. This module does not know threads, event loops or HTTP.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from agentlightning.errors import ConflictError, InvalidError, NotFoundError
from agentlightning.store import calls, codec, lifecycle
from agentlightning.store.attempts import touch_worker
from agentlightning.store.database import Connection
from agentlightning.store.rollouts import ACTIVE, require
from agentlightning.store.tables import RESOURCES, RUNS
from agentlightning.store.transaction import Transaction
from agentlightning.types import Metrics, Resource, ResourcesUpdate, Run, Worker

# --- resources ---------------------------------------------------------------------------------------------------


def add_resources(tx: Transaction, call: calls.AddResources) -> ResourcesUpdate:
    """Store a new version. An id of the caller's choice that is stored already must have the same content."""
    for name, resource in dict[str, Any](call.resources).items():
        if not isinstance(resource, Resource):
            raise InvalidError(f"resource {name!r} is a {type(resource).__name__}; give an LLM or a PromptTemplate")
    if call.resources_id is not None:
        codec.check_id(call.resources_id, "resources_id")
        stored = _find_resources(tx.connection, call.resources_id)
        if stored is not None:
            if not codec.same(stored.resources, call.resources, "the resources"):
                raise ConflictError(
                    f"resources {call.resources_id} are stored with other content; versions are immutable"
                )
            return stored
    if call.parent_id is not None:
        require(tx.connection, "resources", "resources_id", call.parent_id)
    if call.run_id is not None:
        require(tx.connection, "runs", "run_id", call.run_id)
    (version,) = tx.connection.execute("SELECT COALESCE(MAX(version), 0) + 1 FROM resources").fetchone()
    update = ResourcesUpdate(
        resources_id=call.resources_id or codec.new_id("rs"),
        resources=call.resources,
        version=version,
        create_time=tx.now,
        run_id=call.run_id,
        parent_id=call.parent_id,
        metadata=call.metadata or {},
    )
    RESOURCES.insert(tx.connection, update)
    return update


def get_resources(tx: Transaction, call: calls.GetResources) -> ResourcesUpdate | None:
    return _find_resources(tx.connection, call.resources_id)


def latest_resources(tx: Transaction, call: calls.GetLatestResources) -> ResourcesUpdate | None:
    return RESOURCES.one(tx.connection, "ORDER BY version DESC LIMIT 1")


def query_resources(tx: Transaction, call: calls.QueryResources) -> list[ResourcesUpdate]:
    return RESOURCES.all(tx.connection, "ORDER BY version")


def _find_resources(connection: Connection, resources_id: str) -> ResourcesUpdate | None:
    return RESOURCES.one(connection, "WHERE resources_id = ?", resources_id)


# --- runs --------------------------------------------------------------------------------------------------------


def start_run(tx: Transaction, call: calls.StartRun) -> Run:
    """Record a run, or set the stored one of that id back to running."""
    run = Run(
        run_id=codec.new_id("run") if call.run_id is None else codec.check_id(call.run_id, "run_id"),
        kind=call.kind,
        start_time=tx.now,
        manifest=call.manifest,
    )
    RUNS.insert(tx.connection, run, "ON CONFLICT (run_id) DO UPDATE SET status = 'running', end_time = NULL")
    tx.changes.runs.append(run.run_id)
    stored = _run(tx.connection, run.run_id)
    if stored.kind != run.kind:
        raise ConflictError(f"run {run.run_id} is stored already, of kind {stored.kind!r}, not {run.kind!r}")
    return stored


def update_run(tx: Transaction, call: calls.UpdateRun) -> Run:
    tx.connection.execute(
        "UPDATE runs SET status = ?, end_time = ? WHERE run_id = ?",
        (call.status, None if call.status == "running" else tx.now, call.run_id),
    )
    tx.changes.runs.append(call.run_id)
    return _run(tx.connection, call.run_id)


def query_runs(tx: Transaction, call: calls.QueryRuns) -> list[Run]:
    return RUNS.all(tx.connection, "ORDER BY start_time, run_id")


def _run(connection: Connection, run_id: str) -> Run:
    run = RUNS.one(connection, "WHERE run_id = ?", run_id)
    if run is None:
        raise NotFoundError(f"there is no run {run_id!r}")
    return run


def next_policy_version(tx: Transaction, call: calls.NextPolicyVersion) -> int:
    row = tx.connection.execute(
        "UPDATE runs SET policy_version = policy_version + 1 WHERE run_id = ? RETURNING policy_version", (call.run_id,)
    ).fetchone()
    if row is None:
        raise NotFoundError(f"there is no run {call.run_id!r}")
    return row[0]


def add_metrics(tx: Transaction, call: calls.AddMetrics) -> None:
    metrics = call.metrics
    if metrics.run_id != call.run_id:
        raise InvalidError(f"the metrics for run {call.run_id} name run {metrics.run_id}")
    require(tx.connection, "runs", "run_id", call.run_id)
    codec.check_finite(metrics.time, f"the time of step {metrics.step}")
    text = codec.to_json(metrics.values, f"metrics of step {metrics.step}")
    tx.connection.execute(
        "INSERT INTO metrics (run_id, step, time, measured) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (run_id, step) DO UPDATE SET time = excluded.time, measured = excluded.measured",
        (metrics.run_id, metrics.step, metrics.time, text),
    )
    tx.changes.runs.append(call.run_id)


def query_metrics(tx: Transaction, call: calls.QueryMetrics) -> list[Metrics]:
    require(tx.connection, "runs", "run_id", call.run_id)
    rows = tx.connection.execute(
        "SELECT step, time, measured FROM metrics WHERE run_id = ? ORDER BY step", (call.run_id,)
    )
    return [
        Metrics(run_id=call.run_id, step=step, time=time, values=msgspec.json.decode(measured, type=dict[str, float]))
        for step, time, measured in rows
    ]


# --- workers and the whole ---------------------------------------------------------------------------------------

_GONE_AFTER_LEASES: Final = 3
"""A worker that has not been heard for this many lease times, and holds nothing, counts as gone."""


def update_worker(tx: Transaction, call: calls.UpdateWorker) -> Worker:
    stats = None if call.heartbeat_stats is None else codec.to_json(call.heartbeat_stats, "heartbeat_stats")
    touch_worker(tx, call.worker_id, stats)
    return _workers(tx, codec.text(call.worker_id))[0]


def query_workers(tx: Transaction, call: calls.QueryWorkers) -> list[Worker]:
    return _workers(tx)


def _workers(tx: Transaction, worker_id: str | None = None) -> list[Worker]:
    """All workers, or the one of that name, with the newest attempt each is busy with."""
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


def statistics(tx: Transaction, call: calls.Statistics) -> dict[str, int]:
    """`rollouts`, `rollouts_<status>`, `attempts`, `spans`, `resources`, `runs`, `groups` and `workers`."""
    counts = {f"rollouts_{status}": 0 for status in lifecycle.ROLLOUT_MOVES}
    for status, count in tx.connection.execute("SELECT status, count(*) FROM rollouts GROUP BY status"):
        counts[f"rollouts_{status}"] = count
    counts["rollouts"] = sum(counts.values())
    tables = {name: name for name in ("attempts", "spans", "resources", "runs", "workers")}
    for name, table in {**tables, "groups": "rollout_groups"}.items():
        counts[name] = tx.connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
    return counts
