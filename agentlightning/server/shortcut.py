"""LLM calls past the web framework: its routing and its layers around a route cost a tenth of a call.

This module knows two forms of paths, and hands on whatever has another.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from typing import Final

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

_VERSION: Final = "/v1/"
_PREFIX: Final = "/rollout/{rollout_id}/attempt/{attempt_id}"


class Shortcut:
    """ASGI: takes POST requests to those of the gateway's `routes` that are `/v1/…`, or the same under an attempt's
    prefix, straight to their endpoints; all others go to `app`, which has these routes too."""

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        self._plain: dict[str, Route] = {}
        self._attributed: dict[str, Route] = {}
        for route in routes:
            if isinstance(route, Route) and route.methods == {"POST"}:
                prefix, _, name = route.path.partition(_VERSION)
                {"": self._plain, _PREFIX: self._attributed}[prefix][name] = route

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "http" and scope["method"] == "POST":
            prefix, _, name = scope["path"].partition(_VERSION)
            parts = prefix.split("/")
            route = self._plain.get(name) if not prefix else None
            params: dict[str, str] = {}
            if len(parts) == 5 and (parts[1], parts[3]) == ("rollout", "attempt") and parts[2] and parts[4]:
                route = self._attributed.get(name)
                params = {"rollout_id": parts[2], "attempt_id": parts[4]}
            if route is not None:
                scope["path_params"] = params
                return route.app(scope, receive, send)
        return self._app(scope, receive, send)
