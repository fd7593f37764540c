"""The gateway's model table over HTTP: a trainer in another process lends its policy to a server's gateway, and has
its calls held while weights are updated.

`PUT /api/v1/models/NAME` registers the servers of a model under a name, `DELETE` takes it away, `GET /api/v1/models`
lists; `POST /api/v1/models/NAME/hold` lets its calls wait, `/release` lets them through, and `/weights` has its servers
load new weights. This module knows the table, who may change it, who registered what, and how a trainer asks for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Final, get_type_hints
from urllib.parse import quote

import aiohttp
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from agentlightning.errors import ConfigError, ConflictError, UnavailableError
from agentlightning.gateway.app import Gateway
from agentlightning.gateway.backend import Backend, Sampling
from agentlightning.gateway.backends.kinds import BackendKind, make_backend
from agentlightning.gateway.models import ModelEntry
from agentlightning.gateway.probe import probe
from agentlightning.gateway.replicas import RemoteBackend, Replica, Replicas, servers_of
from agentlightning.gateway.updates import ServerUpdate, WeightUpdate, declare_version, keep_versions, update_weights
from agentlightning.server.access import Access
from agentlightning.server.requests import asked_of, caller_of, in_json
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
    timeout_seconds: Seconds | None = None


class ModelRegistration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model for the gateway to route to: at `base_url`, or at several `backends`, for which the fields from `kind` to
    `timeout_seconds` are defaults (see `make_backend`).

    `owner` names who registers it, such as a run: the name is taken for others as long as the model's servers live,
    unless they say `replace`. `train` and `val` are for trainable models: temperature 1 unless they say otherwise. With
    `check` each server of a trainable model is asked for one token first."""

    base_url: str | None = None
    backends: tuple[BackendRegistration, ...] = ()
    kind: BackendKind = "vllm"
    api_key: str | None = None
    model: str | None = None
    tokenizer: str | None = None
    timeout_seconds: Seconds = 600.0
    aliases: tuple[str, ...] = ()
    trainable: bool = True
    train: RunSampling | msgspec.UnsetType | None = msgspec.UNSET
    val: RunSampling | msgspec.UnsetType | None = msgspec.UNSET
    owner: str | None = None
    replace: bool = False
    check: bool = True


class ReplicaDescription(msgspec.Struct, frozen=True, kw_only=True):
    """One server: whether it is used, and how many calls it answers. `ejected_since` is in seconds since the epoch,
    `why` its last failure."""

    base_url: str
    kind: str
    healthy: bool
    running: int
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


class Hold(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Calls wait from now on, for `seconds` unless they are released or held again before. Several may hold, each under
    a `holder`'s name of its own."""

    seconds: Annotated[float, msgspec.Meta(gt=0, le=86400)] = 300.0
    holder: str = "hold"


class Release(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Calls pass again, unless another holder holds them. With a `policy_version` they are answered by the weights of
    that version, which the caller has loaded into the model's servers."""

    policy_version: Annotated[int, msgspec.Meta(ge=0)] | None = None
    holder: str = "hold"


class Updated(msgspec.Struct, frozen=True, kw_only=True):
    """What became of each server."""

    servers: list[ServerUpdate]


class ModelRoutes:
    """Routes that list, change, hold and update the models of `gateway`; only the admin key opens them. A body above
    `body_limit` bytes is refused."""

    def __init__(self, gateway: Gateway, access: Access, body_limit: int) -> None:
        self._gateway = gateway
        self._models = gateway.models
        self._access = access
        self._body_limit = body_limit
        self._owners: dict[str, str | None] = {}
        self._changing = asyncio.Lock()
        self._closing: set[asyncio.Future[None]] = set()

    def routes(self) -> list[BaseRoute]:
        return [
            Route(path.replace("{name}", "{name:path}"), self._answering(handler), methods=[method])
            for method, _, path, handler in ((*route.partition(" "), one) for route, one in MODEL_CALLS.items())
        ]

    def _answering(self, handler: Callable[..., Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
        """What a handler `asked` for is read from the body, and what it returns is the answer's."""
        hints = get_type_hints(handler)

        async def answer(request: Request) -> Response:
            (await caller_of(request, self._access)).require_admin()
            given: dict[str, Any] = dict(request.path_params)
            if "asked" in hints:
                given["asked"] = await asked_of(request, hints["asked"], self._body_limit)
            if "owner" in hints:
                given["owner"] = request.query_params.get("owner")
            answered = await handler(self, **given)
            return Response(status_code=204) if answered is None else in_json(answered)

        return answer

    async def list_models(self) -> list[ModelDescription]:
        """Every model of the gateway, and how each of its servers does"""
        return await asyncio.gather(*map(self._described, self._models))

    async def register_model(self, name: str, asked: ModelRegistration) -> ModelDescription:
        """Register a model's servers, or replace the model of this name"""
        entry = await asyncio.to_thread(_entry, name, asked)  # may read a tokenizer
        try:
            if asked.check and asked.trainable:
                await _check(entry)
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
        return await self._described(entry)

    async def remove_model(self, name: str, owner: str | None) -> None:
        """Take a model away; with `owner` only if it is still theirs"""
        async with self._changing:
            if owner is None or owner == self._owners.get(name):
                self._retire(self._models.remove(name))
                self._owners.pop(name, None)

    async def hold_model(self, name: str, asked: Hold) -> None:
        """Let a model's calls wait, as while its weights are changed"""
        self._gateway.hold(name, seconds=asked.seconds, holder=asked.holder)

    async def release_model(self, name: str, asked: Release) -> None:
        """Let a model's calls through again"""
        if asked.policy_version is not None:
            declare_version(self._gateway.entry(name), asked.policy_version)
        self._gateway.release(name, holder=asked.holder)

    async def update_weights(self, name: str, asked: WeightUpdate) -> Updated:
        """Have a model's servers load weights, its calls held"""
        return Updated(servers=await update_weights(self._gateway, name, asked))

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


MODEL_CALLS: Final[Mapping[str, Callable[..., Awaitable[Any]]]] = {
    "GET /models": ModelRoutes.list_models,
    "PUT /models/{name}": ModelRoutes.register_model,
    "DELETE /models/{name}": ModelRoutes.remove_model,
    "POST /models/{name}/hold": ModelRoutes.hold_model,
    "POST /models/{name}/release": ModelRoutes.release_model,
    "POST /models/{name}/weights": ModelRoutes.update_weights,
}


# --- registrations and backends -----------------------------------------------------------------------------------


async def _check(entry: ModelEntry) -> None:
    """ConfigError where its servers' answers cannot be trained."""
    try:
        await asyncio.gather(*(probe(server, entry.name, entry.train) for server in servers_of(entry.backend)))
    except ConfigError as error:
        raise ConfigError(
            f'{error}. Or register the model with "trainable": false to only evaluate it, or with "check": false to '
            "have it taken unseen, as an adapter that is still to be loaded"
        ) from None


def _entry(name: str, asked: ModelRegistration) -> ModelEntry:
    """ConfigError for what cannot be one."""
    if (asked.base_url is None) == (not asked.backends):
        raise ConfigError("a registration needs either base_url, or backends with a base_url each")
    if not asked.trainable and (asked.train or asked.val):
        raise ConfigError("train and val are the sampling of a trainable model; a frozen one is asked as agents ask it")
    servers = [_server(one, asked) for one in asked.backends or [BackendRegistration(base_url=str(asked.base_url))]]
    return ModelEntry(
        name,
        servers[0] if len(servers) == 1 else Replicas(servers),
        trainable=asked.trainable,
        train=_sampling(asked.train),
        val=_sampling(asked.val),
        aliases=asked.aliases,
    )


def _server(one: BackendRegistration, asked: ModelRegistration) -> RemoteBackend:
    names = ("kind", "api_key", "model", "tokenizer", "timeout_seconds")
    own = {name: getattr(one, name) for name in names if getattr(one, name) is not None}
    settings: dict[str, Any] = {name: getattr(asked, name) for name in names} | own
    return make_backend(one.base_url, **settings)


def _sampling(asked: RunSampling | msgspec.UnsetType | None) -> Sampling | None:
    if asked is None:
        return None
    return Sampling() if asked is msgspec.UNSET else Sampling(**msgspec.structs.asdict(asked))


def _urls(entry: ModelEntry) -> set[str]:
    return {server.name for server in servers_of(entry.backend)}


async def _lives(backend: Backend) -> bool:
    asked = [server.connection.healthy(_HEALTH_SECONDS) for server in servers_of(backend)]
    return any(await asyncio.gather(*asked)) if asked else True


async def _replicas(backend: Backend) -> list[ReplicaDescription]:
    """What is known of a backend's servers; one that stands alone is asked for its health now."""
    if isinstance(backend, Replicas):
        replicas = [(one, one.running, one.ejected_since is None) for one in backend.replicas]
    else:
        replicas = [
            (Replica(one), one.connection.running, await one.connection.healthy(_HEALTH_SECONDS))
            for one in servers_of(backend)
        ]
    return [
        ReplicaDescription(
            base_url=one.backend.name,
            kind=one.backend.kind,
            healthy=healthy and not one.backend.connection.unusable,
            running=running,
            ejected_since=one.ejected_since,
            why=one.backend.connection.unusable or one.why,
        )
        for one, running, healthy in replicas
    ]


# --- a trainer's side -------------------------------------------------------------------------------------------


async def register_model(
    server: str,
    entry: ModelEntry,
    *,
    base_url: str,
    api_key: str | None,
    backend_key: str | None = None,
    owner: str | None = None,
    check: bool = True,
) -> None:
    """Let the gateway of `server`, whose key is `api_key`, route `entry.name` to `base_url` (this process's endpoint,
    whose key is `backend_key`), in the name of `owner`.

    ConflictError where the name is another owner's, and what else the server refuses as its own error; UnavailableError
    where it cannot be reached."""
    asked = ModelRegistration(
        base_url=base_url,
        api_key=backend_key,
        kind="vllm" if entry.trainable else "openai",
        aliases=entry.aliases,
        trainable=entry.trainable,
        train=_registered(entry.train),
        val=_registered(entry.val),
        owner=owner,
        check=check,
    )
    await _ask("PUT", server, quote(entry.name), api_key, asked)


async def unregister_model(server: str, name: str, *, api_key: str | None, owner: str | None = None) -> None:
    """Take the model away again; nothing happens if it is gone already, or is another `owner`'s by now."""
    query = "" if owner is None else f"?owner={quote(owner, safe='')}"
    await _ask("DELETE", server, quote(name) + query, api_key, None)


def _registered(sampling: Sampling | None) -> RunSampling | None:
    return None if sampling is None else msgspec.convert(sampling, RunSampling, from_attributes=True)


async def hold_model(server: str, name: str, *, api_key: str | None, seconds: float = 300.0) -> None:
    """Let calls of the model wait at the gateway of `server`, for `seconds` unless it is released or held again."""
    await _ask("POST", server, f"{quote(name)}/hold", api_key, Hold(seconds=seconds), seconds=30.0)


async def release_model(server: str, name: str, *, api_key: str | None, policy_version: int | None = None) -> None:
    """Let them through again; see `Release`."""
    asked = Release(policy_version=policy_version)
    await _ask("POST", server, f"{quote(name)}/release", api_key, asked, seconds=30.0)


async def update_model(server: str, name: str, update: WeightUpdate, *, api_key: str | None) -> list[ServerUpdate]:
    """Have the model's servers load weights; see `gateway.updates.update_weights`."""
    # As long as weights take to load.
    answer = await _ask("POST", server, f"{quote(name)}/weights", api_key, update, seconds=None)
    return msgspec.json.decode(answer, type=Updated).servers


async def _ask(
    method: str,
    server: str,
    path: str,
    api_key: str | None,
    body: msgspec.Struct | None,
    *,
    seconds: float | None = 90.0,
) -> bytes:
    """What `server` answers to a request about its models within `seconds`: what it refuses as its own error,
    UnavailableError where it cannot be reached."""
    url = f"{server.rstrip('/')}/api/v1/models/{path}"
    data = None if body is None else msgspec.json.encode(body)
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=10.0)  # a check takes as long as a token does
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.request(method, url, data=data, headers=headers) as answer,
        ):
            said = await answer.read()
            if answer.status >= 400:
                raise error_of(Answer(url=url, status=answer.status, content_type=answer.content_type, body=said))
            return said
    except (aiohttp.ClientError, TimeoutError) as error:
        raise UnavailableError(
            f"the server at {server} cannot be reached ({error}); is `agl server` running?"
        ) from None
