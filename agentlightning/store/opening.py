"""Opening a store's database: the connections to write and to read with, and how servers that share it talk.

This module knows which kind of database an address means; it does not know what is done with it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from agentlightning.errors import ConfigError
from agentlightning.store import sqlite
from agentlightning.store.codec import new_id
from agentlightning.store.database import Connection
from agentlightning.store.transaction import Changes

_READERS: Final = 3
Hear: TypeAlias = Callable[[Changes | None], None]


@dataclass(frozen=True)
class Opened:
    """An open database. Without connections to read with, the one to write with does both. `at_hand`, if there is one,
    is for the event loop itself to look rows up by their id, which takes less time than to ask a thread. `shared` says
    that other servers may use it too: `notify`, inside a transaction, tells them what it changes, and `listen` begins
    to hear of theirs, on the running event loop. `scrub` writes its files anew, without a trace of what was removed.
    `release` is for when all connections are closed."""

    writing: Connection
    reading: Sequence[Connection]
    secret: bytes
    begin: str
    scrub: Callable[[], None]
    release: Callable[[], None]
    now: float
    at_hand: Connection | None = None
    shared: bool = False
    notify: Callable[[Connection, Changes], None] = lambda connection, changes: None
    listen: Callable[[Hear], None] = lambda hear: None


def open_sqlite(address: str, synchronous: sqlite.Synchronous) -> Opened:
    """The store in a file, which this process then owns, or one in memory."""
    if address == ":memory:":
        memory = sqlite.connect_memory()
        return Opened(memory, (), read_secret(memory), "BEGIN IMMEDIATE", _nothing, _nothing, time.time())
    path = sqlite.check_file(Path(address))
    owner = sqlite.own(path)
    try:
        sqlite.prepare_file(path)
        writing = sqlite.connect(path, synchronous)
        reading = [sqlite.connect(path, synchronous, read_only=True) for _ in range(_READERS)]
        # Closed last, and not read-only: the last connection to close moves the log into the file.
        at_hand = sqlite.connect(path, synchronous)

        def release() -> None:
            at_hand.close()
            owner.close()

        return Opened(
            writing,
            reading,
            read_secret(writing),
            "BEGIN IMMEDIATE",
            lambda: sqlite.scrub(path),
            release,
            time.time(),
            at_hand=at_hand,
        )
    except BaseException:
        owner.close()
        raise


def open_postgres(url: str, synchronous: sqlite.Synchronous) -> Opened:
    """The store in a PostgreSQL database, which other servers may share."""
    try:
        from agentlightning.store import postgres
    except ImportError:
        raise ConfigError(
            "a store in PostgreSQL needs psycopg; install it with: pip install 'agent-lightning-next[postgres]'"
        ) from None

    writing = postgres.open_database(url, synchronous)
    reading = [postgres.open_database(url, synchronous, writing=False) for _ in range(_READERS)]
    secret = read_secret(writing)
    channel, origin = postgres.channel_of(secret), new_id("server")
    listeners: list[postgres.Listener] = []

    def listen(hear: Hear) -> None:
        loop = asyncio.get_running_loop()

        def heard(changes: Changes | None) -> None:
            loop.call_soon_threadsafe(hear, changes)

        listeners.append(postgres.Listener(url, channel, origin, heard))

    def release() -> None:
        for listener in listeners:
            listener.close()

    return Opened(
        writing,
        reading,
        secret,
        # Whatever the database's default: groups are complete by what other servers have just committed.
        "BEGIN ISOLATION LEVEL READ COMMITTED",
        lambda: postgres.scrub(url),
        release,
        postgres.read_clock(writing),
        shared=True,
        notify=lambda connection, changes: postgres.notify(connection, channel, origin, changes),
        listen=listen,
    )


def _nothing() -> None:
    """What lives in memory alone leaves nothing behind."""


def read_secret(connection: Connection) -> bytes:
    """What the store signs its attempts' keys with."""
    return bytes(connection.execute("SELECT value FROM meta WHERE name = 'secret'").fetchone()[0])
