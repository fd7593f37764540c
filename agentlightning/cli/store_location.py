"""The store that a command works on: its options, and how it is opened."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from agentlightning.cli.options import Option, combined, json_option, key_option
from agentlightning.errors import ConfigError, InUseError

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore

STORE_FILE: Final = "store.sqlite"  # of a run, in its directory
RUNS: Final = Path("runs")
# what `agl server` and `agl record` write to where none is named
SERVER_STORE: Final = Path("agentlightning.sqlite")
POSTGRES: Final = ("postgresql://", "postgres://")
# somebody waits before a terminal: a mistyped URL should not take a minute
_PATIENCE_SECONDS: Final = 10.0


@dataclass(frozen=True)
class StoreLocation:
    """A store to open here, in a SQLite file or at a postgresql:// URL, or the server that has it
    open."""

    address: str | None = None
    server: str | None = None
    key: str | None = None

    def __str__(self) -> str:
        return self.server or self.address or f"{RUNS}/"

    @property
    def named(self) -> bool:
        return self.address is not None or self.server is not None

    @contextlib.asynccontextmanager
    async def open(
        self, *, create: bool = False, reading: bool = False
    ) -> AsyncGenerator[LightningStore]:
        """The open store. Without `create`, it must exist.

        The file may be in use by another process: for `reading`, and where that process is the run
        in the file's folder, which is then asked to do the writing."""
        if (self.address is None) == (self.server is None):
            raise click.UsageError(
                "choose the store: either its file or postgresql:// URL, or --server URL"
            )
        if self.server is not None:
            opened = _client_of(self.server, self.key)
        else:
            opened = await self._open_here(create=create, reading=reading)
        try:
            yield opened
        finally:
            await opened.close()

    async def _open_here(self, *, create: bool, reading: bool) -> LightningStore:
        from agentlightning.store.reader import StoreReader
        from agentlightning.store.sql import SqlStore

        address = store_file(str(self.address), create=create)
        try:
            # Whoever waits before a terminal may take their time, and ends a query themselves.
            return await (
                StoreReader.open(address)
                if reading
                else SqlStore.open(address, read_seconds=math.inf)
            )
        except InUseError as error:
            from agentlightning.algorithm.directory import url_of_holder

            if (url := url_of_holder(Path(address).parent)) is not None:
                return _client_of(url, self.key)
            raise InUseError(
                f"{error}; with --server URL instead of --store that process is asked"
            ) from None


def _client_of(url: str, key: str | None) -> LightningStore:
    from agentlightning.server.local_keys import local_key
    from agentlightning.store.client import LightningStoreClient

    return LightningStoreClient(url, key or local_key(url), patience=_PATIENCE_SECONDS)


def store_file(address: str, *, create: bool = False) -> str:
    """The store's file, where its folder may be named instead; URLs and `:memory:` stay unchanged.

    ConfigError if the file does not exist, since a mistyped path would create a new store; with
    `create`, if the folder it goes into does not."""
    if address.startswith(POSTGRES) or address == ":memory:":
        return address
    path = Path(address).expanduser()
    if os.path.isdir(path):  # also of a path that may not be looked at
        names = (STORE_FILE, SERVER_STORE.name)
        path /= next((name for name in names if (path / name).is_file()), STORE_FILE)
    if create and not path.parent.is_dir() and path.parent != RUNS:
        raise ConfigError(
            f"there is no folder {path.parent} for the store {path.name} (looked in {Path.cwd()})"
        )
    if not create and not os.path.isfile(path):
        raise ConfigError(f"there is no store at {path} (looked in {Path.cwd()})")
    return str(path)


def folder_or_store(place: str) -> Path:
    """A folder, or a store's file. ConfigError where there is neither, or none that may be looked
    at."""
    if not os.path.isdir(place):
        store_file(place)
    return Path(place)


def stores_below(path: Path = RUNS) -> list[str]:
    """The stores of the runs below a folder, and for `RUNS` this folder's server's, the last
    written first. ConfigError if there are none."""
    if path.is_file():
        return [str(path)]
    levels = ("", "*/", "*/*/")  # a run, a folder of runs, a folder of runs with several seeds
    files = [file for level in levels for file in path.glob(f"{level}{STORE_FILE}")]
    files += [SERVER_STORE] if path == RUNS and SERVER_STORE.is_file() else []
    if not files:
        raise ConfigError(
            f"there is no {SERVER_STORE} and no run in {path.absolute()}; name a --store or "
            "--server"
        )
    return list(map(str, sorted(files, key=_modified_at, reverse=True)))


def newest_store() -> str:
    """The store that a command reads by default. ConfigError if there is none."""
    return stores_below()[0]


def _modified_at(store: Path) -> float:
    """When a store, or its log, was last written."""
    log = store.with_name(f"{store.name}-wal")
    return max(path.stat().st_mtime for path in (store, log) if path.exists())


class StoreOption(NamedTuple):
    """The option that names a command's store, its default, and whether it may be new."""

    option: Option
    default: Callable[[], str] | None = None
    new: bool = False


def store_option(help_: str, **settings: Any) -> Option:
    """`--store`, passed to the command as `address`."""
    return click.option("--store", "address", metavar="PATH|URL", help=help_, **settings)


STORE: Final = StoreOption(
    store_option("SQLite file, its folder, or postgresql:// URL, to open here.")
)
NEWEST: Final = StoreOption(
    store_option("SQLite file, its folder, or postgresql://…; default: the stores below runs/."),
    newest_store,
)
ANY_RUN: Final = StoreOption(NEWEST.option)
NEW: Final = StoreOption(
    store_option(f"SQLite file, created if missing, or postgresql://…; default: {SERVER_STORE}."),
    lambda: str(SERVER_STORE),
    new=True,
)
_ASKED: Final = (
    click.option("--server", metavar="URL", help="Use the store of this `agl server` instead."),
    key_option("The server's key."),
    json_option,
)


def with_location(named: StoreOption) -> Option:
    """A command, async or not, with the options `named`, `--server`, `--key` and `--json`. It gets
    `place` and `as_json`."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def placed(
            server: str | None, key: str | None, address: str | None = None, **others: Any
        ) -> Any:
            if address is None and server is None and named.default is not None:
                address = named.default()
            elif address is not None and server is None:
                address = store_file(address, create=named.new)
            done = command(place=StoreLocation(address, server, key), **others)
            return asyncio.run(done) or 0 if asyncio.iscoroutine(done) else done

        return combined(named.option, *_ASKED)(placed)

    return add


def on_store(*, reading: bool = False) -> Option:
    """An async command that gets an open `store`; the options are those of `with_location`."""

    def add(command: Callable[..., Coroutine[Any, Any, int | None]]) -> Callable[..., Any]:
        @with_location(STORE)
        @functools.wraps(command)
        async def opening(place: StoreLocation, **others: Any) -> int | None:
            async with place.open(reading=reading) as store:
                return await command(store, **others)

        return opening

    return add
