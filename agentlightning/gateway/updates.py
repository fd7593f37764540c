"""Loads new weights into vLLM and SGLang: the requests of each kind of server, their order, and
failures."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec

from agentlightning.errors import BackendError, ConfigError
from agentlightning.gateway.backends.connection import BackendConnection
from agentlightning.gateway.models import ModelEntry
from agentlightning.gateway.replicas import RemoteBackend, servers_of
from agentlightning.store.redaction import text_without_secrets

_log = logging.getLogger(__name__)
_ADAPTERS_NEED: Final = (
    "vLLM 0.16 or later with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora"
)
# what servers answer with 200 where a cache is in use
_FAILED: Final = re.compile(r'"success"\s*:\s*false')


class _NoRouteError(BackendError):
    """The server has no such route."""


async def load_weights(servers: Sequence[RemoteBackend], version: int, path: str) -> None:
    """Load the checkpoint at `path`, which every server can read, as policy `version`. Running
    calls of vLLM pause and continue with it; SGLang aborts them.

    A server that fails gets no calls until it loads others, since its weights are unknown.
    BackendError 502 if all fail."""
    errors = await asyncio.gather(*(_load(server, version, path) for server in servers))
    failures = [
        f"{server.name}: {error}" for server, error in zip(servers, errors, strict=True) if error
    ]
    for failure in failures:
        _log.warning("version %d was not loaded at %s", version, failure)
    if len(failures) == len(servers):
        raise BackendError(
            f"no server has loaded version {version}: {'; '.join(failures)}",
            code="weights_not_loaded",
        )


async def load_adapter(connection: BackendConnection, name: str, path: str) -> None:
    """Let a vLLM server serve the adapter at `path` as the model `name`. BackendError if it
    cannot."""
    await _post(
        connection,
        connection.url("load_lora_adapter"),
        {"lora_name": name, "lora_path": path},
        _ADAPTERS_NEED,
    )


async def unload_adapter(connection: BackendConnection, name: str) -> None:
    """Remove it."""
    await _post(
        connection, connection.url("unload_lora_adapter"), {"lora_name": name}, _ADAPTERS_NEED
    )


def declare_version(entry: ModelEntry, version: int) -> None:
    """Note that a model's servers have the weights of policy `version`, loaded by the caller.
    ConfigError if the backend knows its version itself."""
    servers = servers_of(entry.backend)
    if not servers or any(server.kind not in ("vllm", "sglang") for server in servers):
        raise ConfigError(
            f"the model {entry.name!r} has no version of its own: only those at vLLM and SGLang do"
        )
    for server in servers:
        server.connection.version = version
        server.connection.unusable = None


def keep_versions(replaced: ModelEntry, entry: ModelEntry) -> None:
    """A server that had the same URL before still has the same weights."""
    before = {server.name: server.connection for server in servers_of(replaced.backend)}
    for server in servers_of(entry.backend):
        if server.name in before:
            server.connection.version = before[server.name].version
            server.connection.unusable = before[server.name].unusable


async def _load(server: RemoteBackend, version: int, path: str) -> BackendError | None:
    """The failure, if any."""
    connection = server.connection
    connection.unusable = f"the weights at {server.name} are being updated; ask again"
    try:
        await (_load_sglang if server.kind == "sglang" else _load_vllm)(connection, version, path)
    except BackendError as error:
        connection.unusable = (
            f"nobody knows the weights at {server.name}, which has not loaded version {version}"
        )
        return error
    return None


async def _load_vllm(connection: BackendConnection, version: int, path: str) -> None:
    async def post(route: str, **body: Any) -> None:
        await _post(
            connection,
            f"{connection.root}/{route}",
            body,
            "vLLM 0.16 or later with VLLM_SERVER_DEV_MODE=1",
        )

    try:
        await post("pause?mode=keep")
        await post("collective_rpc", method="reload_weights", kwargs={"weights_path": path})
        # Keys and values of the old weights are dropped for calls that are paused too: they are
        # computed again.
        await post("reset_prefix_cache?reset_running_requests=true")
        with suppress(_NoRouteError):  # only newer ones name the weights in their answers
            await post("update_weight_version", new_version=str(version))
        # before any token is sampled by them
        connection.version = version
        connection.unusable = None
    finally:
        connection.failed_loads += connection.unusable is not None  # also where this is cancelled
        await post("resume")


async def _load_sglang(connection: BackendConnection, version: int, path: str) -> None:
    # It drops its prefix cache by itself, and names the version in each answer.
    weights = {"model_path": path, "weight_version": str(version), "abort_all_requests": True}
    try:
        await _post(
            connection,
            f"{connection.root}/update_weights_from_disk",
            weights,
            "SGLang 0.5 or later",
        )
        connection.version = version
        connection.unusable = None
    finally:
        connection.failed_loads += connection.unusable is not None


async def _post(
    connection: BackendConnection, url: str, body: Mapping[str, Any], needs: str
) -> None:
    async with connection.posted(url, msgspec.json.encode(body), control=True) as response:
        said = (await response.read()).decode(errors="replace")
        text = text_without_secrets(said)[:500]
        if response.status in (401, 403, 404, 405):
            raise _NoRouteError(f"{url} answers {response.status}: {text}; needed is {needs}")
        if response.status != 200 or _FAILED.search(text):
            raise BackendError(f"{url} answered {response.status}: {text}")
