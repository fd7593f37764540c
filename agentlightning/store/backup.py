"""Copies of a store's SQLite file, made while a server writes to it, and a store made from such a copy.

This module knows files. It does not know what the rows mean; `CheckStore` looks at those.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path
from typing import Final

from agentlightning.errors import ConfigError
from agentlightning.store import sqlite

POSTGRES_ADVICE: Final = """\
a store in PostgreSQL is backed up by PostgreSQL's own programs, also while it is written (password in PGPASSWORD or
~/.pgpass):
  pg_dump --format=custom --no-owner --file=FILE URL
and restored into an empty database by:
  pg_restore --no-owner --exit-on-error --dbname=URL FILE"""


def back_up(path: Path, destination: Path, *, overwrite: bool = False) -> None:
    """Copy the store in a file, as it is at one moment: every call that was answered before is in the copy, whoever
    writes meanwhile. The copy takes its name when it is complete and was read through.

    ConfigError if `destination` exists and is not to be overwritten, or if the store is damaged."""
    path, destination = _check_store(path), _check_free(destination, overwrite)
    with contextlib.closing(sqlite.own(destination)) if destination.exists() else contextlib.nullcontext():
        _replace(path, "mode=ro", destination)


def restore(source: Path, destination: Path, *, overwrite: bool = False) -> None:
    """Make a copy the store of `destination`. InUseError if a process uses that store, ConfigError if there is one and
    it is not to be overwritten, or if the copy is damaged: then nothing is changed."""
    source, destination = _check_store(source, copy=True), _check_free(destination, overwrite)
    # Nobody writes a copy. Read as a file that does not change, it needs no others beside it.
    live = source.with_name(f"{source.name}-wal").exists()
    with contextlib.closing(sqlite.own(destination)):
        _replace(source, "mode=ro" if live else "mode=ro&immutable=1", destination)


def _check_store(path: Path, *, copy: bool = False) -> Path:
    if not path.is_file() or path.stat().st_size == 0:
        raise ConfigError(f"there is no store at {path} (looked in {Path.cwd()})")
    return sqlite.check_file(path, copy=copy)


def _check_free(destination: Path, overwrite: bool) -> Path:
    if destination.exists() and not overwrite:
        raise ConfigError(f"{destination} exists already; choose another name, or overwrite it with --force")
    return sqlite.real(destination)


def _replace(path: Path, mode: str, destination: Path) -> None:
    """Put a copy of the store in a file in the place of `destination`, or leave all as it is."""
    draft = destination.with_name(f"{destination.name}-part")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        _remove(draft)
        draft.touch(mode=0o600)  # what is in it is nobody else's business before it has the store's own mode
        _copy(path, mode, draft)
        draft.chmod(path.stat().st_mode & 0o777)
        # What is left of another store's log would be taken for this one's.
        for suffix in ("-wal", "-shm"):
            destination.with_name(destination.name + suffix).unlink(missing_ok=True)
        draft.replace(destination)
        _sync(destination.parent)
    except OSError as error:
        raise ConfigError(f"{destination} cannot be written: {error.strerror or error}") from None
    except sqlite3.Error as error:
        raise ConfigError(f"the store {path} cannot be copied to {destination}: {error}") from None
    finally:
        with contextlib.suppress(OSError):
            _remove(draft)


def _copy(path: Path, mode: str, draft: Path) -> None:
    address = f"{path.absolute().as_uri()}?{mode}"
    with contextlib.closing(sqlite3.connect(address, uri=True, isolation_level=None, timeout=60)) as source:
        source.execute("VACUUM INTO ?", (str(draft),))
    with contextlib.closing(sqlite3.connect(draft, isolation_level=None)) as copy:
        problems = [row[0] for row in copy.execute("PRAGMA quick_check(5)")]
    if problems != ["ok"]:
        raise ConfigError(f"the store {path} is damaged ({'; '.join(problems)}); restore a copy that is not")
    _sync(draft)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(draft: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        draft.with_name(draft.name + suffix).unlink(missing_ok=True)
