"""The server's log on stderr: a line per event, as text or as JSON, without anything that could be a key.

This module knows how records look. What is logged, and when, is decided where it happens.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Final, Literal, TypeAlias

import msgspec

from agentlightning.store.redaction import text_without_secrets

LogFormat: TypeAlias = Literal["text", "json"]

ACCESS: Final = "agentlightning.access"


class Finished(msgspec.Struct, frozen=True):
    """A request that was answered. `status` is 499 if its client left first; `caller` names a key or an attempt."""

    method: str
    route: str
    status: int
    ms: float
    caller: str | None


def log_request(finished: Finished) -> None:
    """The access log's line."""
    fields = msgspec.structs.asdict(finished) | {"ms": round(finished.ms, 3)}
    logging.getLogger(ACCESS).info(
        "%s %s %d %.1f ms %s",
        finished.method,
        finished.route,
        finished.status,
        finished.ms,
        finished.caller or "-",
        extra={"fields": fields},
    )


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z WARNING agentlightning.store.sql: …`, then the traceback if there is one."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _time(record)

    def format(self, record: logging.LogRecord) -> str:
        return text_without_secrets(super().format(record))


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, with `fields` and `traceback` of the record."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        clean = {name: text_without_secrets(value) if isinstance(value, str) else value for name, value in line.items()}
        return msgspec.json.encode(clean).decode()


def _time(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


def configure_logging(form: LogFormat) -> None:
    """Send this process's log to stderr: all of Agent Lightning's, and the warnings of libraries."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("agentlightning").setLevel(logging.INFO)
