"""One ASGI application: the store's REST interface, health, and the gateway's routes where there is one.

This module wires routes and turns typed errors into answers. It does not open sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route

from agentlightning.errors import (
    AgentLightningError,
    BackendError,
    ConfigError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    UnavailableError,
)
from agentlightning.gateway.app import Gateway
from agentlightning.server.access import Access, UnauthenticatedError
from agentlightning.server.models import ModelRoutes
from agentlightning.server.otlp import OtlpRoutes
from agentlightning.server.rest import StoreRoutes, TooLargeError
from agentlightning.store.base import LightningStore
from agentlightning.store.calls import ErrorBody, ErrorReply

BODY_LIMIT: Final = 64 * 1024 * 1024  # bytes

_STATUS: Final[Sequence[tuple[type[AgentLightningError], int, str]]] = (
    (UnauthenticatedError, 401, "unauthenticated"),
    (ForbiddenError, 403, "forbidden"),
    (NotFoundError, 404, "not_found"),
    (ConflictError, 409, "conflict"),
    (TooLargeError, 413, "too_large"),
    (InvalidError, 422, "invalid"),
    (ConfigError, 422, "invalid"),
    (UnavailableError, 503, "unavailable"),
    (BackendError, 502, "backend"),
)


def create_app(
    store: LightningStore | None,
    *,
    gateway: Gateway | None = None,
    admin_key: str | None = None,
    body_limit: int = BODY_LIMIT,
) -> Starlette:
    """The application: `/health`, the REST interface of an open `store` and the gateway's model table under `/api/v1`
    (without a store there is neither), and the gateway's own routes as they are.

    With an `admin_key` the interface needs it; without one `HttpServer` serves on loopback only. A request body above
    `body_limit` bytes is refused. Closing the store stays with the caller."""
    if admin_key is not None and len(admin_key) < 8:
        raise ConfigError("the admin key is shorter than 8 characters; choose one that cannot be guessed")

    async def health(request: Request) -> Response:
        return Response(b'{"status":"ok"}', media_type="application/json")

    routes: list[BaseRoute] = [Route("/health", health, methods=["GET"])]
    stop_waiting: Callable[[], None] | None = None
    if store is not None:
        access = Access(store, admin_key)
        rest = StoreRoutes(store, access, body_limit)
        stop_waiting = rest.stop_waiting
        models = [] if gateway is None else ModelRoutes(gateway.models, access).routes()
        routes.append(Mount("/api/v1", routes=[*rest.routes(), *models]))
        routes.extend(OtlpRoutes(store, access, body_limit).routes())
    if gateway is not None:
        routes.extend(gateway.routes())
    app = Starlette(
        routes=routes,
        exception_handlers={
            AgentLightningError: _typed_error,
            HTTPException: _http_error,
            Exception: _defect,
        },
    )
    app.state.protected = admin_key is not None
    app.state.stop_waiting = stop_waiting
    return app


def _typed_error(request: Request, error: Exception) -> Response:
    for kind, status, name in _STATUS:
        if isinstance(error, kind):
            return _error(error.status if isinstance(error, BackendError) else status, name, str(error))
    return _error(500, "error", str(error))


def _http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    return _error(error.status_code, "http", f"{error.detail}: {request.method} {request.url.path}", error.headers)


def _defect(request: Request, error: Exception) -> Response:
    # The traceback goes to the server's log, never to the caller.
    return _error(500, "internal", "the server failed at this request; its log says why")


def _error(status: int, kind: str, message: str, headers: object = None) -> Response:
    body = msgspec.json.encode(ErrorReply(error=ErrorBody(message=message, type=kind)))
    extra = {str(name): str(value) for name, value in headers.items()} if isinstance(headers, dict) else None
    return Response(body, status_code=status, media_type="application/json", headers=extra)
