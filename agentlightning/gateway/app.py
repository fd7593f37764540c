"""The gateway as the rest of the house sees it: routes to mount, and a gate to close while weights change."""

from __future__ import annotations

from starlette.routing import BaseRoute

from agentlightning.gateway.calls import CallOpener
from agentlightning.gateway.models import ModelTable
from agentlightning.gateway.routes import gateway_routes
from agentlightning.store.base import LightningStore


class Gateway:
    """Answers OpenAI-compatible calls from the models of a table and captures attributed ones into a store.

    Without a store nothing is attributed or captured. With `require_key` every call needs an attempt's key.
    A request body above `body_limit` bytes is refused with 413."""

    def __init__(
        self,
        models: ModelTable,
        store: LightningStore | None = None,
        *,
        require_key: bool = False,
        body_limit: int = 32 * 1024 * 1024,
    ) -> None:
        self.models = models
        self._calls = CallOpener(models, store, require_key=require_key)
        self._body_limit = body_limit
        self._attributed = store is not None

    def routes(self) -> list[BaseRoute]:
        """Routes for `/v1/…` and, with a store, `/rollout/{rollout_id}/attempt/{attempt_id}/v1/…`."""
        return gateway_routes(self._calls, self.models, body_limit=self._body_limit, attributed=self._attributed)

    def hold(self) -> None:
        """New calls wait from now on; running ones go on. Nothing is refused."""
        self._calls.gate.hold()

    def release(self) -> None:
        """Let waiting and new calls through again."""
        self._calls.gate.release()

    async def idle(self) -> None:
        """Return when no call is running; those held do not count."""
        await self._calls.gate.idle()

    @property
    def running(self) -> int:
        """How many calls are being answered right now."""
        return self._calls.gate.running
