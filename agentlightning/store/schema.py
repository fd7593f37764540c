"""The tables, their version, and the opening of a database file.

This module knows what a store's file looks like and refuses, untouched, one that is something else. It does not know
what the rows mean. The SQL is standard where SQLite allows it, so that other databases can follow.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path
from typing import Final, Literal

from agentlightning.errors import ConfigError, InUseError
from agentlightning.store.keys import new_secret

APPLICATION_ID: Final = 0x41474C53  # "AGLS", in the header of every store's file
SCHEMA_VERSION: Final = 1

Synchronous = Literal["FULL", "NORMAL"]

TABLES: Final = """
CREATE TABLE meta (
    name TEXT PRIMARY KEY,
    value BLOB NOT NULL
);
CREATE TABLE runs (
    run_id TEXT PRIMARY KEY,
    kind TEXT NOT NULL,
    status TEXT NOT NULL,
    start_time REAL NOT NULL,
    end_time REAL,
    policy_version INTEGER NOT NULL,
    manifest TEXT NOT NULL
);
CREATE TABLE metrics (
    run_id TEXT NOT NULL,
    step INTEGER NOT NULL,
    time REAL NOT NULL,
    measured TEXT NOT NULL,
    PRIMARY KEY (run_id, step)
);
CREATE TABLE rollout_groups (
    group_id TEXT PRIMARY KEY,
    run_id TEXT NOT NULL,
    size INTEGER NOT NULL,
    finished_index INTEGER
);
CREATE UNIQUE INDEX groups_by_finish ON rollout_groups (run_id, finished_index);
CREATE TABLE rollouts (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    rollout_id TEXT NOT NULL UNIQUE,
    input TEXT NOT NULL,
    start_time REAL NOT NULL,
    end_time REAL,
    status TEXT NOT NULL,
    mode TEXT NOT NULL,
    resources_id TEXT,
    run_id TEXT,
    group_id TEXT,
    group_index INTEGER,
    config TEXT NOT NULL,
    metadata TEXT NOT NULL,
    attempts INTEGER NOT NULL
);
CREATE INDEX rollouts_queued ON rollouts (number) WHERE status IN ('queuing', 'requeuing');
CREATE INDEX rollouts_by_run ON rollouts (run_id, number);
CREATE UNIQUE INDEX rollouts_by_group ON rollouts (group_id, group_index);
CREATE TABLE attempts (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    attempt_id TEXT NOT NULL UNIQUE,
    rollout_id TEXT NOT NULL,
    sequence_id INTEGER NOT NULL,
    start_time REAL NOT NULL,
    end_time REAL,
    status TEXT NOT NULL,
    worker_id TEXT,
    last_heartbeat_time REAL,
    metadata TEXT NOT NULL,
    last_activity REAL NOT NULL,
    lease_expires REAL NOT NULL,
    check_time REAL NOT NULL,
    span_sequence INTEGER NOT NULL,
    UNIQUE (rollout_id, sequence_id)
);
CREATE INDEX attempts_watched ON attempts (check_time) WHERE status IN ('preparing', 'running');
CREATE TABLE spans (
    attempt INTEGER NOT NULL,
    span_id TEXT NOT NULL,
    sequence_id INTEGER NOT NULL,
    trace_id TEXT NOT NULL,
    parent_id TEXT,
    name TEXT NOT NULL,
    start_time REAL NOT NULL,
    end_time REAL NOT NULL,
    status_code TEXT NOT NULL,
    status_description TEXT,
    attributes TEXT NOT NULL,
    events TEXT,
    links TEXT,
    resource TEXT,
    prompt_token_ids BLOB,
    token_ids BLOB,
    logprobs BLOB,
    choices TEXT
);
CREATE UNIQUE INDEX spans_by_attempt ON spans (attempt, span_id);
CREATE TABLE resources (
    version INTEGER PRIMARY KEY,
    resources_id TEXT NOT NULL UNIQUE,
    resources TEXT NOT NULL,
    create_time REAL NOT NULL,
    metadata TEXT NOT NULL
);
CREATE TABLE workers (
    worker_id TEXT PRIMARY KEY,
    last_heartbeat_time REAL NOT NULL,
    heartbeat_stats TEXT NOT NULL
);
"""


def create(connection: sqlite3.Connection) -> None:
    """Lay out an empty database as a store, in one transaction."""
    connection.executescript(f"BEGIN;{TABLES}COMMIT;")
    connection.execute("INSERT INTO meta (name, value) VALUES ('secret', ?)", (new_secret(),))
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def check_file(path: Path) -> None:
    """ConfigError if there is a file at `path` and it is not a store of this version; nothing is changed."""
    try:
        if not path.exists() or path.stat().st_size == 0:
            return
        # Read as bytes: opening a foreign database with SQLite could already change files beside it.
        with path.open("rb") as file:
            header = file.read(100)
    except OSError as error:
        raise _unusable(path, error) from None
    if not header.startswith(b"SQLite format 3\x00") or int.from_bytes(header[68:72], "big") != APPLICATION_ID:
        raise ConfigError(f"{path} is not an Agent Lightning store; it was left as it is. Choose another path")
    version = int.from_bytes(header[60:64], "big")
    if version != SCHEMA_VERSION:
        raise ConfigError(
            f"the store {path} has layout {version} and this release reads layout {SCHEMA_VERSION}; it was left as it "
            "is. Use the release that wrote it, or choose another path"
        )
    if not os.access(path, os.W_OK):
        raise _unusable(path, PermissionError("no permission to write it"))


def own(path: Path) -> sqlite3.Connection:
    """Take the file for this process alone, until the returned connection is closed or the process dies.

    Waiting callers are woken inside one process, so that another process has to go through the server instead:
    ConfigError says so when the file is taken, or that the directory cannot be written."""
    claim = path.with_name(f"{path.name}-owner")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        claim.touch()
        connection = sqlite3.connect(claim, isolation_level=None, check_same_thread=False, timeout=0)
    except OSError as error:
        raise _unusable(path, error) from None
    try:
        connection.execute("BEGIN EXCLUSIVE")
    except sqlite3.Error as error:
        connection.close()
        if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
            raise InUseError(
                f"the store {path} is in use by another process; use that process's server, or choose another path"
            ) from None
        raise _unusable(path, error) from None
    return connection


def create_file(path: Path) -> None:
    """Make a new store at `path` if there is nothing yet."""
    if path.exists() and path.stat().st_size > 0:
        return
    # Laid out under another name and then moved, so that a crash never leaves half a store behind.
    draft = path.with_name(f"{path.name}-new")
    try:
        draft.unlink(missing_ok=True)
        with contextlib.closing(sqlite3.connect(draft, isolation_level=None)) as connection:
            create(connection)
            connection.execute("PRAGMA journal_mode = WAL")
        draft.replace(path)
    except (OSError, sqlite3.Error) as error:
        raise _unusable(path, error) from None


def _unusable(path: Path, error: Exception) -> ConfigError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ConfigError(f"the store {path} cannot be used: {reason}. Choose a place that you may write to")


def connect(path: Path, synchronous: Synchronous, *, read_only: bool = False) -> sqlite3.Connection:
    """A connection to a prepared file, to be used by one thread at a time. ConfigError if the file is damaged."""
    mode = "ro" if read_only else "rw"
    address = f"{path.absolute().as_uri()}?mode={mode}"
    connection = sqlite3.connect(
        address, uri=True, isolation_level=None, check_same_thread=False, cached_statements=256
    )
    try:
        connection.execute("PRAGMA busy_timeout = 5000")
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute("SELECT value FROM meta WHERE name = 'secret'").fetchone()
    except sqlite3.Error as error:
        connection.close()
        raise ConfigError(f"the store {path} is damaged and was left as it is: {error}. Restore a backup") from None
    return connection


def connect_memory() -> sqlite3.Connection:
    """A connection to a new store that lives and dies with it."""
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False, cached_statements=256)
    create(connection)
    return connection
