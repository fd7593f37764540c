"""Whether the server lives (`/health`) and whether it can do its work (`/ready`). Neither needs a key."""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from agentlightning.errors import AgentLightningError
from agentlightning.server.remembered import Remembered
from agentlightning.server.requests import in_json
from agentlightning.store.base import LightningStore
from agentlightning.store.calls import GetResources

_PATIENCE: Final = 2.0
_ASKED_EVERY: Final = 1.0  # seconds, at most: anybody may ask


class HealthRoutes:
    """The server is ready while its store, if it has one, answers a read within two seconds."""

    def __init__(self, store: LightningStore | None) -> None:
        self._store = store
        self._trouble = Remembered(self._ask, _ASKED_EVERY)

    def routes(self) -> list[BaseRoute]:
        return [Route("/health", self._health, methods=["GET"]), Route("/ready", self._ready, methods=["GET"])]

    async def _health(self, request: Request) -> Response:
        return in_json({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        trouble = await self._trouble.get()
        if trouble is None:
            return in_json({"status": "ready"})
        return in_json({"status": "unready", "reason": trouble}, 503)

    async def _ask(self) -> str | None:
        """What is wrong, or None."""
        if self._store is None:
            return None
        try:
            async with asyncio.timeout(_PATIENCE):
                await self._store.perform(GetResources(resources_id="ready"))
        except TimeoutError:
            return f"the store did not answer within {_PATIENCE:g} s"
        except AgentLightningError as error:
            return str(error)
        return None
