"""`agl server --gateway-of URL`: a process that answers LLM calls as the gateway of a server
elsewhere, which has the models and the store, and numbers the calls of attempts. Its side is
`gateways`."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

from agentlightning.errors import (
    ConfigError,
    ConflictError,
    OutdatedError,
    UnavailableError,
)
from agentlightning.garbage import rare_garbage_collection
from agentlightning.gateway.attribution import Caller
from agentlightning.gateway.gateway import Gateway
from agentlightning.gateway.models import AWAY, ModelTable
from agentlightning.gateway.replicas import servers_of
from agentlightning.server.app import ServerSettings
from agentlightning.server.gateways import FollowModels, GatewayState, NumberCalls, StoreRows
from agentlightning.server.local_keys import local_key
from agentlightning.server.model_calls import RegisterModel, entry_of
from agentlightning.server.server_process import Running, cancel, http_server, in_production
from agentlightning.store.calls import StoreCall
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.prompts import SpanRow
from agentlightning.store.redaction import Capture, redaction
from agentlightning.store.spans import SpanWriter, Stored

_FIRST_SECONDS: Final = 60.0  # for a server that may be starting
_PAUSE: Final = 0.5  # seconds until a server that went away is looked for again
_MOST: Final = 500  # calls that are numbered at once
_SERVER_AWAY: Final = "server away"
"""Holds all calls while nobody can say whether their weights are being updated."""
_log: Final = logging.getLogger(__name__)


@asynccontextmanager
async def running_gateway(server: str, settings: ServerSettings) -> AsyncGenerator[Running]:
    """A gateway of the server at a URL for as long as the block lasts, with the `settings` that are
    about HTTP. At its end it takes no more calls, and answers and stores those it has. ConfigError
    or ForbiddenError if the server cannot be followed, UnavailableError if it does not answer."""
    key = settings.key or local_key(server)
    async with AsyncExitStack() as stack:
        stack.enter_context(rare_garbage_collection())
        store = RowStore(server, key)
        stack.push_async_callback(store.close)
        asking = LightningStoreClient(server, key, patience=0.0)
        stack.push_async_callback(asking.close)
        name = secrets.token_hex(8)
        gateway = Gateway(
            ModelTable(),
            store,
            admin_key=settings.key,
            body_limit=settings.body_limit,
            numbers=Numbering(store, name),
            prompts=await in_production(store, settings.prompts),
        )
        stack.push_async_callback(gateway.close)
        follower = ModelFollower(name, asking, gateway, store)
        await follower.begin()
        following = asyncio.create_task(follower.follow(), name="models of the server")
        stack.push_async_callback(cancel, following)
        http = http_server(settings, None, gateway, keys=store)
        await stack.enter_async_context(http)
        yield Running(http.url, gateway)


class RowStore(LightningStoreClient):
    """The server's store. Spans are redacted and made into rows here, unless the server has more to
    do with them than to write them."""

    _capture: Capture | None = None
    _writer: SpanWriter | None = None

    def make_rows(self, capture: Capture | None) -> None:
        if capture != self._capture:
            self._capture = capture
            self._writer = capture and SpanWriter(redaction(capture), self._store_rows, None)

    async def perform(self, call: StoreCall) -> Any:
        if self._writer is not None and call.method == "store_spans":
            return await self._writer.store(getattr(call, "spans"))  # noqa: B009 - it has this field
        return await super().perform(call)

    async def _store_rows(self, rows: Sequence[SpanRow]) -> list[Stored]:
        try:
            return await super().perform(StoreRows(rows=rows))
        except ConflictError as error:  # over HTTP it is no longer one that tells to look again
            raise OutdatedError(str(error)) from None


class Numbering:
    """The numbers of attempts' calls, asked of the server for all calls that wait at once."""

    def __init__(self, client: LightningStoreClient, gateway: str) -> None:
        self._client = client
        self._gateway = gateway
        self._requests = itertools.count(1)
        self._waiting: list[tuple[Caller, asyncio.Future[int | None]]] = []
        self._asking: asyncio.Task[None] | None = None

    async def __call__(self, caller: Caller) -> int | None:
        answer: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((caller, answer))
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask(), name="numbers of calls")
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            # The client has left. A number that is given is used: an attempt that seems to lack a
            # call is not trained. So the call begins, and ends at the next thing that it waits for.
            number = await answer
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            return number

    async def _ask(self) -> None:
        try:
            while self._waiting:
                several = self._waiting[:_MOST]
                del self._waiting[:_MOST]
                await self._number(several)
        finally:
            self._asking = None

    async def _number(self, several: Sequence[tuple[Caller, asyncio.Future[int | None]]]) -> None:
        call = NumberCalls(
            gateway=self._gateway,
            request=next(self._requests),
            calls=[(one.rollout_id, one.attempt_id, one.next_index) for one, _ in several],
        )
        try:
            numbers: list[int | None] = await self._client.perform(call)
        except Exception as error:  # noqa: BLE001 - each of those who wait gets it
            for _, answer in several:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (caller, answer), number in zip(several, numbers, strict=True):
            if number is not None:
                if number > caller.next_index:  # others answer calls of this attempt
                    caller.links = None
                caller.next_index = max(caller.next_index, number + 1)
            if not answer.done():
                answer.set_result(number)


class ModelFollower:
    """Keeps the models of a gateway as the server has them."""

    def __init__(
        self, name: str, client: LightningStoreClient, gateway: Gateway, store: RowStore
    ) -> None:
        self._name = name
        self._client = client
        self._gateway = gateway
        self._store = store
        self._revision = 0
        self._models: list[RegisterModel] = []
        self._away = False
        self._closing: set[asyncio.Task[None]] = set()

    async def begin(self) -> None:
        """Have the models for the first time."""
        give_up = time.monotonic() + _FIRST_SECONDS
        while True:
            try:
                return await self._follow_once()
            except UnavailableError:
                if time.monotonic() >= give_up:
                    raise
            await asyncio.sleep(_PAUSE)

    async def follow(self) -> None:
        """Do so until cancelled. Calls are held while the server cannot be reached."""
        while True:
            try:
                await self._follow_once()
            except Exception as error:  # noqa: BLE001 - without it nothing would be followed
                if not self._away:
                    _log.warning("calls are held, as the server's models are not known: %s", error)
                self._away = True
                for gate in self._gateway.models.gates():
                    self._gateway.hold_gate(gate.name, _SERVER_AWAY)
                await asyncio.sleep(_PAUSE)
            else:
                if self._away:
                    _log.warning("the server at %s is back", self._client.url)
                self._away = False

    async def _follow_once(self) -> None:
        call = FollowModels(
            gateway=self._name,
            revision=self._revision,
            numbered=self._gateway.attributor.numbered() if self._away else (),
        )
        state: GatewayState = await self._client.perform(call)
        self._store.make_rows(state.capture)
        await self._apply(state)
        self._revision = state.revision

    async def _apply(self, state: GatewayState) -> None:
        table = self._gateway.models
        added = [call for call in state.models if call not in self._models]
        entries = await asyncio.gather(
            *(asyncio.to_thread(entry_of, call) for call in added), return_exceptions=True
        )
        for call in self._models:
            if call not in state.models and (removed := table.remove(call.name)) is not None:
                # Nobody waits until its calls under way are answered.
                self._closing.add(closing := asyncio.create_task(removed.backend.close()))
                closing.add_done_callback(self._closing.discard)
        self._models = state.models
        for call, entry in zip(added, entries, strict=True):
            if isinstance(entry, ConfigError):
                _log.error("the model %r is not answered here: %s", call.name, entry)
            elif isinstance(entry, BaseException):
                raise entry
            else:
                table.put(entry)
        for entry in table:
            for server in servers_of(entry.backend):
                server.connection.version = state.versions[entry.name][server.name]
        self._hold(state)

    def _hold(self, state: GatewayState) -> None:
        """Close and open gates, after all else: calls that pass meet what the server has."""
        for name, holds in state.holds.items():
            for holder, seconds in holds.items():
                self._gateway.hold_gate(name, holder, seconds)
        for gate in self._gateway.models.gates():
            for holder, _ in gate.holds():
                if holder != AWAY and holder not in state.holds.get(gate.name, {}):
                    self._gateway.release_gate(gate.name, holder)
