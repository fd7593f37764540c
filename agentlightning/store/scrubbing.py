"""Writing a database's files anew, so that nothing is left in them of what was removed.

Removing rows is not enough: a database moves rows about within its pages and leaves what was there before, even where
it overwrites what is deleted. This module knows files and connections; it does not know what the rows mean.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path
from typing import Final

from agentlightning.errors import UnavailableError

_TABLES: Final = ("rollouts", "attempts", "spans")
_PATIENCE_SECONDS: Final = 60.0
_PAUSE_SECONDS: Final = 0.1


def scrub(address: str) -> None:
    """Write the database at a store's address anew, with what it holds now and nothing else. Others wait meanwhile.

    UnavailableError says what is in the way: no space for a second copy, or a query that has been going on for long."""
    if address == ":memory:":
        return
    try:
        if address.startswith(("postgresql://", "postgres://")):
            _scrub_postgres(address)
        else:
            _scrub_sqlite(Path(address))
    except UnavailableError as error:
        raise UnavailableError(
            f"what matched was removed, but traces of it are left in the database's files: {error}. Ask again later"
        ) from None


def _scrub_sqlite(path: Path) -> None:
    try:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None, timeout=_PATIENCE_SECONDS)) as connection:
            connection.execute("VACUUM")
            _empty_log(connection)
    except sqlite3.Error as error:
        raise UnavailableError(str(error)) from None


def _empty_log(connection: sqlite3.Connection) -> None:
    """Move the write-ahead log, which holds what was written lately, into the file."""
    give_up = time.monotonic() + _PATIENCE_SECONDS
    while True:
        (blocked, *_) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if not blocked:
            return
        if time.monotonic() > give_up:
            raise UnavailableError("a query that is going on needs the log of earlier writes")
        time.sleep(_PAUSE_SECONDS)


def _scrub_postgres(url: str) -> None:
    import psycopg  # here, as only stores in PostgreSQL have it installed

    try:
        with psycopg.connect(url, autocommit=True, connect_timeout=10) as connection:
            for table in _TABLES:
                connection.execute(f"VACUUM (FULL) {table}")
    except psycopg.Error as error:
        raise UnavailableError(str(error)) from None
