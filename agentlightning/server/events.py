"""What happens in the store, as it happens: server-sent events at `/events`, for whoever shows it to people.

This module turns the store's changes into events. It does not know who listens, and remembers nothing for those who
come back: each stream begins with `reset`, which says to read the store afresh.

    event: rollout    data: {"rollout_id": …, "status": …, …}    a rollout looks different now
    event: spans      data: {"rollout_id": …}                    spans were added to it
    event: groups     data: {"run_id": …}                        groups of this run became complete
    event: metrics    data: {"run_id": …}                        this run began, ended or was measured
    event: queued     data: {"count": …}                         rollouts began to wait for a worker
    event: reset      data: {}                                   anything may have changed
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from agentlightning.errors import ForbiddenError, UnavailableError
from agentlightning.server.access import Access
from agentlightning.server.requests import caller_of, refusal
from agentlightning.server.rest import PREFIX
from agentlightning.store.base import CALLS
from agentlightning.store.database import Changes
from agentlightning.store.many import ManyStores
from agentlightning.store.sql import SqlStore
from agentlightning.types import Rollout

HEARTBEAT_SECONDS: Final = 15.0
_MOST_STREAMS: Final = 100  # of one caller: each looks at every change
_HEARTBEAT: Final = b": alive\n\n"
_RESET: Final = b"event: reset\ndata: {}\n\n"
_SHOWN: Final = ("rollout_id", "status", "mode", "run_id", "group_id", "start_time", "end_time")


class EventRoutes:
    """The event stream of one store. `open` counts who listens; `stop` ends all streams, so that a server can stop."""

    def __init__(
        self, store: SqlStore | ManyStores, access: Access, heartbeat_seconds: float = HEARTBEAT_SECONDS
    ) -> None:
        self.open = 0
        self._listening: Counter[str] = Counter()  # by who listens
        self._store = store
        self._access = access
        self._heartbeat = heartbeat_seconds
        self._stopping = asyncio.Event()

    def route(self) -> Route:
        return Route(f"{PREFIX}/events", self._listen, methods=["GET"])

    def stop(self) -> None:
        self._stopping.set()

    async def _listen(self, request: Request) -> Response:
        """What happens in the store, as server-sent events"""
        caller = await self._admit(request)
        if self._listening[caller] >= _MOST_STREAMS:
            return refusal(429, "rate_limited", f"{caller} listens {_MOST_STREAMS} times already; end a stream first")
        # So that proxies (nginx) do not hold events back.
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(self._stream(request, caller), media_type="text/event-stream", headers=headers)

    async def _admit(self, request: Request) -> str:
        """Whoever may query rollouts may hear of them; their name."""
        scope = await caller_of(request, self._access)
        scope.require(CALLS["page_rollouts"])
        return scope.name

    async def _stream(self, request: Request, caller: str) -> AsyncGenerator[bytes, None]:
        self.open += 1
        self._listening[caller] += 1
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            with self._store.events() as queue:
                yield _RESET
                checked = time.monotonic()
                while (several := await self._next(queue, stopping)) is not None:
                    if any(batch is None or batch.keys for batch in several) or _due(checked, self._heartbeat):
                        await self._admit(request)  # the key may have been revoked, or have expired
                        checked = time.monotonic()
                    events = [event async for event in self._events(several)] if several else [_HEARTBEAT]
                    if events:
                        yield b"".join(events)
        except (ForbiddenError, UnavailableError):
            return  # the stream ends; the next request gets the reason
        finally:
            stopping.cancel()
            self.open -= 1
            self._listening[caller] -= 1

    async def _next(
        self, queue: asyncio.Queue[Changes | None], stopping: asyncio.Future[Any]
    ) -> list[Changes | None] | None:
        """All changes that are there; an empty list when it is time for a heartbeat, None when the server stops."""
        getting = asyncio.ensure_future(queue.get())
        try:
            await asyncio.wait([getting, stopping], timeout=self._heartbeat, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                return None
            if not getting.done():
                return []
            several = [getting.result()]
        finally:
            getting.cancel()
        while not queue.empty():
            several.append(queue.get_nowait())
        return several

    async def _events(self, several: list[Changes | None]) -> AsyncIterator[bytes]:
        """The events of changes, each once."""
        if None in several:
            yield _RESET
            return
        changes = Changes.merged(batch for batch in several if batch is not None)
        changed = dict.fromkeys([*changes.touched, *changes.finished])
        with_spans = dict.fromkeys(changes.spans)
        found = await self._look_up([*changed, *with_spans])
        if changes.queued:
            yield _event("queued", {"count": changes.queued})
        for rollout_id in changed:
            if rollout_id in found:
                yield _event("rollout", {name: getattr(found[rollout_id], name) for name in _SHOWN})
            else:
                yield _event("rollout", {"rollout_id": rollout_id, "status": "deleted"})
        for rollout_id in with_spans:
            if rollout_id in found:
                yield _event("spans", {"rollout_id": rollout_id})
        for run_id in dict.fromkeys(changes.runs):
            yield _event("metrics", {"run_id": run_id})
        for run_id in dict.fromkeys(changes.runs_with_groups):
            yield _event("groups", {"run_id": run_id})

    async def _look_up(self, rollout_ids: Iterable[str]) -> dict[str, Rollout]:
        """Those that exist, from the store's memory where they are in it."""
        names = list(dict.fromkeys(rollout_ids))
        rollouts = await asyncio.gather(*map(self._store.get_rollout_by_id, names))
        return {name: rollout for name, rollout in zip(names, rollouts, strict=True) if rollout is not None}


def _due(checked: float, seconds: float) -> bool:
    return time.monotonic() - checked >= seconds


def _event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))
