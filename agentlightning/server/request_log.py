"""Reports how each request ended, for the metrics and the access log; writes the server's log
on stderr, as text or as JSON, without anything that could be a key."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeAlias

import msgspec
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentlightning.store.redaction import text_without_secrets

LogFormat: TypeAlias = Literal["text", "json"]

ACCESS: Final = "agentlightning.access"
CLIENT_GONE: Final = 499
_ROUTE: Final = "agentlightning.route"
_CALLER: Final = "agentlightning.caller"


class Finished(msgspec.Struct, frozen=True):
    """A request that was answered. `status` is 499 if its client left first; `caller` names a key
    or an attempt."""

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


def note_route(scope: Scope, template: str) -> None:
    """Note the route that takes a request."""
    scope[_ROUTE] = template


def note_caller(scope: Scope, name: str) -> None:
    """Who makes a request, by the name of their key."""
    scope[_CALLER] = name


class RequestObserver:
    """Tells `listeners` of every request when it is over, with the template of the one of `routes`
    that took it."""

    def __init__(
        self,
        app: ASGIApp,
        routes: Sequence[BaseRoute],
        listeners: Sequence[Callable[[Finished], None]],
    ) -> None:
        self._app = app
        self._templates: dict[Any, str] = {
            route.endpoint: route.path for route in routes if isinstance(route, Route)
        }
        self._listeners = listeners

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        status = CLIENT_GONE

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception:
            status = 500  # as the outermost layer then answers
            raise
        finally:
            ms = (time.perf_counter() - began) * 1000
            # The path of a request that no route takes is the caller's invention, and so no label.
            route = scope.get(_ROUTE) or self._templates.get(scope.get("endpoint"), "unmatched")
            finished = Finished(scope["method"], route, status, ms, _caller(scope))
            for listener in self._listeners:
                listener(finished)


def _caller(scope: Scope) -> str | None:
    name = scope.get(_CALLER)
    if name is None:
        # Of the gateway's and OTLP's requests the URL says it; it is not to break the log's lines.
        name = scope.get("path_params", {}).get("attempt_id")
    return name if name is not None and name.isprintable() else None


class Formatter(logging.Formatter):
    """As text: `2026-01-31T12:00:00.123Z WARNING agentlightning.store.sql: …`, then the traceback
    if there is one. As JSON: an object per line, of time, level, logger, message, and `fields` and
    `traceback` of the record."""

    converter = time.gmtime
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self, form: LogFormat) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._form = form

    def format(self, record: logging.LogRecord) -> str:
        if self._form == "text":
            return text_without_secrets(super().format(record))
        line: dict[str, object] = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        clean = {
            name: text_without_secrets(value) if isinstance(value, str) else value
            for name, value in line.items()
        }
        return msgspec.json.encode(clean).decode()


def configure_logging(form: LogFormat) -> None:
    """Send this process's log to stderr: all of Agent Lightning's, and the warnings of
    libraries."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Formatter(form))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("agentlightning").setLevel(logging.INFO)
