"""Several servers of one model as one backend: the least busy one answers, and failed ones are left
out."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import zlib
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import msgspec

from agentlightning.errors import BackendError
from agentlightning.gateway.backend import (
    Backend,
    BackendEvent,
    ModelCall,
    RelayedAnswer,
    RelayedCall,
    Started,
)
from agentlightning.gateway.backends.connection import (
    BROKE_OFF,
    NO_WEIGHTS,
    UNREACHABLE,
    BackendConnection,
)

_log = logging.getLogger(__name__)
_CHECK_TIMEOUT: Final = 5.0  # seconds


@runtime_checkable
class RemoteBackend(Backend, Protocol):
    """A backend on a server, behind a connection."""

    kind: str
    connection: BackendConnection


@dataclass(eq=False)
class Replica:
    """One of a model's servers. `ejected_since` is in seconds since the epoch, `why` its last
    failure since its last answer."""

    backend: RemoteBackend
    running: int = 0
    chosen: int = 0  # a larger number was chosen later
    ejected_since: float | None = None
    why: str | None = None

    @property
    def usable(self) -> bool:
        return self.ejected_since is None and not self.backend.connection.unusable

    def eject(self, why: str) -> None:
        """Send it no calls until it is healthy."""
        self.why = why
        if self.ejected_since is None:
            self.ejected_since = time.time()
            _log.warning(
                "the backend at %s is not used until it is healthy again: %s",
                self.backend.name,
                why,
            )

    def readmit(self) -> None:
        if self.ejected_since is not None:
            _log.warning("the backend at %s is used again", self.backend.name)
        self.ejected_since = self.why = None


class Replicas:
    """A backend of several servers. A session keeps its server, which has its prefix cached, while
    that is healthy and not much busier than the least busy.

    A call that fails by the server's fault (cannot be reached, 5xx, broken connection) before its
    answer has begun goes to another server, and the failed one gets no more until it is healthy,
    which is checked every `check_seconds`. If none is healthy, any is tried. `lost` is called with
    a server that ended or refused a connection: another process may answer there next."""

    def __init__(
        self,
        backends: Sequence[RemoteBackend],
        *,
        check_seconds: float = 3.0,
        lost: Callable[[RemoteBackend], None] = lambda server: None,
    ) -> None:
        self.replicas = tuple(map(Replica, backends))
        self.name = ", ".join(backend.name for backend in backends)
        self.captures_tokens = all(backend.captures_tokens for backend in backends)
        self.seeded = all(backend.seeded for backend in backends)
        for backend in backends:
            backend.connection.retries = len(backends) == 1
        self._choices = itertools.count(1)
        self._check_seconds = check_seconds
        self._lost = lost
        self._checking: asyncio.Task[None] | None = None

    @property
    def relays(self) -> frozenset[str]:
        return frozenset.intersection(*(replica.backend.relays for replica in self.replicas))

    async def answer(self, call: ModelCall) -> AsyncGenerator[BackendEvent, None]:
        """See `Backend.answer`; `Started.replica` is the server."""
        tries = _Tries(self, call.session)
        while True:
            async with tries.next() as replica, aclosing(replica.backend.answer(call)) as events:
                async for event in events:
                    tries.begun = True
                    if isinstance(event, Started):
                        event = msgspec.structs.replace(
                            event, replica=event.replica or replica.backend.name
                        )
                    yield event
                return

    @asynccontextmanager
    async def relay(self, call: RelayedCall) -> AsyncGenerator[RelayedAnswer]:
        """See `Backend.relay`. A 5xx answer is passed on only if no other replica is left."""
        tries = _Tries(self, call.session)
        while True:
            async with tries.next() as replica, replica.backend.relay(call) as answer:
                if answer.status >= 500 and tries.may_go_on:
                    raise BackendError(
                        f"the backend at {replica.backend.name} answered {answer.status}"
                    )
                tries.begun = True
                yield msgspec.structs.replace(answer, replica=replica.backend.name)
                return

    async def count_tokens(self, call: ModelCall) -> int:
        tries = _Tries(self, call.session)
        while True:
            async with tries.next() as replica:
                return await replica.backend.count_tokens(call)

    async def close(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
        await asyncio.gather(*(replica.backend.close() for replica in self.replicas))

    def left(self, tried: set[Replica]) -> list[Replica]:
        """The servers left for a call that has `tried` some."""
        used = [replica for replica in self.replicas if replica.usable] or self.replicas
        return [replica for replica in used if replica not in tried]

    def choose(self, session: str | None, tried: set[Replica]) -> Replica:
        """A replica not yet `tried`."""
        left = self.left(tried) or [replica for replica in self.replicas if replica not in tried]
        chosen = least = min(left, key=lambda replica: (replica.running, replica.chosen))
        if session is not None:
            own = max(
                left, key=lambda replica: zlib.crc32(f"{session} {replica.backend.name}".encode())
            )
            chosen = own if own.running <= least.running * 1.5 + 4 else least
        chosen.chosen = next(self._choices)
        return chosen

    def failed(self, replica: Replica, error: BackendError) -> None:
        if error.code == NO_WEIGHTS:
            return  # whoever changes its weights says when it can be used
        replica.eject(str(error))
        if error.code in (UNREACHABLE, BROKE_OFF):
            self._lost(replica.backend)
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check(), name="health of replicas")

    async def _check(self) -> None:
        while ejected := [
            replica for replica in self.replicas if replica.ejected_since is not None
        ]:
            await asyncio.sleep(self._check_seconds)
            checks = (replica.backend.connection.healthy(_CHECK_TIMEOUT) for replica in ejected)
            for replica, healthy in zip(ejected, await asyncio.gather(*checks), strict=True):
                if healthy:
                    replica.readmit()


class _Tries:
    """A call's attempts, each at another replica. A failure is swallowed if another replica is left
    and the answer has not `begun`."""

    def __init__(self, replicas: Replicas, session: str | None) -> None:
        self.begun = False
        self._replicas = replicas
        self._session = session
        self._tried: set[Replica] = set()

    @property
    def may_go_on(self) -> bool:
        return not self.begun and bool(self._replicas.left(self._tried))

    @asynccontextmanager
    async def next(self) -> AsyncGenerator[Replica]:
        replica = self._replicas.choose(self._session, self._tried)
        self._tried.add(replica)
        replica.running += 1
        try:
            yield replica
        except BackendError as error:
            if error.status >= 500:
                self._replicas.failed(replica, error)
            if error.status < 500 or not self.may_go_on:
                raise
        else:
            replica.readmit()
        finally:
            replica.running -= 1


def servers_of(backend: Backend) -> list[RemoteBackend]:
    """The servers of a backend; none if it answers itself."""
    if isinstance(backend, Replicas):
        return [replica.backend for replica in backend.replicas]
    return [backend] if isinstance(backend, RemoteBackend) else []
