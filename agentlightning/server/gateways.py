"""Gateway processes beside a server (`agl server --gateway-of URL`), as the server sees them: what
they follow, the numbers of their calls, and the spans that they send as rows. Their own side is
`following`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec

from agentlightning.gateway.models import AWAY
from agentlightning.gateway.replicas import servers_of
from agentlightning.server.health import Reading
from agentlightning.server.model_calls import Models, RegisterModel
from agentlightning.store.calls import StoreCall
from agentlightning.store.prompts import SpanRow
from agentlightning.store.redaction import Capture
from agentlightning.store.spans import Stored
from agentlightning.store.sql import SqlStore

_SILENT_SECONDS: Final = 5.0  # after which a gateway that does not ask again has gone
# that a server that has just begun waits for the gateways of the one before
_GATHERING_SECONDS: Final = 2.0


NextNumber: TypeAlias = tuple[str, str, int]
"""A rollout, an attempt, and the least number that its next call may have."""


class GatewayState(msgspec.Struct, frozen=True, kw_only=True):
    """The models as the server has them. `versions` has the policy version that each server of a
    model holds, by URL; `holds` who holds a model's calls, and for how many seconds more at most.
    With `capture`, gateways make rows of their spans, of which they store so much."""

    revision: int
    models: list[RegisterModel]
    versions: dict[str, dict[str, int]]
    holds: dict[str, dict[str, float | None]]
    capture: Capture | None


class FollowModels(StoreCall, frozen=True, kw_only=True):
    """Wait until the models differ from those of a `revision`. To ask with one is to say that this
    `gateway` has it. `numbered` are attempts whose calls it is answering, with the number of the
    next: a server that has just begun does not know."""

    route = "POST /gateways/follow"
    scope = "admin"
    returns = GatewayState
    gateway: str
    revision: int = 0
    numbered: Sequence[NextNumber] = ()
    timeout: float = 25.0


class NumberCalls(StoreCall, frozen=True, kw_only=True):
    """Number calls that a gateway is about to make: each of a rollout and attempt, and from which
    number on. None for an attempt that may make none. A `request` that is repeated is answered as
    before, so that no number is left out."""

    route = "POST /gateways/numbers"
    scope = "admin"
    returns = list[int | None]
    gateway: str
    request: int
    calls: Sequence[NextNumber]


class StoreRows(StoreCall, frozen=True, kw_only=True):
    """Store spans that a gateway has redacted and made into rows."""

    route = "POST /gateways/rows"
    scope = "admin"
    returns = list[Stored]
    rows: Sequence[SpanRow]


@dataclass
class _ConnectedGateway:
    revision: int
    polls: int = 0
    leaving: asyncio.TimerHandle | None = None


class Gateways:
    """The gateways that follow a server's `models`. One that ends, or is silent for some seconds,
    is waited for no longer."""

    def __init__(self, models: Models, store: SqlStore, capture: Capture | None) -> None:
        self.following: dict[str, _ConnectedGateway] = {}
        self._models = models
        self._store = store
        self._capture: Capture | None = capture
        self._began = time.monotonic()
        self._revision = time.time_ns()  # above those of a server that was here before
        self._updated = asyncio.Event()  # set for a moment when a revision is
        # the last request of each gateway, and the answer
        self._numbered: dict[str, tuple[int, list[int | None]]] = {}
        models.changed = self._all_updated
        meaning = "Gateway processes that follow this server."
        self.reading = Reading("agl_gateways", meaning, lambda: len(self.following))

    async def perform(self, call: StoreCall) -> Any:
        return await GATEWAY_CALLS[type(call)](self, call)

    async def follow(self, call: FollowModels) -> GatewayState:
        follower = self.following.setdefault(call.gateway, _ConnectedGateway(call.revision))
        if follower.leaving is not None:
            follower.leaving.cancel()
        follower.revision = call.revision
        follower.polls += 1
        self._wake_followers()
        try:
            await self._learn_numbers(call)
            with suppress(TimeoutError):
                async with asyncio.timeout(call.timeout):
                    while call.revision == self._revision:
                        await self._updated.wait()
        except asyncio.CancelledError:
            follower.polls -= 1
            self._disconnect(call.gateway)
            raise
        follower.polls -= 1
        loop = asyncio.get_running_loop()
        follower.leaving = loop.call_later(_SILENT_SECONDS, self._disconnect, call.gateway)
        return self._state()

    async def number(self, call: NumberCalls) -> list[int | None]:
        attributor = self._models.gateway.attributor
        await asyncio.sleep(self._began + _GATHERING_SECONDS - time.monotonic())
        several = [await attributor.may_call(*ids) for *ids, _ in call.calls]
        # From here on in one turn of the event loop: a number is given once, and remembered.
        request, answer = self._numbered.get(call.gateway, (0, []))
        if request != call.request:
            answer = [
                None if caller is None else attributor.number_for(call.gateway, caller, least)
                for caller, (_, _, least) in zip(several, call.calls, strict=True)
            ]
            self._numbered[call.gateway] = (call.request, answer)
        return answer

    async def _learn_numbers(self, call: FollowModels) -> None:
        attributor = self._models.gateway.attributor
        for *ids, following in call.numbered:
            if (caller := await attributor.may_call(*ids)) is not None:
                caller.gateways.add(call.gateway)
                caller.next_index = max(caller.next_index, following)

    async def store_rows(self, call: StoreRows) -> list[Stored]:
        return await self._store.store_rows(call.rows)

    async def _all_updated(self) -> None:
        """Return when each gateway has the models as they are now."""
        self._revision = revision = self._revision + 1
        self._wake_followers()
        while any(follower.revision < revision for follower in self.following.values()):
            await self._updated.wait()

    def _wake_followers(self) -> None:
        self._updated.set()
        self._updated.clear()

    def _disconnect(self, gateway: str) -> None:
        """Note that a gateway has ended, unless it asks again already."""
        if gateway in self.following and not self.following[gateway].polls:
            del self.following[gateway]
            self._models.gateway.attributor.forget(gateway)
            self._wake_followers()

    def _state(self) -> GatewayState:
        table = self._models.gateway.models
        return GatewayState(
            revision=self._revision,
            models=list(self._models.registered.values()),
            versions={
                name: {
                    server.name: server.connection.version
                    for server in servers_of(self._models.gateway.entry(name).backend)
                }
                for name in self._models.registered
            },
            holds={
                gate.name: {holder: left for holder, left in gate.holds() if holder != AWAY}
                for gate in table.gates()
            },
            capture=self._capture,
        )


GATEWAY_CALLS: Final[Mapping[type[StoreCall], Callable[[Gateways, Any], Awaitable[Any]]]] = {
    FollowModels: Gateways.follow,
    NumberCalls: Gateways.number,
    StoreRows: Gateways.store_rows,
}
