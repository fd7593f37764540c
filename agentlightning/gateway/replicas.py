"""Several servers of one model as one backend: the least busy of the healthy answers.

Knows that servers fail and recover, and how many calls each runs. Knows no protocol, and no model but its own.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from types import TracebackType
from typing import Final, Protocol, runtime_checkable

import msgspec

from agentlightning.errors import BackendError, ConfigError
from agentlightning.gateway.backend import Backend, BackendEvent, ModelCall, RelayedAnswer, RelayedCall, Started
from agentlightning.gateway.backends.connection import Connection
from agentlightning.gateway.backends.wire import BROKE_OFF, UNREACHABLE

_log = logging.getLogger(__name__)

_FAILURES: Final = 3  # in a row, after which a replica is ejected
_SESSIONS: Final = 10_000  # whose replica is remembered
_CHECK_TIMEOUT: Final = 5.0  # seconds
_SLOW_ROUNDS: Final = 10  # replicas in use are checked once in so many rounds


@runtime_checkable
class RemoteBackend(Backend, Protocol):
    """A backend that is a server of some kind, behind a connection."""

    kind: str
    connection: Connection


class Replica:
    """One of a model's servers, and what is known of it. `ejected_since` is in seconds since the epoch, `why` its last
    failure since it last answered."""

    def __init__(self, backend: RemoteBackend) -> None:
        self.backend = backend
        self.running = 0
        self.failures = 0  # in a row
        self.failed_at = 0.0  # monotonic
        self.chosen = 0  # a larger number was chosen later
        self.ejected_since: float | None = None
        self.why: str | None = None

    def answered(self) -> None:
        """It has answered a call to its end."""
        self.readmit()
        self.why = None

    def failed(self, why: str) -> None:
        """It has failed a call. Too often in a row, and it is ejected."""
        self.failures += 1
        if self.failures >= _FAILURES:
            self.eject(why)
        self.failed_at, self.why = time.monotonic(), why

    def eject(self, why: str) -> None:
        """Send it no calls until it is healthy."""
        if self.ejected_since is not None:
            return
        self.ejected_since, self.failed_at, self.why = time.time(), time.monotonic(), why
        _log.warning("the backend at %s is not used until it is healthy again: %s", self.backend.name, why)

    def readmit(self, failures: int = 0) -> None:
        """Use it again if it was ejected. With `failures` fewer further ones eject it."""
        if self.ejected_since is not None:
            _log.warning("the backend at %s is used again", self.backend.name)
        self.failures, self.ejected_since = failures, None


class Replicas:
    """A backend of several. A session keeps its replica, whose prefix cache knows it, while that one is healthy and not
    much busier than the least busy.

    A call that fails for a reason of the replica's (it cannot be reached, answers 5xx, breaks off) before anything of
    its answer is out goes to another one. A replica that fails three times in a row, or does not answer when asked for
    its health, is ejected: nothing is sent there until it is healthy, which is asked every `check_seconds`, and of
    replicas in use every tenth time. If all are ejected the one whose failure is longest ago is tried. `lost` is told
    of a server that ended a connection or took none: what answers there next may be another process."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        check_seconds: float = 3.0,
        lost: Callable[[RemoteBackend], None] | None = None,
    ) -> None:
        if not replicas:
            raise ConfigError("a model needs at least one backend")
        self.replicas = tuple(replicas)
        self.name = ", ".join(replica.backend.name for replica in replicas)
        self.captures_tokens = all(replica.backend.captures_tokens for replica in replicas)
        self.seeded = all(replica.backend.seeded for replica in replicas)
        self.relays = frozenset.intersection(*(replica.backend.relays for replica in replicas))
        if len(replicas) > 1:
            for replica in replicas:
                replica.backend.connection.retries = False
        self._sessions: OrderedDict[str, Replica] = OrderedDict()
        self._choices = itertools.count(1)
        self._check_seconds = check_seconds
        self.lost = lost
        self._checking: asyncio.Task[None] | None = None

    async def answer(self, call: ModelCall) -> AsyncGenerator[BackendEvent, None]:
        """See `Backend.answer`; `Started.replica` says who answers."""
        tries = _Tries(self, call.session)
        while True:
            async with tries as replica:
                async with aclosing(replica.backend.answer(call)) as events:
                    async for event in events:
                        tries.begun = True
                        if isinstance(event, Started):
                            event = msgspec.structs.replace(event, replica=event.replica or replica.backend.name)
                        yield event
                replica.answered()
                return

    @asynccontextmanager
    async def relay(self, call: RelayedCall) -> AsyncGenerator[RelayedAnswer]:
        """See `Backend.relay`. An answer of 5xx is passed on only where no other replica is left."""
        tries = _Tries(self, call.session)
        while True:
            async with tries as replica, replica.backend.relay(call) as answer:
                if answer.status >= 500 and tries.may_go_on:
                    raise BackendError(f"the backend at {replica.backend.name} answered {answer.status}")
                tries.begun = True
                yield msgspec.structs.replace(answer, replica=replica.backend.name)
                if answer.status < 500:
                    replica.answered()
                return

    async def count_tokens(self, call: ModelCall) -> int:
        tries = _Tries(self, call.session)
        while True:
            async with tries as replica:
                count = await replica.backend.count_tokens(call)
                replica.answered()
                return count

    async def close(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.gather(self._checking, return_exceptions=True)
        await asyncio.gather(*(replica.backend.close() for replica in self.replicas))

    def choose(self, session: str | None, tried: set[Replica]) -> Replica:
        """A replica not yet `tried`, where the call counts as running from now on."""
        if self._checking is None:
            self._checking = asyncio.create_task(self._check(), name="health of replicas")
        replica = self._best(session, tried)
        replica.running += 1
        replica.chosen = next(self._choices)
        if session is not None:
            self._sessions[session] = replica
            self._sessions.move_to_end(session)
            if len(self._sessions) > _SESSIONS:
                self._sessions.popitem(last=False)
        return replica

    def left(self, tried: set[Replica]) -> list[Replica]:
        """Where a call that has `tried` some may go: to those in use, or if all are ejected to any."""
        used = [replica for replica in self.replicas if replica.ejected_since is None] or self.replicas
        return [replica for replica in used if replica not in tried]

    def _best(self, session: str | None, tried: set[Replica]) -> Replica:
        left = self.left(tried) or [replica for replica in self.replicas if replica not in tried]
        if left[0].ejected_since is not None:
            left = [min(left, key=lambda replica: replica.failed_at)]
        least = min(left, key=lambda replica: (replica.running, replica.chosen))
        own = self._sessions.get(session) if session is not None else None
        return own if own in left and own.running <= least.running * 1.5 + 4 else least

    async def _check(self) -> None:
        for number in itertools.count(1):
            await asyncio.sleep(self._check_seconds)
            due = [one for one in self.replicas if one.ejected_since is not None or number % _SLOW_ROUNDS == 0]
            for failure in await asyncio.gather(*map(self._check_one, due), return_exceptions=True):
                if isinstance(failure, Exception):
                    _log.error("a backend's health could not be checked", exc_info=failure)

    async def _check_one(self, replica: Replica) -> None:
        connection = replica.backend.connection
        if connection.unusable:
            return  # whoever changes its weights says when it can be used: until then it gets no calls, ejected or not
        if not await connection.healthy(_CHECK_TIMEOUT):
            replica.eject("it does not answer when asked for its health")
        elif replica.ejected_since is not None:
            replica.readmit(failures=_FAILURES - 1)  # healthy servers may fail all the same: once more, and out again


def servers_of(backend: Backend) -> list[RemoteBackend]:
    """The servers behind a backend; none where it answers by itself."""
    if isinstance(backend, Replicas):
        return [replica.backend for replica in backend.replicas]
    return [backend] if isinstance(backend, RemoteBackend) else []


class _Tries:
    """One call's tries, each in an `async with` block at another replica. The failure of one is swallowed where
    another is left to try and nothing of an answer has `begun`."""

    def __init__(self, replicas: Replicas, session: str | None) -> None:
        self.begun = False
        self._replicas = replicas
        self._session = session
        self._tried: set[Replica] = set()

    @property
    def may_go_on(self) -> bool:
        return not self.begun and bool(self._replicas.left(self._tried))

    async def __aenter__(self) -> Replica:
        self._replica = self._replicas.choose(self._session, self._tried)
        self._tried.add(self._replica)
        return self._replica

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        failed = False
        if isinstance(error, BackendError) and error.status >= 500:
            failed = True
            self._replica.failed(str(error))
            if self._replicas.lost is not None and error.code in (UNREACHABLE, BROKE_OFF):
                self._replicas.lost(self._replica.backend)
        self._replica.running -= 1
        return failed and self.may_go_on
