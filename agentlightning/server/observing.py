"""What becomes of each request: its route, status and time, told to the metrics and to the access log.

This module knows ASGI. It does not know what is done with what it sees.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentlightning.server.logs import Finished

CLIENT_GONE: Final = 499
_ROUTE: Final = "agentlightning.route"
_CALLER: Final = "agentlightning.caller"


def label_routes(routes: Sequence[BaseRoute], prefix: str = "") -> None:
    """Let every route note its template in the requests that reach it."""
    for route in routes:
        if isinstance(route, Mount):
            label_routes(route.routes, prefix + route.path)
        elif isinstance(route, Route):
            route.app = _noting(route.app, prefix + route.path)


def _noting(app: ASGIApp, template: str) -> ASGIApp:
    def noted(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        scope[_ROUTE] = template
        return app(scope, receive, send)

    return noted


def note_route(scope: Scope, template: str) -> None:
    """Which route takes a request."""
    scope[_ROUTE] = template


def note_caller(scope: Scope, name: str) -> None:
    """Who makes a request, by the name of their key."""
    scope[_CALLER] = name


class Observed:
    """Tells `listeners` of every request when it is over."""

    def __init__(self, app: ASGIApp, listeners: Sequence[Callable[[Finished], None]]) -> None:
        self._app = app
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
            finished = Finished(scope["method"], scope.get(_ROUTE, "unmatched"), status, ms, _caller(scope))
            for listener in self._listeners:
                listener(finished)


def _caller(scope: Scope) -> str | None:
    name = scope.get(_CALLER)
    if name is None:
        # Of the gateway's and OTLP's requests the URL says it; it is not to break the log's lines.
        name = scope.get("path_params", {}).get("attempt_id")
    return name if name is not None and name.isprintable() else None
