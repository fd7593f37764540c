"""Loads new weights into a model's servers: requests by kind of server, their order, and failures.

Knows the control routes of vLLM and SGLang; no training, rollouts, or HTTP server of our own.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from agentlightning.errors import BackendError, ConfigError, ConflictError, UnavailableError
from agentlightning.gateway.app import Gateway
from agentlightning.gateway.backends.connection import Connection
from agentlightning.gateway.models import ModelEntry
from agentlightning.gateway.replicas import RemoteBackend, servers_of

_log = logging.getLogger(__name__)
_HOLDER: Final = "an update of weights"
_ADAPTERS_NEED: Final = "vLLM 0.16 or later with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora"
_NOT_THERE: Final = "no_such_route"
_FAILED: Final = re.compile(r'"success"\s*:\s*false')  # what servers answer with 200 where a cache is in use


class WeightUpdate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights to serve as `policy_version`: the checkpoint at `path`, which every server can read. Without a path, vLLM
    reads its own checkpoint again.

    `in_flight` says what happens to running calls: `finish` first, within `seconds`, or `pause` and continue with the
    new weights."""

    policy_version: Annotated[int, msgspec.Meta(ge=0)]
    path: str | None = None
    in_flight: Literal["finish", "pause"] = "finish"
    seconds: Annotated[float, msgspec.Meta(gt=0, le=86400)] = 300.0


class ServerUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one server: its weights' version now, None if unknown, and the error, if any."""

    url: str
    policy_version: int | None
    error: str | None = None


async def update_weights(gateway: Gateway, name: str, update: WeightUpdate) -> list[ServerUpdate]:
    """Load weights into all servers of a model while its calls are held; one result per server.

    A server that fails gets no calls until another update succeeds, since its weights are unknown. One without such a
    route is unchanged and keeps its version.

    NotFoundError for an unknown model, ConfigError if its servers cannot do it, ConflictError during another update,
    UnavailableError if calls do not finish in time (nothing has changed), BackendError 502 if no server has loaded the
    weights."""
    entry = gateway.entry(name)
    servers = servers_of(entry.backend)
    _scripts(entry.name, servers, update)  # what cannot be had is refused before calls are held
    if gateway.models.gate(entry.name).held_by(_HOLDER):
        raise ConflictError(f"the weights of the model {entry.name!r} are being updated already; wait for that update")
    async with gateway.held(entry.name, holder=_HOLDER):
        if update.in_flight == "finish":
            await _finished(gateway, entry.name, update.seconds)
        try:
            return await load_weights(entry.name, servers, update)
        finally:
            keep_versions(entry, gateway.models.get(entry.name) or entry)  # it may have been registered again meanwhile


async def load_weights(name: str, servers: Sequence[RemoteBackend], update: WeightUpdate) -> list[ServerUpdate]:
    """`update_weights` for servers whose calls are held, or may be paused."""
    scripts = _scripts(name, servers, update)
    outcomes = await asyncio.gather(*(_update(connection, script, update) for connection, script in scripts))
    failures = [f"{outcome.url}: {outcome.error}" for outcome in outcomes if outcome.error is not None]
    for failure in failures:
        _log.warning("version %d of the model %r was not loaded at %s", update.policy_version, name, failure)
    if len(failures) == len(outcomes):
        raise BackendError(
            f"no server of the model {name!r} has loaded version {update.policy_version}: {'; '.join(failures)}",
            code="weights_not_loaded",
        )
    return outcomes


async def load_adapter(connection: Connection, name: str, path: str) -> None:
    """Let a vLLM server serve the adapter at `path` as the model `name`. BackendError if it cannot."""
    request = connection.url("load_lora_adapter"), {"lora_name": name, "lora_path": path}
    await _post(connection, request, _ADAPTERS_NEED)


async def unload_adapter(connection: Connection, name: str) -> None:
    """Remove it."""
    await _post(connection, (connection.url("unload_lora_adapter"), {"lora_name": name}), _ADAPTERS_NEED)


def declare_version(entry: ModelEntry, version: int) -> None:
    """Note that a model's servers have the weights of policy `version`, loaded by the caller. ConfigError if the
    backend knows its version itself."""
    for server in _updatable(entry.name, servers_of(entry.backend)):
        server.connection.version, server.connection.unusable = version, None


def keep_versions(replaced: ModelEntry, entry: ModelEntry) -> None:
    """A server that had the same URL before still has the same weights."""
    before = {server.name: server.connection for server in servers_of(replaced.backend)}
    for server in servers_of(entry.backend):
        if server.name in before:
            server.connection.version = before[server.name].version
            server.connection.unusable = before[server.name].unusable


async def _finished(gateway: Gateway, name: str, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await gateway.idle(name)
    except TimeoutError:
        running, _ = gateway.counts(name)
        raise UnavailableError(
            f"{running} calls of the model {name!r} have not finished within {seconds:g} seconds; no weights were "
            "changed: give them more `seconds`, or pause them with in_flight='pause'"
        ) from None


_Request: TypeAlias = tuple[str, Mapping[str, Any]]  # a POST of a body to a URL


class _Script(NamedTuple):
    """Requests in order: `load` changes the weights, `label` names them if the server can, `end` is made whatever
    happened before. `needs` is what the server must be."""

    needs: str
    load: _Request
    before: tuple[_Request, ...] = ()
    after: tuple[_Request, ...] = ()
    label: tuple[_Request, ...] = ()
    end: tuple[_Request, ...] = ()


def _vllm(connection: Connection, update: WeightUpdate) -> _Script:
    def request(path: str, **body: Any) -> tuple[_Request]:
        return ((f"{connection.root}/{path}", body),)

    where = {} if update.path is None else {"weights_path": update.path}
    pauses = update.in_flight == "pause"
    return _Script(
        "vLLM 0.16 or later with VLLM_SERVER_DEV_MODE=1",
        before=request("pause?mode=keep") if pauses else (),
        load=request("collective_rpc", method="reload_weights", kwargs=where)[0],
        # Keys and values of the old weights are dropped for calls that are paused too: they are computed again.
        after=request("reset_prefix_cache?reset_running_requests=true"),
        label=request("update_weight_version", new_version=str(update.policy_version)),
        end=request("resume") if pauses else (),
    )


def _sglang(connection: Connection, update: WeightUpdate) -> _Script:
    if update.in_flight == "pause":
        raise ConfigError(
            "SGLang does not drop its prefix cache while calls are paused, so that they would go on with keys and "
            "values of the old weights; let them finish (in_flight='finish')"
        )
    if update.path is None:
        raise ConfigError("`path` is missing: name the directory to load from, where the servers can read it")
    # The server drops its prefix cache by itself, and names the version in each answer.
    weights = {"model_path": update.path, "weight_version": str(update.policy_version)}
    return _Script("SGLang 0.5 or later", (f"{connection.root}/update_weights_from_disk", weights))


_WRITERS: Final[Mapping[str, Callable[[Connection, WeightUpdate], _Script]]] = {"vllm": _vllm, "sglang": _sglang}


def _updatable(name: str, servers: Sequence[RemoteBackend]) -> Sequence[RemoteBackend]:
    if not servers or any(server.kind not in _WRITERS for server in servers):
        raise ConfigError(
            f"the weights of the model {name!r} cannot be updated from here; those of servers of these kinds can: "
            f"{', '.join(_WRITERS)}"
        )
    return servers


def _scripts(name: str, servers: Sequence[RemoteBackend], update: WeightUpdate) -> list[tuple[Connection, _Script]]:
    connections = [(_WRITERS[server.kind], server.connection) for server in _updatable(name, servers)]
    return [(connection, write(connection, update)) for write, connection in connections]


async def _update(connection: Connection, script: _Script, update: WeightUpdate) -> ServerUpdate:
    url, before, touched = connection.base_url, connection.unusable, False
    connection.unusable, connection.lost = f"the weights at {url} are being updated; ask again", False
    try:
        try:
            for request in script.before:
                await _post(connection, request, script.needs)
            connection.paused = bool(script.before)
            for request in (script.load, *script.after):
                await _post(connection, request, script.needs)
                touched = True
            try:
                for request in script.label:
                    await _post(connection, request, script.needs)
            except BackendError as error:
                if error.code != _NOT_THERE:
                    raise
            # Before any token is sampled by them.
            connection.version, connection.unusable = update.policy_version, None
        finally:
            connection.paused = False
            for request in script.end:
                await _post(connection, request, script.needs)
    except BackendError as error:
        connection.unusable = before
        if touched or error.code != _NOT_THERE:
            connection.unusable = (
                f"nobody knows the weights at {url}, which failed to load version {update.policy_version}; update them "
                "again"
            )
        known = None if connection.unusable else connection.version
        return ServerUpdate(url=url, policy_version=known, error=str(error))
    return ServerUpdate(url=url, policy_version=update.policy_version)


async def _post(connection: Connection, request: _Request, needs: str) -> None:
    url, body = request
    async with connection.posted(url, msgspec.json.encode(body), control=True) as response:
        text = (await response.read())[:500].decode(errors="replace")
        if response.status in (401, 403, 404, 405):
            raise BackendError(f"{url} answers {response.status}: {text}; needed is {needs}", code=_NOT_THERE)
        if response.status != 200 or _FAILED.search(text):
            raise BackendError(f"{url} answered {response.status}: {text}")
