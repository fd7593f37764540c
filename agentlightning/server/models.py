"""The gateway's model table over HTTP: a trainer in another process lends its policy to a server's gateway.

`PUT /api/v1/models/NAME` registers the servers of a model under a name, `DELETE` takes it away, `GET /api/v1/models`
lists. This module knows the table, who may change it, and who registered what.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final
from urllib.parse import quote

import aiohttp
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from agentlightning.errors import ConfigError, ConflictError, InvalidError, UnavailableError
from agentlightning.gateway.backend import Backend, Sampling
from agentlightning.gateway.backends.kinds import BackendKind, make_backend
from agentlightning.gateway.models import ModelEntry, ModelTable
from agentlightning.gateway.probe import probe
from agentlightning.gateway.replicas import Replica, Replicas, servers_of
from agentlightning.gateway.updates import keep_versions
from agentlightning.server.access import Access
from agentlightning.server.observing import note_caller
from agentlightning.server.rest import read_body
from agentlightning.store.wire import Answer, error_of

_HEALTH_SECONDS: Final = 2.0
_HERE: Final = "the server itself"

Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
Number = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class RunSampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How calls in one mode sample, whatever the agent asks; see `ModelEntry`."""

    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = 1.0
    top_p: Fraction | None = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0)] | None = 0
    max_tokens: Number | None = None


class BackendRegistration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of a model's servers; what is None is as the registration says for all of them."""

    base_url: str
    kind: BackendKind | None = None
    api_key: str | None = None
    model: str | None = None
    tokenizer: str | None = None
    max_concurrency: Number | None = None
    timeout_seconds: Seconds | None = None


class ModelRegistration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model for the gateway to route to: at `base_url`, or at several `backends`, for which the fields from `kind` to
    `timeout_seconds` are defaults (see `make_backend` and `Replica`).

    `owner` names who registers it, such as a run: the name is taken for others as long as the model's servers live,
    unless they say `replace`. With `check` each server of a trainable model is asked for one token first."""

    base_url: str | None = None
    backends: tuple[BackendRegistration, ...] = ()
    kind: BackendKind = "vllm"
    api_key: str | None = None
    model: str | None = None
    tokenizer: str | None = None
    max_concurrency: Number | None = None
    timeout_seconds: Seconds = 600.0
    aliases: tuple[str, ...] = ()
    trainable: bool = True
    train: RunSampling | None = RunSampling()
    val: RunSampling | None = RunSampling()
    owner: str | None = None
    replace: bool = False
    check: bool = True


class ReplicaDescription(msgspec.Struct, frozen=True, kw_only=True):
    """One server: whether it is used, how many calls it answers and how many wait for it. `ejected_since` is in seconds
    since the epoch, `why` its last failure."""

    base_url: str
    kind: str
    healthy: bool
    running: int
    waiting: int = 0
    ejected_since: float | None = None
    why: str | None = None


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What may be shown of a model: never a key. One that runs in the server's own process has no replicas. While it is
    `held`, new calls are `waiting`. `policy_version` is the oldest that its servers hold, as far as that is known."""

    name: str
    aliases: tuple[str, ...]
    owner: str | None
    trainable: bool
    train: Sampling | None
    val: Sampling | None
    replicas: list[ReplicaDescription]
    held: bool = False
    running: int = 0
    waiting: int = 0
    policy_version: int | None = None


class ModelRoutes:
    """Routes that list and change `models`; only the admin key opens them. A body above `body_limit` bytes is
    refused."""

    def __init__(self, models: ModelTable, access: Access, body_limit: int) -> None:
        self._models = models
        self._access = access
        self._body_limit = body_limit
        self._owners: dict[str, str | None] = {}
        self._changing = asyncio.Lock()
        self._closing: set[asyncio.Future[None]] = set()

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/models", self._list, methods=["GET"]),
            Route("/models/{name:path}", self._put, methods=["PUT"]),
            Route("/models/{name:path}", self._delete, methods=["DELETE"]),
        ]

    async def _list(self, request: Request) -> Response:
        await self._require_admin(request)
        return _json(await asyncio.gather(*map(self._described, self._models)))

    async def _put(self, request: Request) -> Response:
        await self._require_admin(request)
        try:
            asked = msgspec.json.decode(await read_body(request, self._body_limit), type=ModelRegistration)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidError(f"not a model registration: {error}") from None
        entry = await asyncio.to_thread(_entry, str(request.path_params["name"]), asked)  # may read a tokenizer
        try:
            if asked.check and asked.trainable:
                servers = servers_of(entry.backend)
                await asyncio.gather(*(probe(server, entry.name, entry.train) for server in servers))
            async with self._changing:
                await self._require_free(entry, asked)
                replaced = self._models.put(entry)
                if replaced is not None:
                    keep_versions(replaced, entry)
                self._owners[entry.name] = asked.owner
        except BaseException:
            self._retire(entry)
            raise
        self._retire(replaced)
        return _json(await self._described(entry))

    async def _delete(self, request: Request) -> Response:
        """Take a model away; with `?owner=…` only if it is still that owner's."""
        await self._require_admin(request)
        name, owner = str(request.path_params["name"]), request.query_params.get("owner")
        async with self._changing:
            if owner is None or owner == self._owners.get(name):
                self._retire(self._models.remove(name))
                self._owners.pop(name, None)
        return Response(status_code=204)

    async def _require_admin(self, request: Request) -> None:
        scope = await self._access.scope(request.headers)
        note_caller(request.scope, scope.name)
        scope.require_admin()

    async def _require_free(self, entry: ModelEntry, asked: ModelRegistration) -> None:
        """ConflictError where the name is another's whose servers live: one that has died does not come back for it,
        nor does one whose address is the newcomer's by now."""
        present = self._models.get(entry.name)
        if asked.replace or present is None or present.name != entry.name or _urls(present) == _urls(entry):
            return
        owner = self._owners.get(entry.name, _HERE)
        if owner != asked.owner and await _lives(present.backend):
            raise ConflictError(
                f"the model {entry.name!r} is registered by {owner or 'somebody without a name'} and its server lives; "
                'choose another name, take that model away (DELETE), or say "replace": true'
            )

    def _retire(self, entry: ModelEntry | None) -> None:
        """Close a backend nobody is routed to any more, after its calls under way are answered."""
        if entry is not None:
            closing = asyncio.ensure_future(entry.backend.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _described(self, entry: ModelEntry) -> ModelDescription:
        gate = self._models.gate(entry.name)
        own = getattr(getattr(entry.backend, "generator", None), "version", None)  # of an engine in this process
        return ModelDescription(
            name=entry.name,
            aliases=entry.aliases,
            owner=self._owners.get(entry.name, _HERE),
            trainable=entry.trainable,
            train=entry.train,
            val=entry.val,
            replicas=await _replicas(entry.backend),
            held=gate.held,
            running=gate.running,
            waiting=gate.waiting,
            policy_version=min((one.connection.version for one in servers_of(entry.backend)), default=own),
        )


# --- registrations and backends -----------------------------------------------------------------------------------


def _entry(name: str, asked: ModelRegistration) -> ModelEntry:
    """ConfigError for what cannot be one."""
    if (asked.base_url is None) == (not asked.backends):
        raise ConfigError("a registration needs either base_url, or backends with a base_url each")
    replicas = [_replica(one, asked) for one in asked.backends or [BackendRegistration(base_url=str(asked.base_url))]]
    alone = len(replicas) == 1 and replicas[0].max_concurrency is None
    return ModelEntry(
        name,
        replicas[0].backend if alone else Replicas(replicas),
        trainable=asked.trainable,
        train=_sampling(asked.train),
        val=_sampling(asked.val),
        aliases=asked.aliases,
    )


def _replica(one: BackendRegistration, asked: ModelRegistration) -> Replica:
    names = ("kind", "api_key", "model", "tokenizer", "timeout_seconds", "max_concurrency")
    own = {name: getattr(one, name) for name in names if getattr(one, name) is not None}
    settings: dict[str, Any] = {name: getattr(asked, name) for name in names} | own
    limit = settings.pop("max_concurrency")
    return Replica(make_backend(one.base_url, **settings), limit)


def _sampling(asked: RunSampling | None) -> Sampling | None:
    return None if asked is None else Sampling(**msgspec.structs.asdict(asked))


def _urls(entry: ModelEntry) -> set[str]:
    return {server.name for server in servers_of(entry.backend)}


async def _lives(backend: Backend) -> bool:
    asked = [server.connection.healthy(_HEALTH_SECONDS) for server in servers_of(backend)]
    return any(await asyncio.gather(*asked)) if asked else True


async def _replicas(backend: Backend) -> list[ReplicaDescription]:
    """What is known of a backend's servers; one that stands alone is asked for its health now."""
    if isinstance(backend, Replicas):
        return [
            ReplicaDescription(
                base_url=replica.backend.name,
                kind=replica.backend.kind,
                healthy=replica.ejected_since is None and not replica.backend.connection.unusable,
                running=replica.running,
                waiting=len(replica.queue),
                ejected_since=replica.ejected_since,
                why=replica.backend.connection.unusable or replica.why,
            )
            for replica in backend.replicas
        ]
    return [
        ReplicaDescription(
            base_url=server.name,
            kind=server.kind,
            running=server.connection.running,
            healthy=await server.connection.healthy(_HEALTH_SECONDS),
            why=server.connection.unusable,
        )
        for server in servers_of(backend)
    ]


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


# --- the trainer's side -------------------------------------------------------------------------------------------


async def register_model(
    server: str, entry: ModelEntry, *, base_url: str, api_key: str | None, owner: str | None = None, check: bool = True
) -> None:
    """Let the gateway of `server` route `entry.name` to `base_url` (this process's endpoint), in the name of `owner`.

    ConflictError where the name is another owner's, and what else the server refuses as its own error; UnavailableError
    where it cannot be reached."""
    asked = ModelRegistration(
        base_url=base_url,
        aliases=entry.aliases,
        trainable=entry.trainable,
        train=_registered(entry.train),
        val=_registered(entry.val),
        owner=owner,
        check=check,
    )
    await ask("PUT", server, quote(entry.name), api_key, msgspec.json.encode(asked))


async def unregister_model(server: str, name: str, *, api_key: str | None, owner: str | None = None) -> None:
    """Take the model away again; nothing happens if it is gone already, or is another `owner`'s by now."""
    query = "" if owner is None else f"?owner={quote(owner, safe='')}"
    await ask("DELETE", server, quote(name) + query, api_key, None)


def _registered(sampling: Sampling | None) -> RunSampling | None:
    return None if sampling is None else msgspec.convert(sampling, RunSampling, from_attributes=True)


async def ask(
    method: str, server: str, path: str, api_key: str | None, body: bytes | None, *, seconds: float | None = 90.0
) -> bytes:
    """What `server` answers to a request about its models within `seconds`: what it refuses as its own error,
    UnavailableError where it cannot be reached."""
    url = f"{server.rstrip('/')}/api/v1/models/{path}"
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=10.0)  # a check takes as long as a token does
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.request(method, url, data=body, headers=headers) as answer,
        ):
            said = await answer.read()
            if answer.status >= 400:
                raise error_of(Answer(url=url, status=answer.status, content_type=answer.content_type, body=said))
            return said
    except (aiohttp.ClientError, TimeoutError) as error:
        raise UnavailableError(
            f"the server at {server} cannot be reached ({error}); is `agl server` running?"
        ) from None
