"""A store's SQLite file: recognises, creates, locks and opens it.

Files of other programs are refused and never changed. It does not know what the rows mean.
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
from agentlightning.store import tables
from agentlightning.store.database import READERS, Dialect, Opened, Trouble

APPLICATION_ID: Final = 0x41474C53  # "AGLS", in the header of every store's file

Synchronous: TypeAlias = Literal["FULL", "NORMAL"]

_BEGIN: Final = "BEGIN IMMEDIATE"
_PATIENCE: Final = 600_000  # milliseconds; only a file that is written anew keeps others waiting
_CLAIM_SECONDS: Final = 0.25
_READERS_PATIENCE: Final = 15.0  # seconds, for queries that run; more than the limit of one
_STEPS: Final = 1000  # of SQLite's machine between two looks at the clock: some 20 µs
_ENDINGS: Final = ("", "-wal", "-shm", "-owner")
_owned: Final = set[Path]()
"""The stores that this process owns. Closing their files here, other than by SQLite, would let go
of the locks that SQLite has on them: POSIX counts locks by process."""


class StoreFiles:
    """The files of an open store, which stay where they are and do not shrink, except when a VACUUM
    of the store itself is `rewriting` them."""

    def __init__(self, path: Path) -> None:
        self._opened = {f"{path}{end}": os.stat(f"{path}{end}") for end in _ENDINGS}
        self._sizes = {str(path): 0, f"{path}-wal": 0}
        self._rewriting = False

    def check(self) -> None:
        """UnavailableError if what is written now would not be found at the store's path."""
        for name, opened in self._opened.items():
            try:
                found = os.stat(name)
            except OSError as error:
                raise _moved(name, f"is not there ({error.strerror})") from None
            if (found.st_dev, found.st_ino) != (opened.st_dev, opened.st_ino):
                raise _moved(name, "is another file than the one that was opened")
            if not self._rewriting and found.st_size < self._sizes.get(name, 0):
                raise _moved(name, f"was cut from {self._sizes[name]} to {found.st_size} bytes")

    def note_sizes(self) -> None:
        with contextlib.suppress(OSError):  # which the next check reports
            for name in self._sizes:
                self._sizes[name] = os.stat(name).st_size

    @contextlib.contextmanager
    def rewriting(self) -> Generator[None]:
        self._rewriting = True
        try:
            yield
        finally:
            self.note_sizes()
            self._rewriting = False


def _moved(name: str, how: str) -> UnavailableError:
    return UnavailableError(
        f"{name} {how}, so that nothing more is written; put the file back, or export what can "
        "still be read, stop the server, restore a backup and start it"
    )


class SqliteConnection(sqlite3.Connection):
    """One connection, for one thread at a time."""

    dialect: Dialect = "sqlite"
    files: StoreFiles | None = None

    def commit(self) -> None:
        """UnavailableError, and nothing is written, if the files are no longer where they were
        opened."""
        if self.files is None:
            super().commit()
            return
        self.files.check()
        super().commit()
        self.files.note_sizes()

    def trouble(self, error: Exception) -> Trouble | None:
        if (
            isinstance(error, sqlite3.Error)
            and getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_INTERRUPT
        ):
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

    def revive(self) -> None:
        """Files do not lose their connection."""


def check_file(path: Path, *, reading: bool = False) -> Path:
    """The real path of the file, after links; nothing is changed. ConfigError if it is not a store
    of this version, cannot be written (unless for `reading`), or has several names."""
    path = Path(os.path.realpath(path))  # what lies beside a store is beside the file itself
    if path in _owned:
        return path
    log = path.with_name(f"{path.name}-wal")
    try:
        for part in ("", "-wal", "-shm", "-journal", "-owner"):
            file = path.with_name(f"{path.name}{part}")
            if file.exists() and not file.is_file():  # to open a pipe or a device may wait for ever
                raise _unusable(file, ValueError("it is no regular file"))
        if not path.exists() or path.stat().st_size == 0:
            if log.exists() and log.stat().st_size > 0:
                raise ConfigError(
                    f"the store {path} is missing, but its log {log.name} is there; put the store "
                    "back, or move the log away if the store is lost"
                )
            return path
        # Read as bytes: opening a foreign database with SQLite could already change files beside
        # it.
        with path.open("rb") as file:
            header = file.read(100)
        names = path.stat().st_nlink
    except OSError as error:
        raise _unusable(path, error) from None
    if (
        not header.startswith(b"SQLite format 3\x00")
        or int.from_bytes(header[68:72], "big") != APPLICATION_ID
    ):
        raise ConfigError(
            f"{path} is not an Agent Lightning store; it was left unchanged. Choose another path"
        )
    tables.check_version(int.from_bytes(header[60:64], "big"), f"the store {path}")
    if names > 1:
        raise ConfigError(
            f"the store {path} has {names} names (hard links), and SQLite would keep a log of its "
            "own beside each; remove the others, and make copies with `agl store backup`"
        )
    if not reading and not os.access(path, os.W_OK):
        raise _unusable(path, PermissionError("no permission to write it"))
    # pages that a crash left in its log may be missing
    if not log.exists() or log.stat().st_size == 0:
        page_size = int.from_bytes(header[16:18], "big")
        pages = int.from_bytes(header[28:32], "big")
        expected = pages * (65536 if page_size == 1 else page_size)
        size = path.stat().st_size
        if size < expected:  # as of an interrupted copy
            raise _damaged(path, ValueError(f"it has {size} bytes and should have {expected}"))
    return path


def own(path: Path) -> sqlite3.Connection:
    """Lock the file for this process, until the returned connection is closed or the process dies.

    Waiting callers are woken within one process, so other processes must use its server:
    ConfigError says so if the file is locked, or that the directory cannot be written."""
    claim = path.with_name(f"{path.name}-owner")
    if path in _owned:
        raise _in_use(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        claim.touch()
        # `is_owned` holds it for a moment.
        connection = sqlite3.connect(
            claim, isolation_level=None, check_same_thread=False, timeout=_CLAIM_SECONDS
        )
    except OSError as error:
        raise _unusable(path, error) from None
    try:
        connection.execute("BEGIN EXCLUSIVE")
    except sqlite3.Error as error:
        connection.close()
        if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
            raise _in_use(path) from None
        raise _unusable(path, error) from None
    return connection


def _in_use(path: Path) -> InUseError:
    return InUseError(
        f"the store {path} is in use by another process; use that process's server, or choose "
        "another path"
    )


def is_owned(address: str, connection: SqliteConnection) -> bool:
    """Whether a process has the store open for writing."""
    claim = Path(f"{os.path.realpath(address)}-owner")
    try:
        with contextlib.closing(
            sqlite3.connect(f"{claim.as_uri()}?mode=ro", uri=True, timeout=0)
        ) as asking:
            asking.execute("SELECT 1 FROM sqlite_master").fetchall()
    except sqlite3.Error as error:
        return error.sqlite_errorcode == sqlite3.SQLITE_BUSY
    return False


def prepare_file(path: Path) -> None:
    """Create a store at `path` if there is no file."""
    try:
        if not path.exists() or path.stat().st_size == 0:
            # Laid out under another name and then moved, so that a crash never leaves half a store
            # behind.
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
    tables.create(connection)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {tables.VERSION}")
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
    return ConfigError(
        f"the store {path} cannot be used: {reason}. Choose a place that you may write to"
    )


def _damaged(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"the store {path} is damaged and was left unchanged: {error}. Restore a backup"
    )


def connect(path: Path, synchronous: Synchronous, *, read_only: bool = False) -> SqliteConnection:
    """A connection to a prepared file, to be used by one thread at a time. ConfigError if the file
    is damaged."""
    uri = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rw'}"
    try:
        connection = _open(uri, uri=True)
    except sqlite3.Error as error:
        raise _unusable(path, error) from None
    try:
        connection.execute(f"PRAGMA busy_timeout = {_PATIENCE}")
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute("PRAGMA secure_delete = ON")
        connection.execute("PRAGMA cache_size = -16000")  # KiB
        connection.execute("SELECT value FROM meta WHERE name = 'secret'").fetchone()
    except sqlite3.Error as error:
        connection.close()
        raise _damaged(path, error) from None
    return connection


def open_store(address: str, synchronous: Synchronous, read_seconds: float) -> Opened:
    """The store in a file, which this process then owns, or a store in memory. The caller limits
    queries."""
    if address == ":memory:":
        memory = _open(":memory:")
        _lay_out(memory)
        return Opened(memory, (), (), _BEGIN, time.time(), clean_up=lambda: None)
    path = check_file(Path(address))
    owner = own(path)
    try:
        prepare_file(path)
        writing = connect(path, synchronous)
        reading = [connect(path, synchronous, read_only=True) for _ in range(2 * READERS)]
        # Closed last, and not read-only: the last connection to close moves the log into the file.
        at_hand = connect(path, synchronous)
        writing.files = files = StoreFiles(path)
    except BaseException:
        owner.close()
        raise
    _owned.add(path)

    def clean_up() -> None:
        with files.rewriting():
            _vacuum(path)

    def release() -> None:
        at_hand.close()
        owner.close()
        _owned.discard(path)

    return Opened(
        *(writing, reading[:READERS], reading[READERS:], _BEGIN, time.time()),
        clean_up=clean_up,
        release=release,
        at_hand=at_hand,
    )


def open_reader(address: str) -> SqliteConnection:
    """A connection for reading a store that anyone may own. ConfigError if there is none, or it is
    damaged."""
    path = check_file(Path(address), reading=True)
    # A connection that may write puts the log away if it is the last to close.
    connection = connect(path, "FULL", read_only=not os.access(path, os.W_OK))
    connection.execute("PRAGMA query_only = ON")
    return connection


def _vacuum(path: Path) -> None:
    """Rewrite the file and empty its log while writers wait, so that deleted data are overwritten,
    including copies in moved pages. UnavailableError says what prevents it."""
    try:
        with contextlib.closing(connect(path, "FULL")) as connection:
            # the new file is made there: memory may not hold it
            connection.execute("PRAGMA temp_store = FILE")
            connection.execute("VACUUM")
            connection.execute(f"PRAGMA busy_timeout = {1000 * _READERS_PATIENCE:.0f}")
            give_up = time.monotonic() + _READERS_PATIENCE
            while connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
                if time.monotonic() > give_up:
                    raise UnavailableError("a running query still needs the log of earlier writes")
                time.sleep(0.05)  # a writer's commit moves the log into the file
    except sqlite3.Error as error:
        raise UnavailableError(str(error)) from None


def back_up(path: Path, copy: Path) -> None:
    """Copy the store at one moment, while others write. The copy gets its name when it is complete.
    ConfigError if the name is taken, or the store is damaged."""
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
        if draft.exists():
            draft.unlink()
        raise ConfigError(f"the store {path} cannot be copied to {copy}: {error}") from None
