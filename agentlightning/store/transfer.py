"""Rollouts in files: exported from any store and imported into any other, a few at a time,
unchanged.

A record is a rollout with its attempts and spans, as a line of JSON. This module does not know SQL
or HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import zlib
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final, Literal, cast

import msgspec

from agentlightning.arrays import plain
from agentlightning.errors import ConfigError, ConflictError, InvalidError, NotFoundError
from agentlightning.store import lifecycle
from agentlightning.store.base import LightningStore
from agentlightning.types import And, Attempt, Condition, Filter, Noun, Rollout, Span

_AT_ONCE: Final = 16  # records held in memory
_encoder: Final = msgspec.json.Encoder(enc_hook=plain)
_SUFFIXES: Final = (".jsonl", ".jsonl.gz")


class Record(Noun, frozen=True, kw_only=True):
    """A rollout with its attempts and spans."""

    rollout: Rollout
    attempts: list[Attempt]
    spans: list[Span]


class Exported(Noun, frozen=True, kw_only=True):
    """The counts of what an export wrote."""

    rollouts: int = 0
    attempts: int = 0
    spans: int = 0


class Imported(Noun, frozen=True, kw_only=True):
    """Counts of an import: `rollouts` are new, the others were stored already."""

    rollouts: int = 0
    stored_already: int = 0


async def export_rollouts(
    store: LightningStore,
    path: Path,
    *,
    where: Filter | None = None,
    overwrite: bool = False,
) -> Exported:
    """Write the matching rollouts that have ended with all their attempts to a file, in the order
    they were queued. The file gets its name when it is complete.

    ConfigError if it exists (without overwriting), cannot be written, or its name ends in neither
    .jsonl nor .jsonl.gz."""
    records = attempts = spans = 0
    ended = Condition("status", "in", sorted(lifecycle.TERMINAL))
    where = ended if where is None else And([ended, where])
    with writing(path, overwrite, _suffix(path)) as file:
        cursor = None
        while True:
            page = await store.page_rollouts(where, limit=_AT_ONCE, cursor=cursor)
            found = await asyncio.gather(*(_record(store, rollout) for rollout in page.items))
            batch = [record for record in found if record is not None]
            await asyncio.to_thread(_write, file, batch)
            records += len(batch)
            attempts += sum(len(record.attempts) for record in batch)
            spans += sum(len(record.spans) for record in batch)
            cursor = page.next_cursor
            if cursor is None:
                return Exported(rollouts=records, attempts=attempts, spans=spans)


async def _record(store: LightningStore, rollout: Rollout) -> Record | None:
    """The record of a rollout; None if it has been deleted, or an attempt is active."""
    try:
        attempts = await store.query_attempts(rollout.rollout_id)
        spans = await store.query_spans(rollout.rollout_id)
    except NotFoundError:
        return None
    if any(attempt.status in lifecycle.ACTIVE for attempt in attempts):
        return None
    return Record(rollout=rollout, attempts=attempts, spans=spans)


async def import_rollouts(store: LightningStore, path: Path) -> Imported:
    """Store the rollouts of a file, each as a whole. Stored rollouts stay, so an interrupted import
    can be repeated.

    InvalidError or ConflictError names the line that cannot be stored; ConfigError says why the
    file cannot be read."""
    new = stored_already = 0
    with _reading(path) as records:
        while batch := await asyncio.to_thread(lambda: list(itertools.islice(records, _AT_ONCE))):
            # At once, so that they share a commit.
            done = await asyncio.gather(
                *(_import(store, place, record) for place, record in batch), return_exceptions=True
            )
            for failed in done:
                if isinstance(failed, BaseException):
                    raise failed
            stored = [result is True for result in done]
            new += sum(stored)
            stored_already += len(stored) - sum(stored)
    return Imported(rollouts=new, stored_already=stored_already)


async def _import(store: LightningStore, place: str, record: Record) -> bool:
    try:
        return await store.import_rollout(record.rollout, record.attempts, record.spans)
    except (InvalidError, ConflictError) as error:
        raise type(error)(f"{place}: {error}") from None


def _open(path: Path, mode: Literal["rb", "wb"], suffix: str) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, mode, 6) if suffix == ".jsonl.gz" else path.open(mode))


def _suffix(path: Path) -> str:
    for suffix in _SUFFIXES:
        if path.name.lower().endswith(suffix):
            return suffix
    raise ConfigError(
        f"{path} is no file of rollouts; its name must end in one of {', '.join(_SUFFIXES)}"
    )


@contextlib.contextmanager
def writing(path: Path, overwrite: bool, suffix: str = "") -> Generator[BinaryIO]:
    """A file that gets its name when it is complete. ConfigError if it exists (without overwriting)
    or cannot be written."""
    if path.exists() and not overwrite:
        raise ConfigError(
            f"{path} exists already; choose another name, or overwrite it with --force"
        )
    draft = path.with_name(f"{path.name}-part")
    try:
        try:
            with _open(draft, "wb", suffix) as file:
                yield file
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None


@contextlib.contextmanager
def _reading(path: Path) -> Generator[Iterator[tuple[str, Record]]]:
    """The records of a file, each with its place in it."""
    suffix = _suffix(path)
    try:
        with _open(path, "rb", suffix) as lines:
            yield _lines(path, lines)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None


def _write(file: BinaryIO, records: Sequence[Record]) -> None:
    file.write(_encoder.encode_lines(records))


def _lines(path: Path, file: BinaryIO) -> Iterator[tuple[str, Record]]:
    decoder = msgspec.json.Decoder(Record)
    for number, line in enumerate(file, start=1):
        if line.strip():
            place = f"{path}, line {number}"
            try:
                yield place, decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise InvalidError(
                    f"{place} is not a rollout with its attempts and spans: {error}"
                ) from None
