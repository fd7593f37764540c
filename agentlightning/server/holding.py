"""Calls held and weights updated over HTTP: what a trainer in another process asks of a server's gateway.

`POST /api/v1/models/NAME/hold` lets a model's calls wait, `/release` lets them through, and `/weights` has its servers
load new weights. This module knows who may ask; the gateway knows how.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Annotated, TypeVar
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from agentlightning.errors import AgentLightningError, InvalidError
from agentlightning.gateway.app import Gateway
from agentlightning.gateway.updates import ServerUpdate, WeightUpdate, declare_version, update_weights
from agentlightning.server.access import Access
from agentlightning.server.models import ask
from agentlightning.server.observing import note_caller
from agentlightning.server.rest import read_body

_log = logging.getLogger(__name__)
T = TypeVar("T")


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


class HoldingRoutes:
    """Routes that hold the models of `gateway` and update their weights; only the admin key opens them. A body above
    `body_limit` bytes is refused."""

    def __init__(self, gateway: Gateway, access: Access, body_limit: int) -> None:
        self._gateway = gateway
        self._access = access
        self._body_limit = body_limit

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/models/{name:path}/hold", self._hold, methods=["POST"]),
            Route("/models/{name:path}/release", self._release, methods=["POST"]),
            Route("/models/{name:path}/weights", self._update, methods=["POST"]),
        ]

    async def _hold(self, request: Request) -> Response:
        asked = await self._asked(request, Hold)
        self._gateway.hold(_name(request), seconds=asked.seconds, holder=asked.holder)
        return Response(status_code=204)

    async def _release(self, request: Request) -> Response:
        asked = await self._asked(request, Release)
        if asked.policy_version is not None:
            declare_version(self._gateway.entry(_name(request)), asked.policy_version)
        self._gateway.release(_name(request), holder=asked.holder)
        return Response(status_code=204)

    async def _update(self, request: Request) -> Response:
        asked = await self._asked(request, WeightUpdate)
        updated = Updated(servers=await update_weights(self._gateway, _name(request), asked))
        return Response(msgspec.json.encode(updated), media_type="application/json")

    async def _asked(self, request: Request, kind: type[T]) -> T:
        scope = await self._access.scope(request.headers)
        note_caller(request.scope, scope.name)
        scope.require_admin()
        try:
            return msgspec.json.decode(await read_body(request, self._body_limit) or b"{}", type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidError(f"the body is not as it should be: {error}") from None


def _name(request: Request) -> str:
    return str(request.path_params["name"])


# --- the trainer's side -------------------------------------------------------------------------------------------


async def hold_model(server: str, name: str, *, api_key: str | None, seconds: float = 300.0) -> None:
    """Let calls of the model wait at the gateway of `server`, for `seconds` unless it is released or held again."""
    await _post(server, name, "hold", api_key, Hold(seconds=seconds))


async def release_model(server: str, name: str, *, api_key: str | None, policy_version: int | None = None) -> None:
    """Let them through again; see `Release`."""
    await _post(server, name, "release", api_key, Release(policy_version=policy_version))


async def update_model(server: str, name: str, update: WeightUpdate, *, api_key: str | None) -> list[ServerUpdate]:
    """Have the model's servers load weights; see `gateway.updates.update_weights`."""
    answer = await _post(server, name, "weights", api_key, update)
    return msgspec.json.decode(answer, type=Updated).servers


@asynccontextmanager
async def model_held(server: str, name: str, *, api_key: str | None, lease: float = 60.0) -> AsyncGenerator[None]:
    """Calls of the model wait at the gateway of `server` as long as the block lasts, and for at most `lease` seconds
    more if this process dies in it. Where the server cannot be told so, it is logged, and they do not wait."""

    async def hold() -> None:
        with _logged():
            await hold_model(server, name, api_key=api_key, seconds=lease)

    async def renew() -> None:
        while not ended.is_set():
            try:
                async with asyncio.timeout(lease / 3):
                    await ended.wait()
            except TimeoutError:
                await hold()

    await hold()
    ended = asyncio.Event()
    renewing = asyncio.create_task(renew(), name=f"hold of {name}")
    try:
        yield
    finally:
        ended.set()
        await renewing  # a request to hold must not arrive after the one to release
        with _logged():
            await release_model(server, name, api_key=api_key)


@asynccontextmanager
async def models_held(server: str, names: Sequence[str], *, api_key: str | None) -> AsyncGenerator[None]:
    """`model_held` of several at once."""
    async with AsyncExitStack() as stack:
        for name in names:
            await stack.enter_async_context(model_held(server, name, api_key=api_key))
        yield


@contextmanager
def _logged() -> Generator[None]:
    try:
        yield
    except AgentLightningError as error:  # a hold is not worth the end of a run
        _log.warning("the calls of agents do not wait for new weights with their clocks stopped: %s", error)


async def _post(server: str, name: str, verb: str, api_key: str | None, body: msgspec.Struct) -> bytes:
    seconds = None if verb == "weights" else 30.0  # an update takes as long as weights take to load
    return await ask("POST", server, f"{quote(name)}/{verb}", api_key, msgspec.json.encode(body), seconds=seconds)
