"""The dashboard over HTTP: its page at `/`, and the data the page shows below `/api/v1/dashboard`.

Each route reads the store in the caller's name: what their key may not call through the store's own interface, it does
not reach here either. This module knows requests and keys; what is shown is made in `agentlightning.dashboard`.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import importlib.resources
import mimetypes
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from agentlightning.dashboard import credit, rollouts, runs, tokens
from agentlightning.data.recorded import CreditSettings
from agentlightning.errors import InvalidError, NotFoundError, UnavailableError
from agentlightning.server.access import Access, Scope, UnauthenticatedError
from agentlightning.server.logs import note_caller
from agentlightning.server.requests import asked_of, caller_of, in_json
from agentlightning.server.sessions import require_same_origin
from agentlightning.store.base import CALLS, LightningStore
from agentlightning.store.calls import Call
from agentlightning.types import KeyScope

if TYPE_CHECKING:
    from agentlightning.data.token_bytes import TokenBytes

T = TypeVar("T")

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "font-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)
_SAFE: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}
_STATIC: Final = importlib.resources.files("agentlightning.dashboard") / "static"  # which `npm run build` writes
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """Who looks, and what they may do. `admin`: everything. `protected`: a key is needed here."""

    name: str
    admin: bool
    scopes: list[KeyScope]
    protected: bool
    version: str


class SentKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: str


class CreditAsked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rollout_id: str | None = None
    group_id: str | None = None
    settings: CreditSettings | None = None


class ConfinedStore(LightningStore):
    """The store as one caller may use it."""

    def __init__(self, store: LightningStore, scope: Scope) -> None:
        self._store = store
        self.scope = scope

    async def perform(self, call: Call) -> Any:
        self.scope.require(type(call))
        self.scope.check(call)
        return await self._store.perform(call)

    async def close(self) -> None:
        """The store belongs to the server."""


class DashboardRoutes:
    """The routes over one store. `tokenizers` tell the texts of tokens; a body above `body_limit` bytes is refused."""

    def __init__(
        self,
        store: LightningStore,
        access: Access,
        body_limit: int,
        tokenizers: tokens.Tokenizers,
        *,
        protected: bool,
    ) -> None:
        self._store = store
        self._access = access
        self._body_limit = body_limit
        self._tokenizers = tokenizers
        self._protected = protected
        self._runs = runs.Runs()

    def page_routes(self) -> list[BaseRoute]:
        """The page and its files, which hold nothing of the store and need no key; and the way to it with a key, for a
        link to be clicked."""
        return [
            Route("/", _index, methods=["GET"]),
            Route("/assets/{name}", _asset, methods=["GET"]),
            Route("/open/{key}", self._open, methods=["GET"]),
        ]

    def routes(self) -> list[BaseRoute]:
        """The data, below `/api/v1`."""
        reads: Mapping[str, Callable[[ConfinedStore, Request], Awaitable[Any]]] = {
            "GET /runs": lambda store, request: self._runs.rows(store),
            "GET /series": self._series,
            "GET /quality": self._quality,
            "GET /prompts": self._prompts,
            "POST /rollouts": self._rollouts,
            "GET /rollouts/{rollout_id}": self._rollout,
            "GET /rollouts/{rollout_id}/request": self._request,
            "GET /rollouts/{rollout_id}/tokens": self._tokens,
            "POST /rollouts/{rollout_id}/score": self._score,
            "GET /groups/{group_id}": lambda store, request: credit.group_view(store, request.path_params["group_id"]),
            "GET /groups/{group_id}/tree": self._tree,
            "POST /credit": self._credit,
        }
        return [
            Route("/dashboard/session", self._session, methods=["GET", "POST", "DELETE"]),
            Route("/dashboard/export", self._export, methods=["POST"]),
            *(
                Route(f"/dashboard{path}", self._reading(read), methods=[method])
                for route, read in reads.items()
                for method, path in [route.split(" ")]
            ),
        ]

    def _reading(
        self, read: Callable[[ConfinedStore, Request], Awaitable[Any]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            return _json(await read(await self._confined(request), request))

        return answer

    async def _confined(self, request: Request) -> ConfinedStore:
        scope = await caller_of(request, self._access)
        scope.require(CALLS["page_rollouts"])
        return ConfinedStore(self._store, scope)

    # --- sessions ---

    async def _open(self, request: Request) -> Response:
        """Begin a session of the key in the path. The page that follows keeps the link's fragment."""
        key = request.path_params["key"]
        scope = await self._access.scope({**request.headers, "authorization": f"Bearer {key}"})
        scope.require(CALLS["page_rollouts"])
        note_caller(request.scope, scope.name)
        cookie = self._access.sessions.begin(request.headers, key, secure=request.url.scheme == "https")
        about = {"location": "/", "set-cookie": cookie, "cache-control": "no-store"}
        return Response(status_code=303, headers=_SAFE | about)

    async def _session(self, request: Request) -> Response:
        secure = request.url.scheme == "https"
        if request.method == "DELETE":
            require_same_origin(request.headers)
            return Response(
                status_code=204, headers={"set-cookie": self._access.sessions.end(request.headers, secure=secure)}
            )
        headers: dict[str, str] = {}
        if request.method == "GET":
            scope = (await self._confined(request)).scope
        else:
            require_same_origin(request.headers)
            key = (await asked_of(request, SentKey, self._body_limit)).key
            scope = await self._access.scope({**request.headers, "authorization": f"Bearer {key}"})
            scope.require(CALLS["page_rollouts"])
            if scope == Scope():  # whoever is here needs no key, and this one is none
                raise UnauthenticatedError("the key is not valid here; this server needs none from this machine")
            headers["set-cookie"] = self._access.sessions.begin(request.headers, key, secure=secure)
        note_caller(request.scope, scope.name)
        return _json(
            Session(
                name=scope.name,
                admin=scope.is_admin,
                scopes=sorted(scope.opens),
                protected=self._protected,
                version=importlib.metadata.version("agent-lightning-next"),
            ),
            headers,
        )

    # --- what is read ---

    async def _series(self, store: ConfinedStore, request: Request) -> Any:
        asked = request.query_params
        points = _whole(asked.get("points", "400"), "points")
        return await self._runs.series(store, asked.getlist("run"), asked.getlist("name"), points)

    async def _quality(self, store: ConfinedStore, request: Request) -> Any:
        run = await runs.find_run(store, _asked(request, "run"))
        measured = await self._runs.metrics(store, run)
        if any("rollouts" in one.values for one in measured):
            return await asyncio.to_thread(runs.measured_quality, run, measured)
        return await credit.sampled_quality(store, run.run_id)

    async def _prompts(self, store: ConfinedStore, request: Request) -> Any:
        return await runs.prompts(store, await runs.find_run(store, _asked(request, "run")))

    async def _rollouts(self, store: ConfinedStore, request: Request) -> Any:
        return await rollouts.list_rollouts(store, await asked_of(request, rollouts.ListQuery, self._body_limit))

    async def _rollout(self, store: ConfinedStore, request: Request) -> Any:
        rollout = await credit.require(store, request.path_params["rollout_id"])
        attempts = await store.query_attempts(rollout.rollout_id)
        number = request.query_params.get("attempt")
        shown = len(attempts) if number is None else _whole(number, "attempt")
        if number is not None and not 1 <= shown <= len(attempts):
            raise NotFoundError(f"rollout {rollout.rollout_id} has {len(attempts)} attempts; there is no {number}")
        spans = await store.query_spans(rollout.rollout_id, attempts[shown - 1].attempt_id) if attempts else []
        row = (await rollouts.rows_of(store, [rollout]))[0]
        training = await credit.trained_by(store, rollout.run_id)
        classifier = tokens.classifier_of(await self._token_bytes())
        return await asyncio.to_thread(
            rollouts.rollout_view, row, attempts, shown if attempts else None, spans, training, classifier
        )

    async def _request(self, store: ConfinedStore, request: Request) -> Any:
        return rollouts.replay_request(
            await store.query_spans(request.path_params["rollout_id"]), _asked(request, "call")
        )

    async def _tokens(self, store: ConfinedStore, request: Request) -> Any:
        rollout = await credit.require(store, request.path_params["rollout_id"])
        group = await credit.compared_with(store, rollout)
        spans = await store.query_spans(rollout.rollout_id, "latest")
        traced = next(one for one in group.traced if one.rollout.rollout_id == rollout.rollout_id)
        found = await asyncio.to_thread(self._tokenizers.find)
        asked = request.query_params.get("call")
        return await asyncio.to_thread(tokens.token_view, traced, spans, group, asked, found)

    async def _tree(self, store: ConfinedStore, request: Request) -> Any:
        group = await credit.find_group(store, request.path_params["group_id"])
        traced = await credit.trace_group(store, group.rollout_ids)
        return await asyncio.to_thread(credit.prefix_tree, traced.traced, await self._token_bytes())

    async def _credit(self, store: ConfinedStore, request: Request) -> Any:
        asked = await asked_of(request, CreditAsked, self._body_limit)
        if (asked.rollout_id is None) == (asked.group_id is None):
            raise InvalidError("give either rollout_id or group_id")
        if asked.group_id is not None:
            group = await credit.trace_group(store, (await credit.find_group(store, asked.group_id)).rollout_ids)
        else:
            group = await credit.compared_with(store, await credit.require(store, str(asked.rollout_id)))
        return await asyncio.to_thread(group.view, asked.settings)

    async def _token_bytes(self) -> TokenBytes | None:
        found = await asyncio.to_thread(self._tokenizers.find)
        return None if found is None else found[1]

    # --- what is done ---

    async def _score(self, store: ConfinedStore, request: Request) -> Any:
        store.scope.require(CALLS["store_spans"])
        rollout = await credit.require(store, request.path_params["rollout_id"])
        await rollouts.give_score(
            store, rollout, await asked_of(request, rollouts.Score, self._body_limit), store.scope.name
        )
        return (await rollouts.rows_of(store, [rollout]))[0]

    async def _export(self, request: Request) -> Response:
        store = await self._confined(request)
        selection = await asked_of(request, rollouts.Selection, self._body_limit)
        await store.page_rollouts(selection.filter, limit=1)  # refuses what is no filter while that can be said
        about = {"content-disposition": f'attachment; filename="{selection.file_name}"'}
        return StreamingResponse(
            rollouts.export_rollouts(store, selection), media_type="application/octet-stream", headers=_SAFE | about
        )


@functools.cache
def page() -> bytes:
    """The page itself. UnavailableError where this installation lacks it."""
    try:
        return (_STATIC / "index.html").read_bytes()
    except FileNotFoundError:
        raise UnavailableError(
            "this installation lacks the dashboard's page: build it (`npm ci && npm run build` in dashboard/ of the "
            "source), or install a released wheel; everything else of this server works without it"
        ) from None


@functools.lru_cache(maxsize=256)
def page_file(name: str) -> tuple[bytes, str]:
    """A file that the page refers to, and its media type. NotFoundError where there is none of this name."""
    file = _STATIC / "assets" / name
    if not _NAME.fullmatch(name) or not file.is_file():
        raise NotFoundError(f"the dashboard has no file {name!r}; reload the page")
    return file.read_bytes(), mimetypes.guess_type(name)[0] or "application/octet-stream"


async def _index(request: Request) -> Response:
    return Response(page(), media_type="text/html", headers=_SAFE | {"cache-control": "no-cache"})


async def _asset(request: Request) -> Response:
    content, media_type = page_file(request.path_params["name"])
    # Names hold a hash of what is in them.
    return Response(
        content, media_type=media_type, headers=_SAFE | {"cache-control": "public, max-age=31536000, immutable"}
    )


def _asked(request: Request, name: str) -> str:
    value = request.query_params.get(name)
    if not value:
        raise InvalidError(f"say which: {request.url.path}?{name}=…")
    return value


def _whole(text: str, name: str) -> int:
    if not text.isdecimal():
        raise InvalidError(f"{name} is {text!r:.50}; give a whole number")
    return int(text[:9])


def _json(value: Any, headers: Mapping[str, str] | None = None) -> Response:
    return in_json(value, headers={**_SAFE, "cache-control": "no-store", **(headers or {})})
