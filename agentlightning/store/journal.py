"""Spans on the disk until a server has acknowledged them, so that they outlive the process that posted them.

Segments of length- and checksum-framed records, each locked by the process that writes it; a segment nobody holds is
an orphan, and belongs to whoever finds it. Written through to the operating system, not forced to the disk: spans
survive the death of the process, not that of the machine. This module knows files and bytes, not what the bytes mean.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Final

from agentlightning.errors import ConfigError, UnavailableError

SEGMENT_BYTES: Final = 8 * 1024 * 1024
_FRAME: Final = Struct("<II")  # length and CRC-32 of the record that follows
_SUFFIX: Final = ".spans"

_logger: Final = logging.getLogger(__name__)


@dataclass
class _Segment:
    path: Path
    file: int
    size: int = 0
    unsettled: int = 0


@dataclass(frozen=True)
class Orphan:
    """What a process that is gone left behind. `delete` it once its `spans` are delivered."""

    path: Path
    spans: deque[bytes]

    def delete(self) -> None:
        self.path.unlink(missing_ok=True)


class Journal:
    """The segments of one process in `directory`, which other processes may share. ConfigError if it cannot be used."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._segments: deque[_Segment] = deque()
        self._made = 0
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._open_segment()
        except OSError as error:
            raise ConfigError(
                f"spans cannot be kept in {directory}: {error.strerror or error}; give a spool_directory that can be "
                "written"
            ) from None

    def append(self, spans: Sequence[bytes]) -> None:
        """Write spans behind the others, all or none; UnavailableError if the disk does not take them."""
        records = b"".join(part for span in spans for part in (_FRAME.pack(len(span), zlib.crc32(span)), span))
        try:
            if self._segments[-1].size >= SEGMENT_BYTES:
                self._open_segment()
            segment = self._segments[-1]
            written = os.pwrite(segment.file, records, segment.size)
            if written < len(records):  # a full disk; the next write overwrites what has got there
                os.ftruncate(segment.file, segment.size)
                raise OSError(f"only {written} of {len(records)} bytes were written")
        except OSError as error:
            raise UnavailableError(
                f"spans cannot be kept in {self.directory}: {error.strerror or error}; make room there"
            ) from None
        segment.size += len(records)
        segment.unsettled += len(spans)

    def settled(self, count: int) -> None:
        """The foremost `count` spans need not be kept any longer."""
        while count:
            segment = self._segments[0]
            done = min(count, segment.unsettled)
            segment.unsettled -= done
            count -= done
            if segment.unsettled:
                return
            if len(self._segments) == 1:
                os.ftruncate(segment.file, 0)
                segment.size = 0
                return
            self._remove(self._segments.popleft())

    def orphans(self) -> Iterator[Orphan]:
        """What processes that are gone left here, oldest first, each locked until the next one is asked for."""
        for path in sorted(self.directory.glob(f"*{_SUFFIX}")):
            try:
                file = os.open(path, os.O_RDONLY)
            except (FileNotFoundError, PermissionError):  # delivered meanwhile, or another user's
                continue
            try:
                # A lock belongs to an open file, so that this process's own segments are held as well.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield Orphan(path, deque(_records(path)))
            except BlockingIOError:
                continue
            finally:
                os.close(file)

    def close(self) -> None:
        """Let go of the segments; those with spans in them stay for whoever comes next."""
        while self._segments:
            segment = self._segments.popleft()
            if segment.unsettled:
                os.close(segment.file)
            else:
                self._remove(segment)

    def _open_segment(self) -> None:
        # The order of names is that of time. Locked before it has its name: no other process finds it unlocked.
        name = f"{time.time_ns():020d}-{os.getpid()}-{self._made}"
        self._made += 1
        hidden = self.directory / f".{name}"
        file = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path = hidden.rename(self.directory / f"{name}{_SUFFIX}")
        self._segments.append(_Segment(path, file))

    @staticmethod
    def _remove(segment: _Segment) -> None:
        segment.path.unlink(missing_ok=True)
        os.close(segment.file)


def _records(path: Path) -> Iterator[bytes]:
    """The records of a segment up to the first that is not whole: its writer died before it was acknowledged."""
    data = path.read_bytes()
    place = 0
    while place + _FRAME.size <= len(data):
        length, checksum = _FRAME.unpack_from(data, place)
        record = data[place + _FRAME.size : place + _FRAME.size + length]
        if len(record) < length or zlib.crc32(record) != checksum or not length:
            break
        yield record
        place += _FRAME.size + length
    if place < len(data):
        _logger.warning("the last %d bytes of %s are not whole records and are left out", len(data) - place, path)
