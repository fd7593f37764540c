"""A store in PostgreSQL: ownership, connections and layout.

This module knows psycopg, and not what the rows mean. It is imported only for `postgresql://`
addresses."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import secrets
import socket
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus

from agentlightning.errors import ConfigError, InUseError, UnavailableError
from agentlightning.store import codec, tables
from agentlightning.store.database import READERS, Cursor, Dialect, Opened, Trouble
from agentlightning.store.sqlite import Synchronous

_LOCK: Final = 0x41474C53  # with a hash of the schema: who has it owns the store
_PATIENCE_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = 0.25
_TAKE_SECONDS: Final = 3.0  # for the sessions of a process that has just died to end
_FETCHED: Final = 32  # rows at a time
_LOST: Final = (
    psycopg.errors.AdminShutdown,
    psycopg.errors.CrashShutdown,
    psycopg.errors.CannotConnectNow,
)
_SETTINGS: Final = {
    "connect_timeout": 10,
    # A machine that vanished, or a cut cable, is noticed by probes instead of waiting for an answer
    # for ever.
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
"""What a store's URL need not say."""
_PROBES: Final = "-c tcp_keepalives_idle=10 -c tcp_keepalives_interval=5 -c tcp_keepalives_count=3"
"""The same at PostgreSQL's end: a machine that vanished must not own the store for hours."""
_TAKE: Final = "SELECT pg_try_advisory_lock(%s, hashtext(COALESCE(current_schema(), '')))"
_HOLDERS: Final = """
FROM pg_locks JOIN pg_stat_activity USING (pid)
WHERE locktype = 'advisory' AND classid = %s::oid AND objsubid = 2 AND granted
AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
AND objid = hashtext(COALESCE(current_schema(), ''))::oid
"""
_NUMBER: Final = "INSERT INTO meta (name, value) VALUES ('layout', ?)"
_MARK: Final = """
INSERT INTO meta (name, value)
SELECT 'last commit', %s WHERE pg_current_xact_id_if_assigned() IS NOT NULL
ON CONFLICT (name) DO UPDATE SET value = excluded.value
"""
"""What a transaction leaves if it wrote anything: whose it is and its time in nanoseconds."""


class PostgresConnection:
    """One connection, for one thread at a time, which reconnects after a loss. The writing
    connection owns the store; others name it as `owner` and read for the same process, each
    statement for at most so many `seconds`."""

    dialect: Dialect = "postgres"

    def __init__(
        self,
        url: str,
        *,
        writing: Synchronous | None = None,
        owner: PostgresConnection | None = None,
        seconds: float = math.inf,
    ) -> None:
        self._url = url
        self._writing = writing is not None
        self._owner = owner
        self._seconds = seconds
        self._give_up = math.inf
        self._options = _PROBES
        if writing is None:
            self._options += " -c default_transaction_read_only=on"
        elif writing == "NORMAL":
            # A commit that is not waited for survives the death of the server, not a power cut.
            self._options += " -c synchronous_commit=off"
        if seconds < math.inf:
            self._options += f" -c statement_timeout={_milliseconds(seconds)}"
        # What others are shown of who owns the store; PostgreSQL keeps 63 bytes.
        self._name = (
            f"agentlightning {secrets.token_hex(4)} on {socket.gethostname()[:16]!a} (pid "
            f"{os.getpid()})"
        )
        self._superseded = False
        self._raw = _connect(url, self._options, self._name)
        self._lost_since: float | None = None

    @property
    def in_transaction(self) -> bool:
        return self._raw.info.transaction_status not in (
            TransactionStatus.IDLE,
            TransactionStatus.UNKNOWN,
        )

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> Cursor:
        return self._raw.execute(_translated(sql), _storable(parameters))  # pyright: ignore[reportArgumentType]

    def stream(self, sql: str, parameters: Sequence[Any] = (), /) -> Iterator[Any]:
        with self._raw.cursor(name="page") as cursor:
            cursor.itersize = _FETCHED
            for row in cursor.execute(_translated(sql), _storable(parameters)):  # pyright: ignore[reportArgumentType]
                if time.monotonic() > self._give_up:
                    raise psycopg.errors.QueryCanceled("looking at all its rows takes too long")
                yield row

    @contextlib.contextmanager
    def limited(self, seconds: float) -> Generator[None]:
        if seconds != self._seconds:
            self._raw.execute(f"SET LOCAL statement_timeout = {_milliseconds(seconds)}".encode())
        self._give_up = time.monotonic() + seconds  # of all that is fetched for one query
        yield

    def commit(self) -> None:
        """If the connection is lost meanwhile, look for this transaction's mark in the database.
        (Its number would not do: a killed server reuses numbers.)"""
        mark = self._write_commit_mark() if self._writing else None
        try:
            self._raw.execute("COMMIT")
        except psycopg.Error as error:
            if mark is None or self.trouble(error) != "lost":
                raise
            if not self._was_committed(mark):
                self._raw.close()  # nothing was stored: the same as if it had been lost before
                raise

    def _write_commit_mark(self) -> bytes | None:
        mark = f"{self._name} {time.time_ns()}".encode()
        return mark if self._raw.execute(_MARK, (mark,)).rowcount else None

    def _was_committed(self, mark: bytes) -> bool:
        """Called after owning the store again, which waits for the lost connection's transaction to
        end."""
        give_up = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < give_up:
            try:
                self.revive()
                return self._last_mark() == mark
            except psycopg.Error as error:
                if self.trouble(error) != "lost":
                    raise
            except UnavailableError:
                break
        raise UnavailableError(
            "PostgreSQL was lost at a commit, and it is not known whether it was stored; repeat "
            "it with the same ids"
        )

    def _last_mark(self) -> bytes:
        row = self._raw.execute("SELECT value FROM meta WHERE name = 'last commit'").fetchone()
        return b"" if row is None else bytes(row[0])

    def close(self) -> None:
        self._raw.close()

    def trouble(self, error: Exception) -> Trouble | None:
        if isinstance(error, psycopg.Error) and (self._raw.closed or isinstance(error, _LOST)):
            self._raw.close()
            return "lost"
        if isinstance(error, psycopg.errors.QueryCanceled):
            return "overdue"
        if isinstance(error, psycopg.errors.UniqueViolation):
            return "conflict"
        if isinstance(
            error, psycopg.DataError | psycopg.errors.ProgramLimitExceeded | UnicodeEncodeError
        ):
            return "invalid"
        return "unavailable" if isinstance(error, psycopg.Error) else None

    def take(self, patience: float = 0.0) -> None:
        """Own the store as long as this connection lives. InUseError names the owner after so many
        seconds."""
        give_up = time.monotonic() + patience
        while self._raw.execute(_TAKE, (_LOCK,)).fetchone() != (True,):
            if time.monotonic() >= give_up:
                raise self._in_use()
            time.sleep(_PAUSE_SECONDS)

    def _in_use(self) -> InUseError:
        holder = self._raw.execute(
            "SELECT application_name, host(client_addr), backend_start" + _HOLDERS, (_LOCK,)
        ).fetchone()
        name, address, since = holder or ("another session", None, "just now")
        return InUseError(
            f"the store in PostgreSQL is in use by {name}, from {address or 'its own machine'}, "
            f"since {since}; one process at a time may have it: ask that process's server, or end "
            "it"
        )

    def _take_again(self) -> None:
        """Own the store again after an interruption. UnavailableError if another process owned it
        meanwhile."""
        # The lost connection may live on at the server's end, which hears nothing of a cut cable.
        self._raw.execute(
            "SELECT pg_terminate_backend(pid)" + _HOLDERS + "AND application_name = %s",
            (_LOCK, self._name),
        )
        self.take()
        if not self._last_mark().startswith(self._name.encode()):
            self._superseded = True
            self._raw.close()
            self._refuse_if_superseded()

    def _refuse_if_superseded(self) -> None:
        if (self._owner or self)._superseded:
            raise UnavailableError(
                "the connection to PostgreSQL was lost, and another server has used the store "
                "since, so that what this one remembers may be wrong; restart this server"
            )

    def revive(self) -> None:
        self._refuse_if_superseded()
        if not self._raw.closed:
            return
        # Counted from the loss: who comes later does not wait as long again.
        lost_since = self._lost_since = self._lost_since or time.monotonic()
        while True:
            try:
                self._raw = _connect(self._url, self._options, self._name)
                if self._writing:
                    self._take_again()
                self._lost_since = None
                return
            except (psycopg.Error, InUseError) as error:  # the database may be there, and empty
                self._raw.close()
                if time.monotonic() - lost_since > _PATIENCE_SECONDS:
                    raise UnavailableError(
                        f"PostgreSQL cannot be used; nothing was stored: {error}"
                    ) from None
                time.sleep(_PAUSE_SECONDS)


def _milliseconds(seconds: float) -> int:
    return 0 if seconds == math.inf else max(1, round(1000 * seconds))


def _storable(parameters: Sequence[Any]) -> list[Any]:
    return [codec.text(value) if isinstance(value, str) else value for value in parameters]


@functools.lru_cache(maxsize=1024)
def _translated(sql: str) -> str:
    return sql.replace("?", "%s")


def _connect(url: str, options: str, name: str) -> psycopg.Connection[tuple[Any, ...]]:
    settings: dict[str, Any] = {**_SETTINGS, **conninfo_to_dict(url)}
    settings["options"] = f"{settings.get('options', '')} {options}".strip()
    settings["application_name"] = name
    return psycopg.connect("", autocommit=True, **settings)


def open_owner(url: str, synchronous: Synchronous) -> PostgresConnection:
    """The writing connection of a store, which this process then owns; the store is created if
    missing. ConfigError if the database holds something else; InUseError if another process owns
    the store; UnavailableError if PostgreSQL cannot be reached."""
    with _opening(url, writing=synchronous) as connection:
        connection.take(_TAKE_SECONDS)
        connection.execute("BEGIN")
        layout = _layout(connection)
        if layout is None:
            tables.create(connection)
            connection.execute(_NUMBER, (str(tables.VERSION).encode(),))
        connection.execute("SELECT pg_current_xact_id()")  # so that there is a mark in any case
        connection.commit()
    return connection


def is_owned(url: str, connection: PostgresConnection) -> bool:
    """Whether a process has the store open for writing."""
    return (
        connection.execute("SELECT 1" + _HOLDERS.replace("%s", "?"), (_LOCK,)).fetchone()
        is not None
    )


def open_reader(url: str) -> PostgresConnection:
    """A connection for reading a store that anyone may own. ConfigError if there is none, or one of
    another layout."""
    with _opening(url) as connection:
        if _layout(connection) is None:
            raise ConfigError("the database holds no store of this release")
    return connection


@contextlib.contextmanager
def _opening(url: str, writing: Synchronous | None = None) -> Generator[PostgresConnection]:
    try:
        connection = PostgresConnection(url, writing=writing)
    except psycopg.ProgrammingError as error:
        raise ConfigError(f"the store's URL cannot be used: {error}") from None
    except psycopg.Error as error:
        raise UnavailableError(f"PostgreSQL cannot be reached: {error}") from None
    try:
        yield connection
    except psycopg.Error as error:
        lost = connection.trouble(error) == "lost"
        connection.close()
        if lost:
            raise UnavailableError(
                f"PostgreSQL was lost while the store was opened: {error}"
            ) from None
        raise ConfigError(f"the store in PostgreSQL cannot be opened: {error}") from None
    except BaseException:
        connection.close()
        raise


def _layout(connection: PostgresConnection) -> int | None:
    """The layout of the store in the database; None if it is empty. ConfigError if it holds
    something else."""
    found = {
        name
        for (name,) in connection.execute(
            "SELECT tablename FROM pg_tables WHERE schemaname = current_schema()"
        )
    }
    if not found:
        return None
    if not {"meta", "rollouts", "spans"} <= found:
        raise ConfigError(
            f"the database holds tables that are not a store's ({', '.join(sorted(found)[:5])} "
            "…); it was left as it is. Give the store a database, or a schema "
            "(?options=-csearch_path%3Dname), of its own"
        )
    row = connection.execute("SELECT value FROM meta WHERE name = 'layout'").fetchone()
    layout = -1 if row is None else int(bytes(row[0]))
    tables.check_version(layout, "the database")
    return layout


def open_store(url: str, synchronous: Synchronous, read_seconds: float) -> Opened:
    """The store in a database, which this process then owns. Reads are limited to so many
    seconds."""
    writing = open_owner(url, synchronous)
    reading = [
        PostgresConnection(url, owner=writing, seconds=read_seconds) for _ in range(2 * READERS)
    ]
    # The database's own time, which is the same from whatever machine the store is opened.
    (now,) = writing.execute("SELECT EXTRACT(EPOCH FROM clock_timestamp())::float8").fetchone()
    begin = "BEGIN ISOLATION LEVEL READ COMMITTED"  # whatever the database's default
    return Opened(
        writing, reading[:READERS], reading[READERS:], begin, now, clean_up=lambda: _vacuum(url)
    )


def _vacuum(url: str) -> None:
    """Free the space of deleted rows while others work. UnavailableError says what prevents it."""
    try:
        with psycopg.connect(url, autocommit=True, connect_timeout=10) as connection:
            connection.execute("VACUUM rollouts, attempts, spans")
    except psycopg.Error as error:
        raise UnavailableError(str(error)) from None
