"""Holds calls while weights change: a gate per model, and the clocks of the attempts behind a
closed one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, TypeAlias

from agentlightning.errors import AgentLightningError, BackendError
from agentlightning.store.base import LightningStore

_log = logging.getLogger(__name__)

LONGEST_HOLD: Final = 300.0
"""Seconds that a call waits at a closed gate; the SDKs of OpenAI and Anthropic listen for 600."""
_SLICE: Final = 5.0  # seconds for which clocks are stopped at a time
_RENEWED: Final = 2.0  # seconds after which they are stopped again

AttemptIds: TypeAlias = tuple[str, str]
"""(rollout_id, attempt_id)"""


class Gate:
    """Lets the calls of one model through, or holds them while anybody holds it; counts running and
    waiting calls.

    `attempts` counts each attempt's calls that run behind the gate or wait at it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.running = self.waiting = 0
        self.attempts: dict[AttemptIds, int] = {}
        self.open = asyncio.Event()
        self.open.set()
        self._holders: dict[str, asyncio.TimerHandle | None] = {}

    @property
    def held(self) -> bool:
        return bool(self._holders)

    def holds(self) -> list[tuple[str, float | None]]:
        """Who holds calls, and for how many seconds more at most."""
        now = asyncio.get_running_loop().time()
        return [(holder, end and end.when() - now) for holder, end in self._holders.items()]

    def held_by(self, holder: str) -> bool:
        return holder in self._holders

    def hold(self, holder: str, seconds: float | None = None) -> None:
        """Hold new calls from now on, for at most `seconds` if given; a repeated call restarts
        them."""
        self._forget(holder)
        expiry = None
        if seconds is not None:
            expiry = asyncio.get_running_loop().call_later(seconds, self._expire, holder, seconds)
        self._holders[holder] = expiry
        self.open.clear()

    def release(self, holder: str) -> None:
        """Let calls through again, unless somebody else holds them."""
        self._forget(holder)
        if not self._holders:
            self.open.set()

    def _forget(self, holder: str) -> None:
        expiry = self._holders.pop(holder, None)
        if expiry is not None:
            expiry.cancel()

    def _expire(self, holder: str, seconds: float) -> None:
        warning = (
            "calls of the model %r are let through again: who held them has not been heard of for "
            "%g seconds"
        )
        _log.warning(warning, self.name, seconds)
        self.release(holder)

    def enter(self, attempt: AttemptIds | None) -> None:
        self.running += 1
        self.note(attempt, 1)

    def leave(self, attempt: AttemptIds | None) -> None:
        self.note(attempt, -1)
        self.running -= 1

    def note(self, attempt: AttemptIds | None, more: int) -> None:
        if attempt is not None:
            self.attempts[attempt] = count = self.attempts.get(attempt, 0) + more
            if not count:
                del self.attempts[attempt]


class Holding:
    """Calls wait at closed gates for up to `longest` seconds, and the clocks of their attempts
    stand still.

    So do the clocks of attempts whose calls run behind a closed gate, since their engine may be
    paused. The store learns this in slices of a few seconds, so a gateway that dies leaves no more
    than one slice."""

    def __init__(
        self,
        store: LightningStore | None,
        gates: Callable[[], Iterable[Gate]],
        longest: float = LONGEST_HOLD,
    ) -> None:
        self._store = store
        self._gates = gates
        self._longest = longest
        self._waits: set[asyncio.Timeout] = set()
        self._changed = asyncio.Event()
        self._stopping: asyncio.Task[None] | None = None

    async def wait(self, gate: Gate, attempt: AttemptIds | None) -> float:
        """Wait at a closed gate; returns the seconds. BackendError 503 with `retry_after` if it
        took too long: SDKs then retry."""
        began = time.monotonic()
        gate.note(attempt, 1)
        gate.waiting += 1
        self.changed()
        try:
            async with asyncio.timeout(self._longest) as limit:
                self._waits.add(limit)
                try:
                    await gate.open.wait()
                finally:
                    self._waits.discard(limit)
        except TimeoutError:
            error = BackendError(
                f"calls of the model {gate.name!r} are held while its weights are updated, or "
                "until its trainer is back; ask again",
                status=503,
                code="model_held",
            )
            error.retry_after = "1"
            raise error from None
        finally:
            gate.waiting -= 1
            gate.note(attempt, -1)
        return time.monotonic() - began

    def changed(self) -> None:
        """A gate was closed or opened, or a call came to a closed one."""
        self._changed.set()
        if self._stopping is None and self._store is not None and self._held_attempts():
            self._stopping = asyncio.create_task(
                self._stop_clocks(self._store), name="clocks of held calls"
            )

    def turn_away(self) -> None:
        """Answer waiting calls as if they had waited too long: this process is about to end."""
        for limit in self._waits:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

    async def close(self) -> None:
        if self._stopping is not None:
            self._stopping.cancel()
            await asyncio.gather(self._stopping, return_exceptions=True)

    def _held_attempts(self) -> set[AttemptIds]:
        return {attempt for gate in self._gates() if gate.held for attempt in gate.attempts}

    async def _stop_clocks(self, store: LightningStore) -> None:
        """Stop the clocks of new attempts, and renew those of all every `_RENEWED` seconds."""
        loop = asyncio.get_running_loop()
        stopped: set[AttemptIds] = set()
        renewal = loop.time() + _RENEWED
        try:
            while True:
                self._changed.clear()
                standing = self._held_attempts()
                if not standing:
                    return
                if loop.time() >= renewal:
                    stopped = set()
                    renewal = loop.time() + _RENEWED
                if standing - stopped:
                    try:
                        await store.extend_attempts(sorted(standing - stopped), _SLICE)
                    except AgentLightningError as error:
                        _log.warning(
                            "the clocks of attempts with held calls could not be stopped: %s", error
                        )
                    stopped |= standing
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(renewal):
                        await self._changed.wait()
        finally:
            self._stopping = None
