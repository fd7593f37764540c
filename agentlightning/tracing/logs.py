"""Logs of an attempt as a few spans of limited size: stdout and stderr of a process, and records of
`logging`.

This module knows neither processes nor runners.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final, Literal, TypeAlias

from agentlightning.semconv import LOG, LOG_STREAM, LOG_TEXT
from agentlightning.tracing.context import AttemptTracer, current_binding

LogStream: TypeAlias = Literal["stdout", "stderr", "log"]

KEPT_BYTES: Final = 64 * 1024  # of each stream of an attempt


class Excerpt:
    """The beginning and the end of a text, in about `limit` bytes of memory."""

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self._half = max(1, limit // 2)
        self._head = bytearray()
        self._tail = bytearray()
        self._written = 0
        # of the first and the last write
        self.times: tuple[float | None, float | None] = (None, None)

    @property
    def left_out(self) -> int:
        return self._written - len(self._head) - min(len(self._tail), self._half)

    def write(self, data: bytes) -> None:
        if data:
            now = time.time()
            self.times = (self.times[0] or now, now)
        self._written += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data[-self._half :]
        if len(self._tail) > 2 * self._half:  # seldom, so that short writes are cheap
            del self._tail[: -self._half]

    def text(self) -> str:
        """The kept text, with a line that counts the dropped bytes, and U+FFFD for bytes that are
        not UTF-8."""
        tail = self._tail[-self._half :]
        if not self.left_out:
            return (self._head + tail).decode(errors="replace")
        gap = f"\n… {self.left_out} bytes left out …\n"
        return self._head.decode(errors="replace") + gap + tail.decode(errors="replace")


def record_log(
    tracer: AttemptTracer,
    stream: LogStream,
    text: str,
    times: tuple[float | None, float | None] = (None, None),
) -> None:
    """Record what the attempt wrote to `stream` as one span from its first write to its last,
    unless it is empty. Half surrogates, which UTF-8 cannot encode, become `?`."""
    if text:
        clean = text.encode(errors="replace").decode()
        tracer.record(
            LOG, {LOG_STREAM: stream, LOG_TEXT: clean}, start_time=times[0], end_time=times[1]
        )


class AttemptLogs(logging.Handler):
    """Keeps log records (INFO and above, if their logger lets them through) of the attempts that
    are open."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._excerpts: dict[AttemptTracer, Excerpt] = {}

    @contextmanager
    def installed(self) -> Generator[None]:
        """Add it to the root logger for the duration of the block."""
        self._terminal = logging.StreamHandler(sys.stderr)  # which agents may redirect
        root = logging.getLogger()
        root.addHandler(self)
        try:
            yield
        finally:
            root.removeHandler(self)

    @contextmanager
    def open(self, tracer: AttemptTracer) -> Generator[None]:
        """Keep what the attempt of `tracer` logs in the block, and record it at the end."""
        excerpt = self._excerpts[tracer] = Excerpt()
        try:
            yield
        finally:
            del self._excerpts[tracer]
            record_log(tracer, "log", excerpt.text(), excerpt.times)

    def emit(self, record: logging.LogRecord) -> None:
        last_resort = logging.lastResort
        if (
            last_resort is not None
            and record.levelno >= last_resort.level
            and self._is_alone(record)
        ):
            self._terminal.handle(record)
        binding = current_binding()
        excerpt = None if binding is None else self._excerpts.get(binding.tracer)
        if excerpt is None:
            return
        try:
            excerpt.write(f"{self.format(record)}\n".encode(errors="replace"))
        except Exception:  # noqa: BLE001 - as every handler: a record that cannot be formatted goes to stderr
            self.handleError(record)

    def _is_alone(self, record: logging.LogRecord) -> bool:
        """Whether `record` has no other handler. Python then writes it to stderr, which must still
        happen."""
        logger: logging.Logger | None = logging.getLogger(record.name)
        kin: list[logging.Handler] = []
        while logger is not None:
            if any(not isinstance(handler, AttemptLogs) for handler in logger.handlers):
                return False
            kin += logger.handlers
            logger = logger.parent if logger.propagate else None
        return kin[0] is self  # of several runners in one process only one says it
