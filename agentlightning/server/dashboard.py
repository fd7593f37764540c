"""The dashboard over HTTP: its page at `/`, sessions of browsers, and its views, each for keys with
its scope."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.resources
import mimetypes
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from agentlightning.dashboard.run_views import MetricsCache
from agentlightning.dashboard.token_views import HasTokenBytes, Tokenizers
from agentlightning.dashboard.views import VIEWS, Sources, View
from agentlightning.errors import InvalidError, NotFoundError, UnavailableError
from agentlightning.gateway.models import ModelTable
from agentlightning.server.access import (
    Access,
    Principal,
    UnauthenticatedError,
    require_same_origin,
)
from agentlightning.server.request_log import note_caller
from agentlightning.server.requests import caller_of, in_json, receive_body
from agentlightning.server.rest import PREFIX, Perform
from agentlightning.store.base import CALLS, LightningStore
from agentlightning.store.calls import StoreCall
from agentlightning.store.many import ManyStores
from agentlightning.types import KeyScope

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' "
    "data:; font-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)
_SAFE: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}
_NOT_KEPT: Final = _SAFE | {"cache-control": "no-store"}
# which `npm run build` writes
_STATIC: Final = importlib.resources.files("agentlightning.dashboard") / "static"
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_LONGEST_KEY: Final = 10_000  # bytes, with what is around it


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """Who looks, and what they may do. `admin`: everything, unless the page is `reading` alone.
    `protected`: a key is needed here. `gateway`: it has models to call."""

    name: str
    admin: bool
    scopes: list[KeyScope]
    protected: bool
    reading: bool
    gateway: bool
    version: str


class SentKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: str


def page_views(
    store: LightningStore, models: ModelTable
) -> tuple[Sequence[type[StoreCall]], Perform]:
    """The views of the page, and what makes one for a caller."""
    served = {
        entry.name: entry.backend.token_bytes
        for entry in models
        if isinstance(entry.backend, HasTokenBytes)
    }

    def address_of(rollout_id: str) -> str | None:
        return (
            store.address_of(rollout_id)
            if isinstance(store, ManyStores)
            else getattr(store, "address", None)
        )

    tokenizers = Tokenizers(address_of, served)

    measured = MetricsCache()

    async def perform(call: StoreCall, caller: Principal) -> Any:
        assert isinstance(call, View)
        return await call.read(Sources(store, tokenizers, measured, caller.name))

    return VIEWS, perform


def page_routes(
    access: Access, *, protected: bool, reading: bool, gateway: bool
) -> list[BaseRoute]:
    """The page and its files, which hold nothing of the store and need no key; the way to it with a
    key, for a link to be clicked; and sessions."""
    version = importlib.metadata.version("agent-lightning-next")

    async def scope_of(request: Request, key: str) -> Principal:
        """The rights of a key that begins a session."""
        scope = await access.scope({**request.headers, "authorization": f"Bearer {key}"})
        scope.require(CALLS["page_rollouts"])
        note_caller(request.scope, scope.name)
        return scope

    async def open_with_key(request: Request) -> Response:
        """Begin a session of the key in the path. The page that follows keeps the link's
        fragment."""
        key = request.path_params["key"]
        await scope_of(request, key)
        cookie = access.sessions.begin(request.headers, key, secure=request.url.scheme == "https")
        return Response(
            status_code=303, headers=_NOT_KEPT | {"location": "/", "set-cookie": cookie}
        )

    async def session(request: Request) -> Response:
        secure = request.url.scheme == "https"
        headers = dict(_NOT_KEPT)
        if request.method != "GET":
            require_same_origin(request.headers)
        if request.method == "DELETE":
            headers["set-cookie"] = access.sessions.end(request.headers, secure=secure)
            return Response(status_code=204, headers=headers)
        if request.method == "GET":
            scope = await caller_of(request, access)
            scope.require(CALLS["page_rollouts"])
        else:
            try:
                key = msgspec.json.decode(
                    await receive_body(request.receive, _LONGEST_KEY), type=SentKey
                ).key
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise InvalidError(f"the body is not as it should be: {error}") from None
            scope = await scope_of(request, key)
            if scope == Principal():  # whoever is here needs no key, and this one is none
                raise UnauthenticatedError(
                    "the key is not valid here; this server needs none from this machine"
                )
            headers["set-cookie"] = access.sessions.begin(request.headers, key, secure=secure)
        shown = Session(
            name=scope.name,
            admin="admin" in scope.opens,
            scopes=sorted(scope.opens),
            protected=protected,
            reading=reading,
            gateway=gateway,
            version=version,
        )
        return in_json(shown, headers=headers)

    routes = {
        "/": (_index, ["GET"]),
        "/assets/{name}": (_asset, ["GET"]),
        "/open/{key}": (open_with_key, ["GET"]),
        f"{PREFIX}/dashboard/session": (session, ["GET", "POST", "DELETE"]),
    }
    return [Route(path, answer, methods=methods) for path, (answer, methods) in routes.items()]


@functools.cache
def page() -> bytes:
    """The page itself. UnavailableError where this installation lacks it."""
    try:
        return (_STATIC / "index.html").read_bytes()
    except FileNotFoundError:
        raise UnavailableError(
            "this installation lacks the dashboard's page: build it (`npm ci && npm run build` in "
            "dashboard/ of the source), or install a released wheel; everything else of this "
            "server works without it"
        ) from None


@functools.lru_cache(maxsize=256)
def page_file(name: str) -> tuple[bytes, str]:
    """A file that the page refers to, and its media type. NotFoundError where there is none of this
    name."""
    file = _STATIC / "assets" / name
    if not _NAME.fullmatch(name) or not file.is_file():
        raise NotFoundError(f"the dashboard has no file {name!r}; reload the page")
    return file.read_bytes(), mimetypes.guess_type(name)[0] or "application/octet-stream"


async def _index(request: Request) -> Response:
    return Response(page(), media_type="text/html", headers=_SAFE | {"cache-control": "no-cache"})


async def _asset(request: Request) -> Response:
    content, media_type = page_file(request.path_params["name"])
    # Names hold a hash of what is in them.
    about: Mapping[str, str] = {"cache-control": "public, max-age=31536000, immutable"}
    return Response(content, media_type=media_type, headers={**_SAFE, **about})
