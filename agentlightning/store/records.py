"""Resources, runs, metrics and issued keys as rows, and the audit log of administrative
calls.

A function that writes takes a `Transaction`. This module does not know threads, event loops or
HTTP."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from agentlightning.errors import ConflictError, InvalidError, NotFoundError
from agentlightning.store import codec, lifecycle
from agentlightning.store.database import Connection, Transaction
from agentlightning.store.redaction import text_without_secrets
from agentlightning.store.rollouts import require
from agentlightning.store.tables import KEYS, RESOURCES, RUNS
from agentlightning.types import (
    ApiKey,
    IssuedKey,
    KeyScope,
    Metrics,
    NamedResources,
    Resource,
    ResourcesUpdate,
    Run,
    RunStatus,
)

_ALIVE_SECONDS: Final = 60.0


def add_resources(
    tx: Transaction,
    resources: NamedResources,
    metadata: Mapping[str, Any] | None,
    run_id: str | None,
    parent_id: str | None,
    resources_id: str | None,
) -> ResourcesUpdate:
    """Store a new version. If its id is stored already, the content must be the same."""
    for name, resource in dict[str, Any](resources).items():
        if not isinstance(resource, Resource):
            raise InvalidError(
                f"resource {name!r} is a {type(resource).__name__}; give an LLM, a PromptTemplate "
                "or a PromptCandidate"
            )
    if resources_id is not None:
        codec.check_id(resources_id, "resources_id")
        stored = get_resources_by_id(tx, resources_id)
        if stored is not None:
            if not codec.same(stored.resources, resources, "the resources"):
                raise ConflictError(
                    f"resources {resources_id} are stored with other content; versions are "
                    "immutable"
                )
            return stored
    if parent_id is not None:
        require(tx.connection, "resources", "resources_id", parent_id)
    if run_id is not None:
        require(tx.connection, "runs", "run_id", run_id)
    (version,) = tx.connection.execute(
        "SELECT COALESCE(MAX(version), 0) + 1 FROM resources"
    ).fetchone()
    update = ResourcesUpdate(
        resources_id=resources_id or codec.new_id("rs"),
        resources=resources,
        version=version,
        create_time=tx.now,
        run_id=run_id,
        parent_id=parent_id,
        metadata=dict(metadata or {}),
    )
    RESOURCES.insert(tx.connection, update)
    return update


def get_resources_by_id(tx: Transaction, resources_id: str) -> ResourcesUpdate | None:
    return RESOURCES.one(tx.connection, "WHERE resources_id = ?", resources_id)


def get_latest_resources(tx: Transaction) -> ResourcesUpdate | None:
    return RESOURCES.one(tx.connection, "ORDER BY version DESC LIMIT 1")


def query_resources(tx: Transaction) -> list[ResourcesUpdate]:
    return RESOURCES.all(tx.connection, "ORDER BY version")


def start_run(tx: Transaction, kind: str, manifest: Mapping[str, Any], run_id: str | None) -> Run:
    """Record a run, or set the stored run to running."""
    run = Run(
        run_id=codec.new_id("run") if run_id is None else codec.check_id(run_id, "run_id"),
        kind=kind,
        start_time=tx.now,
        manifest=dict(manifest),
    )
    RUNS.insert(
        tx.connection, run, "ON CONFLICT (run_id) DO UPDATE SET status = 'running', end_time = NULL"
    )
    tx.changes.runs.append(run.run_id)
    stored = _run(tx.connection, run.run_id)
    if stored.kind != run.kind:
        raise ConflictError(
            f"run {run.run_id} is stored already, of kind {stored.kind!r}, not {run.kind!r}"
        )
    return stored


def update_run(
    tx: Transaction, run_id: str, status: RunStatus | None, merge: Mapping[str, Any] | None
) -> Run:
    """Change the status, and merge into the manifest."""
    if status is not None:
        tx.connection.execute(
            "UPDATE runs SET status = ?, end_time = ? WHERE run_id = ?",
            (status, None if status == "running" else tx.now, run_id),
        )
    run = _run(tx.connection, run_id)
    if merge:
        # before the recursion, as it limits the depth
        codec.to_json(merge, "the change of the manifest")
        # Of why a run ended, and the like, which quotes agents and servers.
        clean = {
            name: text_without_secrets(value) if isinstance(value, str) else value
            for name, value in merge.items()
        }
        manifest = codec.merged(run.manifest, clean)
        text = codec.to_json(manifest, "the manifest of the run")
        tx.connection.execute(
            "UPDATE runs SET manifest = ? WHERE run_id = ?", (codec.text(text), run_id)
        )
        run = replace(run, manifest=manifest)
    tx.changes.runs.append(run_id)
    return run


def check_ended(tx: Transaction, run_id: str) -> None:
    """ConflictError if a run is running."""
    if _run(tx.connection, run_id).status == "running":
        raise ConflictError(f"run {run_id} is running; stop it first (agl runs stop)")


def delete_run(tx: Transaction, run_id: str) -> None:
    """Delete a run whose rollouts are deleted."""
    check_ended(tx, run_id)
    for table in ("metrics", "rollout_groups", "runs"):
        tx.connection.execute(f"DELETE FROM {table} WHERE run_id = ?", (run_id,))
    tx.changes.runs.append(run_id)


def query_runs(tx: Transaction) -> list[Run]:
    return RUNS.all(tx.connection, "ORDER BY start_time, run_id")


def _run(connection: Connection, run_id: str) -> Run:
    run = RUNS.one(connection, "WHERE run_id = ?", run_id)
    if run is None:
        raise NotFoundError(f"there is no run {run_id!r}")
    return run


def next_policy_version(tx: Transaction, run_id: str) -> int:
    row = tx.connection.execute(
        "UPDATE runs SET policy_version = policy_version + 1 WHERE run_id = ? RETURNING "
        "policy_version",
        (run_id,),
    ).fetchone()
    if row is None:
        raise NotFoundError(f"there is no run {run_id!r}")
    return row[0]


def add_metrics(tx: Transaction, metrics: Metrics) -> Run:
    run = _run(tx.connection, metrics.run_id)
    codec.check_finite(metrics.time, f"the time of step {metrics.step}")
    text = codec.to_json(metrics.values, f"metrics of step {metrics.step}")
    tx.connection.execute(
        "INSERT INTO metrics (run_id, step, time, measured) VALUES (?, ?, ?, ?) ON CONFLICT "
        "(run_id, step) DO UPDATE SET time = excluded.time, measured = excluded.measured",
        (metrics.run_id, metrics.step, metrics.time, text),
    )
    tx.changes.runs.append(metrics.run_id)
    return run


def query_metrics(tx: Transaction, run_id: str) -> list[Metrics]:
    require(tx.connection, "runs", "run_id", run_id)
    rows = tx.connection.execute(
        "SELECT step, time, measured FROM metrics WHERE run_id = ? ORDER BY step", (run_id,)
    )
    return [
        Metrics(
            run_id=run_id,
            step=step,
            time=time,
            values=msgspec.json.decode(measured, type=dict[str, float]),
        )
        for step, time, measured in rows
    ]


def statistics(tx: Transaction) -> dict[str, int]:
    """`rollouts`, `rollouts_<status>`, `attempts`, `spans`, `resources`, `runs`, `groups`,
    `workers` and `workers_alive`: those heard of in the last minute."""
    counts = {f"rollouts_{status}": 0 for status in lifecycle.ROLLOUT_MOVES}
    for status, count in tx.connection.execute(
        "SELECT status, count(*) FROM rollouts GROUP BY status"
    ):
        counts[f"rollouts_{status}"] = count
    counts["rollouts"] = sum(counts.values())
    tables = {name: name for name in ("attempts", "spans", "resources", "runs", "workers")}
    for name, table in {**tables, "groups": "rollout_groups"}.items():
        counts[name] = tx.connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
    alive = "SELECT count(*) FROM workers WHERE last_heartbeat_time > ?"
    (counts["workers_alive"],) = tx.connection.execute(alive, (tx.now - _ALIVE_SECONDS,)).fetchone()
    return counts


def try_to_write(tx: Transaction) -> None:
    """The smallest durable write."""
    value = str(tx.now).encode()
    tx.connection.execute(
        "INSERT INTO meta (name, value) VALUES ('last trial', ?) "
        "ON CONFLICT (name) DO UPDATE SET value = excluded.value",
        (value,),
    )


def get_time(tx: Transaction) -> float:
    return tx.now


KEY_PREFIX: Final = "aglk-"
_LONGEST_NAME: Final = 200  # characters
_LONGEST_LIFETIME: Final = 1e10  # seconds: three centuries, and still a date


def issue_key(
    tx: Transaction, name: str, scopes: Sequence[KeyScope], lifetime_seconds: float | None
) -> IssuedKey:
    """Issue a key. Only the answer has its secret."""
    if not scopes:
        raise InvalidError(
            "a key without scopes opens nothing; give some of read, worker, grader, trainer, admin"
        )
    if not (1 <= len(name) <= _LONGEST_NAME and name.isprintable()):
        raise InvalidError(
            f"the key's name is {name[:50]!r}; give 1 to {_LONGEST_NAME} printable characters"
        )
    if lifetime_seconds is not None and not 0 < lifetime_seconds <= _LONGEST_LIFETIME:
        raise InvalidError(
            f"lifetime_seconds is {lifetime_seconds}; it must be positive and at most "
            f"{_LONGEST_LIFETIME:g}, or None for no limit"
        )
    api_key = KEY_PREFIX + secrets.token_urlsafe(32)
    key = ApiKey(
        key_id=codec.new_id("key"),
        name=name,
        scopes=tuple(dict.fromkeys(scopes)),
        create_time=tx.now,
        expire_time=None if lifetime_seconds is None else tx.now + lifetime_seconds,
    )
    KEYS.insert(tx.connection, key, digest=_digest(api_key))
    return IssuedKey(**msgspec.structs.asdict(key), api_key=api_key)


def revoke_key(tx: Transaction, key_id: str) -> ApiKey:
    """Revoke a key at once and for good. An ended key stays unchanged."""
    tx.connection.execute(
        "UPDATE api_keys SET revoke_time = ? WHERE key_id = ? AND revoke_time IS NULL",
        (tx.now, key_id),
    )
    key = KEYS.one(tx.connection, "WHERE key_id = ?", key_id)
    if key is None:
        raise NotFoundError(f"there is no key {key_id!r}; `agl keys list` shows those there are")
    tx.changes.keys = True
    return key


def find_key(connection: Connection, api_key: str) -> ApiKey | None:
    """The key with this secret, even if it has expired or is revoked."""
    return KEYS.one(connection, "WHERE digest = ?", _digest(api_key))


def query_keys(tx: Transaction) -> list[ApiKey]:
    return KEYS.all(tx.connection, "ORDER BY create_time, key_id")


def _digest(api_key: str) -> str:
    # The key is 32 random bytes: nothing that a slow hash would have to protect.
    return hashlib.sha256(api_key.encode()).hexdigest()


_log: Final = logging.getLogger("agentlightning.audit")
_LOGGED: Final = {
    *(
        "rollout_id",
        "attempt_id",
        "rewards",
        "unfinished",
        "scrub",
        "key_id",
        "name",
        "scopes",
        "lifetime_seconds",
    )
}


def audit(action: str, actor: str, asked: Mapping[str, Any]) -> None:
    """Log who made a call, without secrets and without the user's text, which may have to be
    deleted."""
    detail = {name: value for name, value in asked.items() if name in _LOGGED}
    fields = {"action": action, "actor": actor}
    _log.info(
        "%s by %s: %s",
        action,
        actor,
        msgspec.json.encode(detail).decode(),
        extra={"fields": fields},
    )
