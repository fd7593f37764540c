"""One ASGI application: the store's REST interface, its events, health, metrics, documentation, and the gateway's
routes where there is one.

This module wires routes and turns typed errors into answers. It does not open sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount
from starlette.types import ASGIApp

from agentlightning.dashboard.tokens import SpellsTokens, Tokenizers
from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.gateway.app import Gateway
from agentlightning.gateway.models import ModelTable
from agentlightning.gateway.serving import Shortcut
from agentlightning.server.access import Access
from agentlightning.server.dashboard import DashboardRoutes
from agentlightning.server.events import EventRoutes
from agentlightning.server.health import GatewayMetrics, HealthRoutes, ServerMetrics
from agentlightning.server.limits import RateLimit, limit_of
from agentlightning.server.logs import Observed, label_routes, log_request
from agentlightning.server.models import ModelRoutes
from agentlightning.server.openapi import documentation_routes
from agentlightning.server.otlp import OtlpRoutes
from agentlightning.server.requests import defect, failure, refusal
from agentlightning.server.rest import LONGEST_POLL, PREFIX, LongPolls, StoreRest
from agentlightning.server.reward_url import reward_route
from agentlightning.store.base import LightningStore
from agentlightning.store.sql import SqlStore

BODY_LIMIT: Final = 64 * 1024 * 1024  # bytes


def create_app(
    store: LightningStore | None,
    *,
    gateway: Gateway | None = None,
    admin_key: str | None = None,
    body_limit: int = BODY_LIMIT,
    rate_limit: float | None = None,
    access_log: bool = False,
    guarded: bool = False,
    longest_poll: float = LONGEST_POLL,
    collectors: Sequence[Collector] = (),
) -> Starlette:
    """The application: `/health`, `/ready`, `/metrics`, `/docs`, the REST interface of an open `store`, its events and
    the gateway's model table under `/api/v1` (without a store there is none of these), and the gateway's own routes as
    they are.

    With an `admin_key` the interface needs it; without one `HttpServer` serves on loopback only. A gateway without one
    of its own answers this machine's own programs alone, and attempts' keys from anywhere. `guarded` says that
    something around the application asks for a key. A request body above `body_limit` bytes is refused, and so is a
    caller who makes more than `rate_limit` requests a second. A call that waits is answered after `longest_poll`
    seconds, for its caller to ask again. With `access_log` each request leaves a line in the log. `collectors` bring
    counts of their own to `/metrics`. Closing the store stays with the caller."""
    if admin_key is not None and len(admin_key) < 8:
        raise ConfigError("the admin key is shorter than 8 characters; choose one that cannot be guessed")

    parts = _Parts()
    if store is not None:
        parts = _parts_of(
            store, Access(store, admin_key), gateway, body_limit, longest_poll, protected=admin_key is not None
        )
    routes = [*HealthRoutes(store).routes(), *parts.routes]
    if gateway is not None:
        parts.stops.append(gateway.turn_away)
        if not guarded:
            gateway.keep_to_this_machine()
        own = gateway.routes()
        parts.inner.insert(0, Middleware(Shortcut, routes=own))
        routes.extend(own)
    counts = [*collectors, *([] if gateway is None else [GatewayMetrics(gateway)])]
    metrics = ServerMetrics(store, parts.access, parts.gauges, counts)
    routes.append(metrics.route())
    routes += documentation_routes(
        with_store=store is not None, with_gateway=gateway is not None, protected=admin_key is not None
    )
    label_routes(routes)
    listeners = [metrics.count, log_request] if access_log else [metrics.count]
    outer = [Middleware(Observed, listeners=listeners)]
    if rate_limit is not None:
        outer.append(Middleware(RateLimit, limit=limit_of(rate_limit), access=parts.access))
    app = _Application(
        routes=routes,
        middleware=[*outer, *parts.inner],
        exception_handlers=dict.fromkeys((AgentLightningError, HTTPException, Exception), _answer_to),
    )
    app.state.protected = guarded or admin_key is not None
    app.state.stop_waiting = tuple(parts.stops)
    return app


class _Application(Starlette):
    """Its middleware is around what the framework brings of its own, so that what a layer answers passes no other."""

    def build_middleware_stack(self) -> ASGIApp:
        layers, self.user_middleware = self.user_middleware, []
        app = super().build_middleware_stack()
        self.user_middleware = layers
        for kind, arguments, named in reversed(layers):
            app = kind(app, *arguments, **named)
        return app


@dataclass
class _Parts:
    """What an open store adds to an application: routes, middleware, gauges, and what ends its long answers."""

    access: Access | None = None
    routes: list[BaseRoute] = field(default_factory=list[BaseRoute])
    inner: list[Middleware] = field(default_factory=list[Middleware])
    gauges: dict[str, tuple[str, Callable[[], int]]] = field(default_factory=dict[str, tuple[str, Callable[[], int]]])
    stops: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])


def _parts_of(
    store: LightningStore,
    access: Access,
    gateway: Gateway | None,
    body_limit: int,
    longest_poll: float,
    *,
    protected: bool,
) -> _Parts:
    polls = LongPolls(longest_poll)
    parts = _Parts(access, stops=[polls.stop])
    parts.gauges["agl_long_polls"] = "Calls that wait for something to answer with.", polls.__len__
    parts.inner.append(Middleware(StoreRest, store=store, access=access, polls=polls, body_limit=body_limit))
    beside: list[BaseRoute] = []
    if isinstance(store, SqlStore):
        events = EventRoutes(store, access)
        parts.stops.append(events.stop)
        parts.gauges["agl_event_streams"] = "Callers that listen to events.", lambda: events.open
        beside.append(events.route())
    if gateway is not None:
        beside += ModelRoutes(gateway, access, body_limit).routes()
    models = ModelTable() if gateway is None else gateway.models
    dashboard = DashboardRoutes(store, access, body_limit, _tokenizers(store, models), protected=protected)
    beside += dashboard.routes()
    given = [*dashboard.page_routes(), *OtlpRoutes(store, access, body_limit).routes(), reward_route(store)]
    parts.routes = [Mount(PREFIX, routes=beside), *given]
    return parts


def _tokenizers(store: LightningStore, models: ModelTable) -> Tokenizers:
    served = {one.name: one.backend.token_bytes for one in models if isinstance(one.backend, SpellsTokens)}
    return Tokenizers(store.address if isinstance(store, SqlStore) else None, served)


def _answer_to(request: Request, error: Exception) -> Response:
    if isinstance(error, AgentLightningError):
        return failure(error)
    if not isinstance(error, HTTPException):
        return defect()
    message = f"{error.detail}: {request.method} {request.url.path}"
    if error.status_code == 404:
        message += "; /docs lists what there is"
    return refusal(error.status_code, "http", message, error.headers)
