"""A store's SQLite file: telling it from other files, taking it, making it, connecting to it.

This module knows files and refuses, untouched, one that is something else. It does not know what the rows mean.
"""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from agentlightning.errors import ConfigError, InUseError, UnavailableError
from agentlightning.store import schema
from agentlightning.store.database import Dialect, Trouble, take_rows

APPLICATION_ID: Final = 0x41474C53  # "AGLS", in the header of every store's file

Synchronous: TypeAlias = Literal["FULL", "NORMAL"]

_STEPS: Final = 1000  # of SQLite's machine between two looks at the clock: some 20 µs


class SqliteConnection(sqlite3.Connection):
    """One connection, for one thread at a time."""

    dialect: Dialect = "sqlite"

    def trouble(self, error: Exception) -> Trouble | None:
        if isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_INTERRUPT:
            return "overdue"
        if isinstance(error, sqlite3.DataError | UnicodeEncodeError):
            return "invalid"
        if isinstance(error, sqlite3.IntegrityError):
            return "conflict"
        return "unavailable" if isinstance(error, sqlite3.Error) else None

    def stream(self, sql: str, parameters: Sequence[Any] = (), /) -> Iterator[Any]:
        return self.execute(sql, parameters)

    @contextlib.contextmanager
    def limited(self, seconds: float) -> Generator[None]:
        if seconds == math.inf:
            yield
            return
        deadline = time.monotonic() + seconds
        self.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS)
        try:
            yield
        finally:
            self.set_progress_handler(None, 0)

    def settle(self) -> None:
        self.execute("COMMIT")

    def revive(self) -> None:
        """A file is not lost."""


def check_file(path: Path, *, reading: bool = False) -> Path:
    """Where the file at `path` really is, whatever links lead there; nothing is changed. ConfigError if there is one
    and it is not a store of this version, may not be written although it is not only for `reading`, or has several
    names."""
    path = Path(os.path.realpath(path))  # what lies beside a store is beside the file itself
    try:
        if not path.exists() or path.stat().st_size == 0:
            return path
        # Read as bytes: opening a foreign database with SQLite could already change files beside it.
        with path.open("rb") as file:
            header = file.read(100)
        names = path.stat().st_nlink
    except OSError as error:
        raise _unusable(path, error) from None
    if not header.startswith(b"SQLite format 3\x00") or int.from_bytes(header[68:72], "big") != APPLICATION_ID:
        raise ConfigError(f"{path} is not an Agent Lightning store; it was left as it is. Choose another path")
    schema.check_version(int.from_bytes(header[60:64], "big"), f"the store {path}")
    if names > 1:
        raise ConfigError(
            f"the store {path} has {names} names (hard links), and SQLite would keep a log of its own beside each; "
            "remove the others, and make copies with `agl store backup`"
        )
    if not reading and not os.access(path, os.W_OK):
        raise _unusable(path, PermissionError("no permission to write it"))
    _check_whole(path, header)
    return path


def _check_whole(path: Path, header: bytes) -> None:
    """ConfigError if the file is shorter than its header says, as a copy that broke off is. What a crash left to be
    brought in from the log beside it may be missing."""
    log = path.with_name(f"{path.name}-wal")
    if log.exists() and log.stat().st_size > 0:
        return
    page_size = int.from_bytes(header[16:18], "big")
    pages = int.from_bytes(header[28:32], "big")
    expected, size = pages * (65536 if page_size == 1 else page_size), path.stat().st_size
    if size < expected:
        raise _damaged(path, ValueError(f"it has {size} bytes and should have {expected}"))


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


def prepare_file(path: Path) -> None:
    """Make a new store at `path` if there is nothing yet."""
    try:
        if not path.exists() or path.stat().st_size == 0:
            # Laid out under another name and then moved, so that a crash never leaves half a store behind.
            draft = path.with_name(f"{path.name}-new")
            draft.unlink(missing_ok=True)
            with contextlib.closing(_open(str(draft))) as connection:
                _lay_out(connection)
                connection.execute("PRAGMA journal_mode = WAL")
            # Prompts and the secret that keys are signed with: not for the machine's other users.
            draft.chmod(0o600)
            draft.replace(path)
        else:
            with contextlib.closing(_open(str(path))) as connection:
                connection.execute("PRAGMA journal_mode = WAL")  # which a copy is not
    except OSError as error:
        raise _unusable(path, error) from None
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError):
            raise _unusable(path, error) from None
        raise _damaged(path, error) from None


def _lay_out(connection: SqliteConnection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    schema.create(connection)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {schema.VERSION}")
    connection.execute("COMMIT")


def _open(address: str, *, uri: bool = False) -> SqliteConnection:
    return sqlite3.connect(
        address,
        uri=uri,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=256,
        factory=SqliteConnection,
    )


def _unusable(path: Path, error: Exception) -> ConfigError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ConfigError(f"the store {path} cannot be used: {reason}. Choose a place that you may write to")


def _damaged(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"the store {path} is damaged and was left as it is: {error}. Restore a backup")


def connect(path: Path, synchronous: Synchronous, *, read_only: bool = False) -> SqliteConnection:
    """A connection to a prepared file, to be used by one thread at a time. ConfigError if the file is damaged."""
    connection = _open(f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rw'}", uri=True)
    try:
        connection.execute("PRAGMA busy_timeout = 5000")
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute("PRAGMA secure_delete = ON")
        connection.execute("PRAGMA cache_size = -16000")  # KiB
        connection.execute("SELECT value FROM meta WHERE name = 'secret'").fetchone()
    except sqlite3.Error as error:
        connection.close()
        raise _damaged(path, error) from None
    return connection


def connect_memory() -> SqliteConnection:
    """A connection to a new store that lives and dies with it."""
    connection = _open(":memory:")
    _lay_out(connection)
    return connection


# --- leaving no trace --------------------------------------------------------------------------------------------

_PATIENCE_SECONDS: Final = 60.0
_PAUSE_SECONDS: Final = 0.1
_ROWS: Final = 500  # in one transaction, so that nobody waits long
_BYTES: Final = 4 * 1024 * 1024
_OVERLAP: Final = 50  # rows, more than share a page with the last one


def rewrite(connection: SqliteConnection, table: str, after: int) -> int | None:
    """Write some rows of a table anew, those after a rowid, and return the one to go on after; None at the end. What is
    deleted is overwritten, but not the copies of it in pages that rows were moved out of: these pages are freed here,
    and freed pages are overwritten as a whole."""
    columns = ", ".join(row[1] for row in connection.execute(f"PRAGMA table_info({table})"))
    select = f"SELECT rowid, {columns} FROM {table} WHERE rowid > ? ORDER BY rowid LIMIT ?"
    rows, whole = take_rows(connection.execute(select, (after, _ROWS)), _BYTES)
    if not rows:
        return None
    connection.execute(f"DELETE FROM {table} WHERE rowid BETWEEN ? AND ?", (rows[0][0], rows[-1][0]))
    marks = ", ".join("?" * len(rows[0]))
    connection.executemany(f"INSERT INTO {table} (rowid, {columns}) VALUES ({marks})", rows)
    if whole and len(rows) < _ROWS:
        return None
    last = len(rows) - 1
    return rows[max(last // 2, last - _OVERLAP)][0]  # the page that holds the last rows is rewritten again


def empty_log(path: Path) -> None:
    """Move the write-ahead log, which holds what was written lately, into the file. UnavailableError says what is in
    the way."""
    give_up = time.monotonic() + _PATIENCE_SECONDS
    try:
        # Without patience of its own: while it waited for a reader, nobody could write.
        with contextlib.closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as connection:
            while connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
                if time.monotonic() > give_up:
                    raise UnavailableError("a query that is going on needs the log of earlier writes")
                time.sleep(_PAUSE_SECONDS)
    except sqlite3.Error as error:
        raise UnavailableError(str(error)) from None


# --- copies ------------------------------------------------------------------------------------------------------


def back_up(path: Path, copy: Path) -> None:
    """Copy the store as it is at one moment, whoever writes meanwhile; the copy takes its name when it is complete.
    ConfigError if there is a file of that name, or the store is damaged."""
    path = check_file(path, reading=True)
    if copy.exists():
        raise ConfigError(f"{copy} exists already; choose another name")
    draft = copy.with_name(f"{copy.name}-part")
    try:
        draft.unlink(missing_ok=True)
        draft.touch(mode=0o600)  # prompts and the secret that keys are signed with
        with contextlib.closing(connect(path, "FULL", read_only=True)) as connection:
            connection.execute("VACUUM INTO ?", (str(draft),))
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(copy)
    except (OSError, sqlite3.Error) as error:
        draft.unlink(missing_ok=True)
        raise ConfigError(f"the store {path} cannot be copied to {copy}: {error}") from None
