"""The gateway's model table over HTTP: how a trainer in another process lends its policy to a
server's gateway, has its calls held while weights are updated. Only an admin key may."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Final

import msgspec

from agentlightning.errors import ConfigError, ConflictError
from agentlightning.gateway.backend import Backend, Sampling
from agentlightning.gateway.backends.factory import BackendKind, make_backend
from agentlightning.gateway.gateway import Gateway
from agentlightning.gateway.models import ModelEntry
from agentlightning.gateway.probe import probe
from agentlightning.gateway.replicas import Replica, Replicas, servers_of
from agentlightning.gateway.updates import declare_version, keep_versions
from agentlightning.store.calls import StoreCall
from agentlightning.types import Noun

_HEALTH_SECONDS: Final = 2.0
_HERE: Final = "the server itself"
_PAGE: Final = "dashboard"  # under which the page's Pause button holds

Version = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]


class RunSampling(Noun, frozen=True, kw_only=True):
    """The sampling of calls in one mode, whatever the agent asks; see `ModelEntry`."""

    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = 1.0
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0)] | None = 0
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None


class ReplicaDescription(msgspec.Struct, frozen=True, kw_only=True):
    """One server: whether it is used, and how many calls it answers. `ejected_since` is in seconds
    since the epoch, `why` its last failure."""

    base_url: str
    kind: str
    healthy: bool
    running: int
    ejected_since: float | None = None
    why: str | None = None


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A model without its keys. One that runs in the server's own process has no replicas. While it
    is `held`, new calls are `waiting`; `paused`, by the page's button. `policy_version` is the
    oldest that its servers hold, as far as that is known."""

    name: str
    aliases: tuple[str, ...]
    owner: str | None
    trainable: bool
    train: Sampling | None
    val: Sampling | None
    replicas: list[ReplicaDescription]
    held: bool = False
    paused: bool = False
    running: int = 0
    waiting: int = 0
    policy_version: int | None = None


class ListModels(StoreCall, frozen=True, kw_only=True):
    """Every model of the gateway, and how each of its servers does."""

    route = "GET /models"
    returns = list[ModelDescription]
    scope = "admin"


class RegisterModel(StoreCall, frozen=True, kw_only=True):
    """Register a model at `base_url`, which may be several servers, or replace the model of this
    name.

    `owner` names who registers it, such as a run: the name is taken for others as long as the
    model's servers live, unless they say `replace`. `train` and `val` are for trainable models.
    With `check` each server of a trainable model is asked for one token first. The other fields are
    those of `make_backend`."""

    route = "PUT /models/{name}"
    scope = "admin"
    audited = True
    returns = ModelDescription
    name: str
    base_url: str | tuple[str, ...]
    kind: BackendKind = "vllm"
    api_key: str | None = None
    model: str | None = None
    tokenizer: str | None = None
    timeout_seconds: Annotated[float, msgspec.Meta(gt=0)] = 600.0
    aliases: tuple[str, ...] = ()
    trainable: bool = True
    train: RunSampling | None = RunSampling()
    val: RunSampling | None = RunSampling()
    owner: str | None = None
    replace: bool = False
    check: bool = True


def registration(entry: ModelEntry, base_url: str, *, api_key: str, owner: str) -> RegisterModel:
    """The call that registers a model of this process, served at `base_url` with `api_key`,
    elsewhere."""

    def run_sampling(sampling: Sampling | None) -> RunSampling | None:
        return sampling and msgspec.convert(sampling, RunSampling, from_attributes=True)

    return RegisterModel(
        name=entry.name,
        base_url=base_url,
        kind="vllm" if entry.trainable else "openai",
        api_key=api_key,
        aliases=entry.aliases,
        trainable=entry.trainable,
        train=run_sampling(entry.train),
        val=run_sampling(entry.val),
        owner=owner,
    )


class RemoveModel(StoreCall, frozen=True, kw_only=True):
    """Take a model away, with an `owner` only if it is still theirs. One that is gone already is no
    error."""

    route = "DELETE /models/{name}"
    scope = "admin"
    audited = True
    name: str
    owner: str | None = None


class HoldModel(StoreCall, frozen=True, kw_only=True):
    """New calls of a model wait from now on, for `seconds` unless they are released or held again
    before. Several may hold, each under a `holder`'s name of its own."""

    route = "POST /models/{name}/hold"
    scope = "admin"
    name: str
    seconds: Seconds = 300.0
    holder: str = "hold"


class ReleaseModel(StoreCall, frozen=True, kw_only=True):
    """Calls pass again, unless another holder holds them. With a `policy_version` they are answered
    by the weights of that version, which the caller has loaded into the model's servers."""

    route = "POST /models/{name}/release"
    scope = "admin"
    name: str
    policy_version: Version | None = None
    holder: str = "hold"


class Models:
    """Carries out the calls about the models of `gateway`. After each that may change something
    `changed` is awaited: where other processes have the same models, it returns when these are as
    they are here."""

    def __init__(self, gateway: Gateway) -> None:
        self.changed: Callable[[], Awaitable[None]] | None = None
        self.registered: dict[str, RegisterModel] = {}
        self.gateway = gateway
        self._models = gateway.models
        self._owners: dict[str, str | None] = {}
        self._changing = asyncio.Lock()
        self._closing: set[asyncio.Future[None]] = set()

    async def perform(self, call: StoreCall) -> Any:
        answer = await MODEL_CALLS[type(call)](self, call)
        if self.changed is not None and not isinstance(call, ListModels):
            await self.changed()
        return answer

    async def describe(self, _: ListModels) -> list[ModelDescription]:
        return await asyncio.gather(*map(self._described, self._models))

    async def register(self, call: RegisterModel) -> ModelDescription:
        return await self._described(await self.put(call))

    async def put(self, call: RegisterModel) -> ModelEntry:
        """Register a model, and do not ask its servers how they are."""
        entry = await asyncio.to_thread(entry_of, call)  # may read a tokenizer
        try:
            if call.check and call.trainable:
                await _check(entry)
            async with self._changing:
                await self._require_free(entry, call)
                replaced = self._models.put(entry)
                if replaced is not None:
                    keep_versions(replaced, entry)
                self._owners[entry.name] = call.owner
                self.registered[entry.name] = call
        except BaseException:
            self._close_when_idle(entry)
            raise
        self._close_when_idle(replaced)
        return entry

    async def remove(self, call: RemoveModel) -> None:
        async with self._changing:
            if call.owner is None or call.owner == self._owners.get(call.name):
                self._close_when_idle(self._models.remove(call.name))
                self._owners.pop(call.name, None)
                self.registered.pop(call.name, None)

    async def hold(self, call: HoldModel) -> None:
        self.gateway.hold(call.name, call.seconds, call.holder)

    async def release(self, call: ReleaseModel) -> None:
        if call.policy_version is not None:
            declare_version(self.gateway.entry(call.name), call.policy_version)
        self.gateway.release(call.name, call.holder)

    async def _require_free(self, entry: ModelEntry, call: RegisterModel) -> None:
        """ConflictError where the name is another's whose servers live: a server that has died does
        not come back for it, nor does a server whose address is the newcomer's by now."""
        present = self._models.get(entry.name)
        if (
            call.replace
            or present is None
            or present.name != entry.name
            or _urls(present) == _urls(entry)
        ):
            return
        owner = self._owners.get(entry.name, _HERE)
        if owner == call.owner:
            return
        servers = servers_of(present.backend)
        checks = (server.connection.healthy(_HEALTH_SECONDS) for server in servers)
        if any(await asyncio.gather(*checks)) or not servers:
            raise ConflictError(
                f"the model {entry.name!r} is registered by {owner or 'an unnamed trainer'} and "
                "its server lives; "
                'choose another name, take that model away (DELETE), or say "replace": true'
            )

    def _close_when_idle(self, entry: ModelEntry | None) -> None:
        """Close a backend nobody is routed to any more, after its calls under way are answered."""
        if entry is not None:
            closing = asyncio.ensure_future(entry.backend.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _described(self, entry: ModelEntry) -> ModelDescription:
        gate = self._models.gate(entry.name)
        # of an engine in this process
        own = getattr(getattr(entry.backend, "generator", None), "version", None)
        return ModelDescription(
            name=entry.name,
            aliases=entry.aliases,
            owner=self._owners.get(entry.name, _HERE),
            trainable=entry.trainable,
            train=entry.train,
            val=entry.val,
            replicas=await _replicas(entry.backend),
            held=gate.held,
            paused=gate.held_by(_PAGE),
            running=gate.running,
            waiting=gate.waiting,
            policy_version=min(
                (server.connection.version for server in servers_of(entry.backend)), default=own
            ),
        )


MODEL_CALLS: Final[Mapping[type[StoreCall], Callable[[Models, Any], Awaitable[Any]]]] = {
    ListModels: Models.describe,
    RegisterModel: Models.register,
    RemoveModel: Models.remove,
    HoldModel: Models.hold,
    ReleaseModel: Models.release,
}


async def _check(entry: ModelEntry) -> None:
    """ConfigError where its servers' answers cannot be trained."""
    try:
        await asyncio.gather(
            *(probe(server, entry.name, entry.train) for server in servers_of(entry.backend))
        )
    except ConfigError as error:
        raise ConfigError(
            f'{error}. Or register the model with "trainable": false to only evaluate it, or with '
            '"check": false to '
            "have it taken unseen, as an adapter that is still to be loaded"
        ) from None


def entry_of(call: RegisterModel) -> ModelEntry:
    """The entry that a registration puts into the table. May read a tokenizer. ConfigError for what
    cannot be one."""
    urls = [call.base_url] if isinstance(call.base_url, str) else call.base_url
    if not urls:
        raise ConfigError("base_url names no server; give one, or several")
    if not call.trainable and not {call.train, call.val} <= {None, RunSampling()}:
        raise ConfigError(
            "train and val are the sampling of a trainable model; a frozen one is asked as agents "
            "ask it"
        )
    settings = {
        name: getattr(call, name)
        for name in ("kind", "api_key", "model", "tokenizer", "timeout_seconds")
    }
    servers = [make_backend(url, **settings) for url in urls]
    return ModelEntry(
        call.name,
        servers[0] if len(servers) == 1 else Replicas(servers),
        trainable=call.trainable,
        train=call.train and msgspec.convert(call.train, Sampling, from_attributes=True),
        val=call.val and msgspec.convert(call.val, Sampling, from_attributes=True),
        aliases=call.aliases,
        lent=call.owner is not None,
    )


def _urls(entry: ModelEntry) -> set[str]:
    return {server.name for server in servers_of(entry.backend)}


async def _replicas(backend: Backend) -> list[ReplicaDescription]:
    """The state of a backend's servers, as far as it is known; a server that stands alone is asked
    for its health now."""
    several = backend.replicas if isinstance(backend, Replicas) else None
    replicas = several or [
        Replica(server, server.connection.running) for server in servers_of(backend)
    ]
    return [
        ReplicaDescription(
            base_url=replica.backend.name,
            kind=replica.backend.kind,
            healthy=not replica.backend.connection.unusable
            and (
                replica.usable
                if several
                else await replica.backend.connection.healthy(_HEALTH_SECONDS)
            ),
            running=replica.running,
            ejected_since=replica.ejected_since,
            why=replica.backend.connection.unusable or replica.why,
        )
        for replica in replicas
    ]
