"""Opening a store's database: the connections to write and to read with.

This module knows which kind of database an address means; it does not know what is done with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final

from agentlightning.errors import imported
from agentlightning.store import sqlite
from agentlightning.store.database import Connection

_READERS: Final = 2  # of each kind


@dataclass(frozen=True)
class Opened:
    """An open database, which this process owns. Connections to search with are apart from those to read with, so that
    slow queries hold up nobody else; without any, the one to write with does everything. Rows are looked up by their
    id with `at_hand`, on the event loop, which takes less time than to ask a thread. `rewrite` (of a table, after a
    row) is called by the writer until it returns None, and then `clean_up` by any thread: then no trace is left of what
    was removed. `release` is for when all is closed."""

    writing: Connection
    reading: Sequence[Connection]
    searching: Sequence[Connection]
    secret: bytes
    begin: str
    release: Callable[[], None]
    now: float
    at_hand: Connection | None = None
    rewrite: Callable[[str, int], int | None] = lambda table, after: None
    clean_up: Callable[[], None] = lambda: None


def is_postgres(address: str | Path) -> bool:
    return str(address).startswith(("postgresql://", "postgres://"))


def open_sqlite(address: str, synchronous: sqlite.Synchronous) -> Opened:
    """The store in a file, which this process then owns, or one in memory."""
    if address == ":memory:":
        memory = sqlite.connect_memory()
        return Opened(memory, (), (), read_secret(memory), "BEGIN IMMEDIATE", _nothing, time.time())
    path = sqlite.check_file(Path(address))
    owner = sqlite.own(path)
    try:
        sqlite.prepare_file(path)
        writing = sqlite.connect(path, synchronous)
        reading = [sqlite.connect(path, synchronous, read_only=True) for _ in range(2 * _READERS)]
        # Closed last, and not read-only: the last connection to close moves the log into the file.
        at_hand = sqlite.connect(path, synchronous)

        def release() -> None:
            at_hand.close()
            owner.close()

        return Opened(
            writing,
            reading[:_READERS],
            reading[_READERS:],
            read_secret(writing),
            "BEGIN IMMEDIATE",
            release,
            time.time(),
            at_hand=at_hand,
            rewrite=lambda table, after: sqlite.rewrite(writing, table, after),
            clean_up=lambda: sqlite.empty_log(path),
        )
    except BaseException:
        owner.close()
        raise


def open_postgres(url: str, synchronous: sqlite.Synchronous, seconds: float) -> Opened:
    """The store in a PostgreSQL database, which this process then owns. What is read is limited to so many seconds."""
    postgres = psycopg_store()
    writing = postgres.open_owner(url, synchronous)
    reading = [postgres.PostgresConnection(url, owner=writing, seconds=seconds) for _ in range(2 * _READERS)]
    return Opened(
        writing,
        reading[:_READERS],
        reading[_READERS:],
        read_secret(writing),
        "BEGIN ISOLATION LEVEL READ COMMITTED",  # whatever the database's default
        _nothing,
        postgres.read_clock(writing),
        clean_up=lambda: postgres.vacuum(url),
    )


def psycopg_store() -> ModuleType:
    """`store.postgres`; ConfigError where it cannot be imported."""
    return imported("agentlightning.store.postgres", "a store in PostgreSQL", "agent-lightning-next[postgres]")


def _nothing() -> None:
    """There is nothing to do."""


def read_secret(connection: Connection) -> bytes:
    """What the store signs its attempts' keys with."""
    return bytes(connection.execute("SELECT value FROM meta WHERE name = 'secret'").fetchone()[0])
