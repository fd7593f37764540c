"""The gateway as the rest of the house sees it: routes to mount, and gates to close while weights change."""

from __future__ import annotations

from typing import Literal

from starlette.routing import BaseRoute

from agentlightning.gateway.attribution import Attributor
from agentlightning.gateway.calls import CallOpener, Recorders
from agentlightning.gateway.models import ModelTable
from agentlightning.gateway.recording import CommittingRecorder, QueueingRecorder
from agentlightning.gateway.routes import gateway_routes
from agentlightning.gateway.statistics import CallStatistics
from agentlightning.store.base import LightningStore


class Gateway:
    """Answers calls of OpenAI's and Anthropic's protocols from the models of a table and captures them into a store.

    With `record="commit"` the call of an attempt is durable before the end of its answer is sent; with `"queue"`, and
    always for calls that no attempt made, recording never delays an answer, and what does not fit is counted. Without
    a store nothing is attributed or captured. With an `admin_key` every call needs a key. A request body above
    `body_limit` bytes is refused with 413. `close` writes what is still queued."""

    def __init__(
        self,
        models: ModelTable,
        store: LightningStore | None = None,
        *,
        admin_key: str | None = None,
        body_limit: int = 32 * 1024 * 1024,
        record: Literal["commit", "queue"] = "commit",
    ) -> None:
        self.models = models
        self._queue = None if store is None else QueueingRecorder(store)
        recorders = None
        if store is not None and self._queue is not None:
            attributed = CommittingRecorder(store) if record == "commit" else self._queue
            recorders = Recorders(attributed=attributed, unattributed=self._queue)
        self._calls = CallOpener(models, Attributor(store, admin_key=admin_key), recorders)
        self._body_limit = body_limit
        self._attributed = store is not None

    def routes(self) -> list[BaseRoute]:
        """Routes for `/v1/…` and, with a store, `/rollout/{rollout_id}/attempt/{attempt_id}/v1/…`."""
        return gateway_routes(self._calls, self.models, body_limit=self._body_limit, attributed=self._attributed)

    def hold(self) -> None:
        """New calls wait from now on; running ones go on. Nothing is refused."""
        for entry in self.models:
            self.models.gate(entry.name).hold()

    def release(self) -> None:
        """Let waiting and new calls through again."""
        for gate in self.models.gates():
            gate.release()

    async def idle(self) -> None:
        """Return when no call is running; those held do not count."""
        for gate in list(self.models.gates()):
            await gate.idle()

    @property
    def statistics(self) -> CallStatistics:
        return self._calls.statistics

    @property
    def running(self) -> int:
        """How many calls are being answered right now."""
        return sum(gate.running for gate in self.models.gates())

    @property
    def shed(self) -> int:
        """How many calls were answered and not recorded."""
        return 0 if self._queue is None else self._queue.shed

    async def close(self) -> None:
        """Write what waits to be recorded, and end the backends' connections."""
        if self._queue is not None:
            await self._queue.close()
        for entry in self.models:
            await entry.backend.close()
