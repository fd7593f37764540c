"""The changes of the store, as they happen: server-sent events at `/events`.

Each stream begins with `reset`: read the store afresh. Then come `rollout` (looks different now),
`spans` (were added), `groups` (of a run became complete), `metrics` (a run began, ended or was
measured) and `queued` (rollouts wait)."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator
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

HEARTBEAT_SECONDS: Final = 15.0
_MOST_STREAMS: Final = 100  # of one caller: each looks at every change
_HEARTBEAT: Final = b": alive\n\n"
_RESET: Final = b"event: reset\ndata: {}\n\n"
_SHOWN: Final = ("rollout_id", "status", "mode", "run_id", "group_id", "start_time", "end_time")


class EventRoutes:
    """The event stream of one store. `open` counts who listens; `stop` ends all streams, so that a
    server can stop."""

    def __init__(self, store: SqlStore | ManyStores, access: Access) -> None:
        self.open = 0
        self._listening: Counter[str] = Counter()  # by who listens
        self._store = store
        self._access = access
        self._stopping = asyncio.Event()

    def route(self) -> Route:
        return Route(f"{PREFIX}/events", self._listen)

    def stop(self) -> None:
        self._stopping.set()

    async def _listen(self, request: Request) -> Response:
        caller = await self._admit(request)
        if self._listening[caller] >= _MOST_STREAMS:
            return refusal(
                429,
                "rate_limited",
                f"{caller} listens {_MOST_STREAMS} times already; end a stream first",
            )
        # So that proxies (nginx) do not hold events back.
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(
            self._stream(request, caller), media_type="text/event-stream", headers=headers
        )

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
                    due = time.monotonic() - checked >= HEARTBEAT_SECONDS
                    if due or any(batch is None or batch.keys for batch in several):
                        await self._admit(request)  # the key may have been revoked, or have expired
                        checked = time.monotonic()
                    if events := await self._events(several) if several else _HEARTBEAT:
                        yield events
        except (ForbiddenError, UnavailableError):
            return  # the stream ends; the next request gets the reason
        finally:
            stopping.cancel()
            self.open -= 1
            self._listening[caller] -= 1

    async def _next(
        self, queue: asyncio.Queue[Changes | None], stopping: asyncio.Future[Any]
    ) -> list[Changes | None] | None:
        """All changes that are there; an empty list when it is time for a heartbeat, None when the
        server stops."""
        getting = asyncio.ensure_future(queue.get())
        try:
            await asyncio.wait(
                [getting, stopping], timeout=HEARTBEAT_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
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

    async def _events(self, several: list[Changes | None]) -> bytes:
        """The events of changes, each once."""
        if None in several:
            return _RESET
        changes = Changes.merged(batch for batch in several if batch is not None)
        events = [_event("queued", {"count": changes.queued})] if changes.queued else []
        names = list(dict.fromkeys([*changes.touched, *changes.finished]))
        for name, found in zip(
            names, await asyncio.gather(*map(self._store.get_rollout_by_id, names)), strict=True
        ):
            deleted = {"rollout_id": name, "status": "deleted"}
            events.append(
                _event(
                    "rollout",
                    {field: getattr(found, field) for field in _SHOWN} if found else deleted,
                )
            )
        for event, field, ids in (
            ("spans", "rollout_id", changes.spans),
            ("metrics", "run_id", changes.runs),
            ("groups", "run_id", changes.runs_with_groups),
        ):
            events += [_event(event, {field: name}) for name in dict.fromkeys(ids)]
        return b"".join(events)


def _event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))
