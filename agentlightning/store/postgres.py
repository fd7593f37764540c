"""A store in PostgreSQL: its connections, its layout, and the notifications that tell other servers what changed.

This module knows psycopg and nothing of what the rows mean. It is imported only where a store's address is a
`postgresql://` URL.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus

from agentlightning.errors import ConfigError, UnavailableError
from agentlightning.store import codec, schema
from agentlightning.store.database import Connection, Cursor, Dialect, Trouble
from agentlightning.store.sqlite import Synchronous
from agentlightning.store.transaction import Changes

_LOCK: Final = 0x41474C53  # one server at a time lays out the tables
_LONGEST_SAYING: Final = 7900  # bytes; PostgreSQL refuses notifications of 8000
_PATIENCE_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = 0.25
_AGAIN: Final = (
    psycopg.errors.DeadlockDetected,
    psycopg.errors.SerializationFailure,
)
_LOST: Final = (
    psycopg.errors.AdminShutdown,
    psycopg.errors.CrashShutdown,
    psycopg.errors.CannotConnectNow,
)
_SETTINGS: Final = {
    "application_name": "agentlightning",
    "connect_timeout": 10,
    # A machine that vanished, or a cut cable, is noticed by probes instead of waiting for an answer for ever.
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
"""What a store's URL need not say."""
_MARKS: Final = "commit of "
_MARK: Final = """
INSERT INTO meta (name, value) SELECT %s, %s WHERE pg_current_xact_id_if_assigned() IS NOT NULL
ON CONFLICT (name) DO UPDATE SET value = excluded.value
"""
"""What a transaction leaves if it wrote anything: its time in nanoseconds, under its connection's name."""
_LAST_MARK: Final = """
INSERT INTO meta (name, value) VALUES (%s, '0') ON CONFLICT (name) DO UPDATE SET value = meta.value RETURNING value
"""
"""Waits for a transaction that is still at its commit."""
_OLD_MARKS: Final = """
DELETE FROM meta WHERE name LIKE ? AND extract(epoch FROM now()) - encode(value, 'escape')::float8 / 1e9 > 86400
"""
_log: Final = logging.getLogger(__name__)


class PostgresConnection:
    """One connection, for one thread at a time, that is made anew after it was lost."""

    dialect: Dialect = "postgres"
    for_update: str = " FOR UPDATE"
    skip_locked: str = " FOR UPDATE SKIP LOCKED"

    def __init__(self, url: str, synchronous: Synchronous, *, writing: bool = True) -> None:
        self._url = url
        self._writing = writing
        # A commit that is not waited for survives the death of the server, not a power cut, as NORMAL promises.
        self._options = "-c synchronous_commit=off" if synchronous == "NORMAL" else ""
        self._name = f"{_MARKS}{secrets.token_hex(8)}"
        self._raw = _connect(url, self._options)
        self._lost_since: float | None = None

    @property
    def in_transaction(self) -> bool:
        return self._raw.info.transaction_status not in (TransactionStatus.IDLE, TransactionStatus.UNKNOWN)

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> Cursor:
        known = [codec.text(value) if isinstance(value, str) else value for value in parameters]
        return self._raw.execute(_translated(sql), known)  # pyright: ignore[reportArgumentType]

    def settle(self) -> None:
        """Commit. Where the connection is lost meanwhile, the database is asked whether this transaction's mark is
        there. (Its number would not tell: a killed server gives those that it has forgotten to others.)"""
        mark = self._leave_mark() if self._writing else None
        try:
            self._raw.execute("COMMIT")
        except psycopg.Error as error:
            if mark is None or self.trouble(error) != "lost":
                raise
            if not self._was_committed(mark):
                self._raw.close()  # nothing was stored: the same as if it had been lost before
                raise

    def _leave_mark(self) -> bytes | None:
        mark = str(time.time_ns()).encode()
        return mark if self._raw.execute(_MARK, (self._name, mark)).rowcount else None

    def _was_committed(self, mark: bytes) -> bool:
        give_up = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < give_up:
            try:
                self.revive()
                with self._raw.transaction():
                    self._raw.execute("SET LOCAL lock_timeout = '10s'")
                    (last,) = self._raw.execute(_LAST_MARK, (self._name,)).fetchone() or (b"",)
                return bytes(last) == mark
            except psycopg.errors.LockNotAvailable:
                break
            except psycopg.Error as error:
                if self.trouble(error) != "lost":
                    raise
            except UnavailableError:
                break
        raise UnavailableError(
            "PostgreSQL was lost at a commit, and it is not known whether it was stored; repeat it with the same ids"
        )

    def close(self) -> None:
        self._raw.close()

    def trouble(self, error: Exception) -> Trouble | None:
        if isinstance(error, psycopg.Error) and (self._raw.closed or isinstance(error, _LOST)):
            self._raw.close()
            return "lost"
        if isinstance(error, _AGAIN):
            return "again"
        if isinstance(error, psycopg.errors.UniqueViolation):
            return "conflict"
        if isinstance(error, psycopg.DataError | psycopg.errors.ProgramLimitExceeded | UnicodeEncodeError):
            return "invalid"
        return "unavailable" if isinstance(error, psycopg.Error) else None

    def revive(self) -> None:
        if not self._raw.closed:
            return
        # Counted from the loss: who comes later does not wait as long again.
        lost_since = self._lost_since = self._lost_since or time.monotonic()
        while True:
            try:
                self._raw = _connect(self._url, self._options)
                self._lost_since = None
                return
            except psycopg.OperationalError as error:
                if time.monotonic() - lost_since > _PATIENCE_SECONDS:
                    raise UnavailableError(f"PostgreSQL cannot be reached; nothing was stored: {error}") from None
                time.sleep(_PAUSE_SECONDS)


@functools.lru_cache(maxsize=1024)
def _translated(sql: str) -> str:
    return sql.replace("?", "%s")


def _connect(url: str, options: str = "") -> psycopg.Connection[tuple[Any, ...]]:
    settings: dict[str, Any] = {**_SETTINGS, **conninfo_to_dict(url)}
    settings["options"] = f"{settings.get('options', '')} {options}".strip()
    return psycopg.connect("", autocommit=True, **settings)


def open_database(url: str, synchronous: Synchronous, *, writing: bool = True) -> PostgresConnection:
    """A connection to a database that holds a store of the present layout, made or brought there if need be.
    ConfigError if it holds something else; UnavailableError if it cannot be reached."""
    try:
        connection = PostgresConnection(url, synchronous, writing=writing)
    except psycopg.ProgrammingError as error:
        raise ConfigError(f"the store's URL cannot be used: {error}") from None
    except psycopg.Error as error:
        raise UnavailableError(f"PostgreSQL cannot be reached: {error}") from None
    try:
        connection.execute("BEGIN")
        connection.execute("SELECT pg_advisory_xact_lock(?)", (_LOCK,))
        _lay_out(connection)
        if writing:
            connection.execute(_OLD_MARKS, (f"{_MARKS}%",))
        connection.execute("COMMIT")
    except psycopg.Error as error:
        lost = connection.trouble(error) == "lost"
        connection.close()
        if lost:
            raise UnavailableError(f"PostgreSQL was lost while the store was opened: {error}") from None
        raise ConfigError(f"the store cannot be laid out in PostgreSQL: {error}") from None
    except ConfigError:
        connection.close()
        raise
    return connection


def _lay_out(connection: PostgresConnection) -> None:
    tables = {
        name for (name,) in connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = current_schema()")
    }
    version = 0
    if tables:
        if not {"meta", "rollouts", "spans"} <= tables:
            raise ConfigError(
                f"the database holds tables that are not a store's ({', '.join(sorted(tables)[:5])} …); it was left "
                "as it is. Give the store a database, or a schema (?options=-csearch_path%3Dname), of its own"
            )
        row = connection.execute("SELECT value FROM meta WHERE name = 'layout'").fetchone()
        version = int(bytes(row[0])) if row is not None else -1
        schema.check_version(version, "the database")
    if version == schema.VERSION:
        return
    schema.migrate(connection, version)
    connection.execute(
        "INSERT INTO meta (name, value) VALUES ('layout', ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
        (str(schema.VERSION).encode(),),
    )


def read_clock(connection: PostgresConnection) -> float:
    """The database's own time, which all servers on it share."""
    (now,) = connection.execute("SELECT EXTRACT(EPOCH FROM clock_timestamp())::float8").fetchone()
    return now


def channel_of(secret: bytes) -> str:
    """Where the servers of one store talk: other schemas of the database may hold other stores."""
    return f"agentlightning_{hashlib.sha256(secret).hexdigest()[:32]}"


def notify(connection: Connection, channel: str, origin: str, changes: Changes) -> None:
    """Tell the other servers, at the commit, what this transaction changed; of more than a notification holds, only
    that there was something."""
    if changes == Changes():
        return
    said = base64.b64encode(msgspec.msgpack.encode(changes)).decode()
    payload = f"{origin} {said if len(said) <= _LONGEST_SAYING else ''}"
    connection.execute("SELECT pg_notify(?, ?)", (channel, payload))


def scrub(url: str) -> None:
    """Write the tables anew, so that nothing is left in their files of rows that were removed. Others wait meanwhile.
    UnavailableError says what is in the way."""
    try:
        with psycopg.connect(url, autocommit=True, connect_timeout=10) as connection:
            for table in ("rollouts", "attempts", "spans"):
                connection.execute(f"VACUUM (FULL) {table}")
    except psycopg.Error as error:
        raise UnavailableError(str(error)) from None


class Listener:
    """Hears, in a thread of its own, what other servers changed. `heard` gets their changes, and None after the
    connection was lost for a while, or for more changes than fit a notification, or for what another release says: then
    anything may have changed."""

    def __init__(self, url: str, channel: str, origin: str, heard: Callable[[Changes | None], None]) -> None:
        self._url = url
        self._channel = channel
        self._origin = origin
        self._heard = heard
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="agl-store-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _listen(self) -> None:
        lost = False
        while not self._stopping.is_set():
            try:
                with _connect(self._url) as connection:
                    connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._channel)))
                    if lost:
                        _log.warning("listening for the changes of other servers again")
                        lost = False
                    self._heard(None)
                    while not self._stopping.is_set():
                        for notice in connection.notifies(timeout=0.5):
                            self._hear(notice.payload)
            except psycopg.Error as error:
                if not lost:  # said once, however long it lasts
                    _log.warning("not listening for the changes of other servers, trying until it works: %s", error)
                lost = True
                self._stopping.wait(_PAUSE_SECONDS)

    def _hear(self, payload: str) -> None:
        origin, _, encoded = payload.partition(" ")
        if origin == self._origin:
            return
        try:
            changes = msgspec.msgpack.decode(base64.b64decode(encoded), type=Changes)
        except (msgspec.DecodeError, ValueError):
            changes = None
        self._heard(changes)
