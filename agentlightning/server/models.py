"""The gateway's model table over HTTP: a trainer in another process lends its policy to a server's gateway.

`PUT /api/v1/models/NAME` registers an OpenAI-compatible endpoint under a name, `DELETE` takes it away, `GET
/api/v1/models` lists. This module knows the table and who may change it; it makes no model calls.
"""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from agentlightning.errors import ConfigError, InvalidError, UnavailableError
from agentlightning.gateway.backend import Sampling
from agentlightning.gateway.backends.http import HttpBackend, Kind
from agentlightning.gateway.models import ModelEntry, ModelTable
from agentlightning.server.access import Access
from agentlightning.server.observing import note_caller
from agentlightning.server.rest import read_body


class ModelRegistration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An endpoint for the gateway to route to; see `ModelEntry`. `model` is its name there, if another."""

    base_url: str
    model: str | None = None
    api_key: str | None = None
    kind: Kind = "vllm"
    trainable: bool = True
    train: Sampling | None = msgspec.field(default_factory=Sampling)
    val: Sampling | None = msgspec.field(default_factory=Sampling)


class ModelRoutes:
    """Routes that list and change `models`; only the admin key opens them. A body above `body_limit` bytes is
    refused."""

    def __init__(self, models: ModelTable, access: Access, body_limit: int) -> None:
        self._models = models
        self._access = access
        self._body_limit = body_limit
        self._closing: set[asyncio.Future[None]] = set()

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/models", self._list, methods=["GET"]),
            Route("/models/{name}", self._put, methods=["PUT"]),
            Route("/models/{name}", self._delete, methods=["DELETE"]),
        ]

    async def _list(self, request: Request) -> Response:
        await self._require_admin(request)
        return _json([_described(entry) for entry in self._models])

    async def _put(self, request: Request) -> Response:
        await self._require_admin(request)
        try:
            asked = msgspec.json.decode(await read_body(request, self._body_limit), type=ModelRegistration)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidError(f"not a model registration: {error}") from None
        backend = HttpBackend(asked.base_url, kind=asked.kind, api_key=asked.api_key, model=asked.model)
        name = str(request.path_params["name"])
        entry = ModelEntry(name, backend, trainable=asked.trainable, train=asked.train, val=asked.val)
        self._retire(self._models.put(entry))
        return _json(_described(entry))

    async def _delete(self, request: Request) -> Response:
        await self._require_admin(request)
        self._retire(self._models.remove(str(request.path_params["name"])))
        return Response(status_code=204)

    async def _require_admin(self, request: Request) -> None:
        scope = await self._access.scope(request.headers)
        note_caller(request.scope, scope.name)
        scope.require_admin()

    def _retire(self, replaced: ModelEntry | None) -> None:
        """Close a backend nobody is routed to any more, after its calls under way are answered."""
        if replaced is not None and isinstance(replaced.backend, HttpBackend):
            closing = asyncio.ensure_future(replaced.backend.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)


async def register_model(server: str, entry: ModelEntry, *, base_url: str, api_key: str | None) -> None:
    """Let the gateway of `server` route `entry.name` to `base_url` (this process's endpoint)."""
    asked = ModelRegistration(base_url=base_url, trainable=entry.trainable, train=entry.train, val=entry.val)
    await _call("PUT", server, entry.name, api_key, msgspec.json.encode(asked))


async def unregister_model(server: str, name: str, *, api_key: str | None) -> None:
    """Take the model away again; nothing happens if it is gone already."""
    await _call("DELETE", server, name, api_key, None)


async def _call(method: str, server: str, name: str, api_key: str | None, body: bytes | None) -> None:
    url = f"{server.rstrip('/')}/api/v1/models/{quote(name, safe='')}"
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session,
            session.request(method, url, data=body, headers=headers) as answer,
        ):
            if answer.status >= 400:
                raise ConfigError(f"{url} answered {answer.status}: {(await answer.text())[:300]}")
    except (aiohttp.ClientError, TimeoutError) as error:
        raise UnavailableError(
            f"the server at {server} cannot be reached ({error}); is `agl server` running?"
        ) from None


def _described(entry: ModelEntry) -> dict[str, Any]:
    """What may be shown of an entry: never a key."""
    url = entry.backend.name if isinstance(entry.backend, HttpBackend) else None
    return {
        "name": entry.name,
        "base_url": url,
        "trainable": entry.trainable,
        "train": msgspec.to_builtins(entry.train),
        "val": msgspec.to_builtins(entry.val),
    }


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
