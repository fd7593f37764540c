"""One ASGI application of calls, events, health, metrics, documentation and the page; beside it the
LLM calls of a gateway."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.gateway.gateway import Gateway
from agentlightning.gateway.models import ModelTable
from agentlightning.server.access import Access, Sessions
from agentlightning.server.backup import backup_routes
from agentlightning.server.dashboard import page_routes, page_views
from agentlightning.server.events import EventRoutes
from agentlightning.server.gateways import GATEWAY_CALLS, Gateways
from agentlightning.server.health import (
    Reading,
    ServerMetrics,
    gateway_readings,
    health_routes,
    store_readings,
)
from agentlightning.server.limits import CALLER_BUDGET, Limited, Limits
from agentlightning.server.llm_calls import LlmCalls
from agentlightning.server.model_calls import MODEL_CALLS, Models, RegisterModel
from agentlightning.server.openapi import documentation_routes
from agentlightning.server.otlp_routes import otlp_routes
from agentlightning.server.request_log import RequestObserver, log_request
from agentlightning.server.requests import defect, failure, refusal
from agentlightning.server.rest import LongPolls, Perform, Rest
from agentlightning.server.reward_url import reward_route
from agentlightning.shortages import lacking
from agentlightning.store.base import CALLS, LightningStore
from agentlightning.store.calls import StoreCall
from agentlightning.store.many import ManyStores
from agentlightning.store.redaction import Capture
from agentlightning.store.sql import SqlStore
from agentlightning.store.sqlite import Synchronous
from agentlightning.types import PromptCandidate

BODY_LIMIT: Final = 64 * 1024 * 1024  # bytes


class ServerSettings(msgspec.Struct, frozen=True):
    """The settings of a server. `store` is a path or a `postgresql://` URL. What ended more than
    `retain_seconds` ago is removed. `hook`, as FILE.py:NAME, sees every span before it is written.
    `registrations` are models that are there from the beginning. What is stored goes on to the
    collector at `otlp_forward`. `prompts` are put into the calls of whoever has no candidate of
    their own."""

    store: str
    synchronous: Synchronous = "FULL"
    host: str = "127.0.0.1"
    port: int = 0
    key: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    rate_limit: float | None = None
    body_limit: int = BODY_LIMIT
    access_log: bool = False
    capture: Capture = "full"
    hook: str | None = None
    retain_seconds: float | None = None
    registrations: tuple[RegisterModel, ...] = ()
    prompts: PromptCandidate | None = None
    otlp_forward: str | None = None
    otlp_forward_headers: tuple[tuple[str, str], ...] = ()


def create_app(
    store: LightningStore | None,
    *,
    gateway: Gateway | None = None,
    models: Models | None = None,
    gateways: Gateways | None = None,
    admin_key: str | None = None,
    body_limit: int = BODY_LIMIT,
    rate_limit: float | None = None,
    access_log: bool = False,
    readings: Sequence[Reading] = (),
    keys: LightningStore | None = None,
) -> Starlette:
    """The application: health, metrics and description; the calls, events and page of an open
    `store`; the gateway.

    Without an `admin_key` only programs of this machine are answered. Limits are in bytes and in
    requests per second of a caller. Of a gateway of another server, `keys` is that server's store,
    which knows the callers."""
    protected = _is_set(admin_key)
    known_by = keys if store is None else store
    access = None if known_by is None else Access(known_by, admin_key)
    parts = _Parts(health_routes(known_by), list(readings))
    described: list[type[StoreCall]] = []
    if store is not None and access is not None:
        performed = _performed(store, gateway, models)
        described = [kind for kinds, _ in performed for kind in kinds]
        if gateways is not None:
            performed.append((list(GATEWAY_CALLS), lambda call, caller: gateways.perform(call)))
        performed.append(page_views(store, ModelTable() if gateway is None else gateway.models))
        parts.add_store(store, access, body_limit, performed)
        reading = isinstance(store, ManyStores)
        called = gateway is not None
        parts.routes += page_routes(access, protected=protected, reading=reading, gateway=called)
    if gateway is not None:
        parts.stops.append(gateway.turn_away)
        parts.readings += gateway_readings(gateway)
        gateway.keep_to_this_machine(
            Sessions().key_of if access is None else access.sessions.key_of
        )
    metrics = ServerMetrics(store, access, parts.readings)
    parts.routes.append(metrics.route())
    parts.routes += documentation_routes(described, protected=protected)
    listeners = [metrics.count, log_request] if access_log else [metrics.count]
    budget = CALLER_BUDGET if protected else None  # without keys all callers have one address
    limits = Limits(access, rate_limit, None if access is None else body_limit, budget)
    layers = [
        Middleware(RequestObserver, routes=parts.routes, listeners=listeners),
        Middleware(Limited, limits=limits),
        *parts.layers,
    ]
    if gateway is not None:
        serving = gateway.serving
        layers.insert(0, Middleware(LlmCalls, serving=serving, listeners=listeners, limits=limits))
    app = Starlette(routes=parts.routes, middleware=layers, exception_handlers=_ANSWERS)
    app.state.protected = protected
    app.state.stop_waiting = tuple(parts.stops)
    return app


@dataclass
class _Parts:
    """The parts of an application; `stops` let a server stop."""

    routes: list[BaseRoute]
    readings: list[Reading]
    layers: list[Middleware] = field(default_factory=list[Middleware])
    stops: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])

    def add_store(
        self,
        store: LightningStore,
        access: Access,
        body_limit: int,
        performed: Sequence[tuple[Sequence[type[StoreCall]], Perform]],
    ) -> None:
        """Add the calls that are `performed`, and the other routes of a store."""
        polls = LongPolls()
        self.layers.append(
            Middleware(Rest, access=access, polls=polls, body_limit=body_limit, performed=performed)
        )
        meaning = "Calls that wait for something to answer with."
        self.readings.append(Reading("agl_long_polls", meaning, polls.__len__))
        self.stops.append(polls.stop)
        if isinstance(store, SqlStore):
            self.readings += store_readings(store)
        if isinstance(store, SqlStore | ManyStores):
            events = EventRoutes(store, access)
            self.routes.append(events.route())
            meaning = "Callers that listen to events."
            self.readings.append(Reading("agl_event_streams", meaning, lambda: events.open))
            self.stops.append(events.stop)
        self.routes += [
            *otlp_routes(store, access, body_limit),
            reward_route(store),
            *backup_routes(store, access),
        ]


def _performed(
    store: LightningStore, gateway: Gateway | None, models: Models | None
) -> list[tuple[Sequence[type[StoreCall]], Perform]]:
    """The calls that are described, with what carries them out."""
    performed: list[tuple[Sequence[type[StoreCall]], Perform]] = [
        (list(CALLS.values()), lambda call, caller: store.perform(call))
    ]
    if gateway is not None:
        table = models or Models(gateway)
        performed.append((list(MODEL_CALLS), lambda call, caller: table.perform(call)))
    return performed


def _is_set(admin_key: str | None) -> bool:
    """Whether there is an admin key. ConfigError if it could be guessed."""
    if admin_key is not None and len(admin_key) < 8:
        raise ConfigError(
            "the admin key is shorter than 8 characters; choose one that cannot be guessed"
        )
    return admin_key is not None


def _answer_to(request: Request, error: Exception) -> Response:
    if isinstance(error, AgentLightningError):
        return failure(error)
    if not isinstance(error, HTTPException):
        return defect(error)
    message = f"{error.detail}: {request.method} {request.url.path}"
    if error.status_code == 404:
        message += "; /docs lists what there is"
    return refusal(error.status_code, "http", message, error.headers)


def _answer_to_shortage(request: Request, error: Exception) -> Response:
    if lacking(error) is None:
        raise error  # a defect, whose traceback the log gets
    return defect(error)


_ANSWERS: Final[Mapping[Any, Callable[[Request, Exception], Response]]] = {
    **dict.fromkeys((AgentLightningError, HTTPException, Exception), _answer_to),
    **dict.fromkeys((MemoryError, OSError, RuntimeError), _answer_to_shortage),
}
