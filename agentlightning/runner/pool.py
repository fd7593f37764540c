"""Runners on many machines, as many as the queue needs: one loop starts them, replaces what died and ends the old.

It knows how much work there is and which runners run. It knows neither Ray nor Kubernetes, which are `Machines`. Each
runner is an `agl runner` that leaves once it is idle: it alone knows that it has not just leased a rollout.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from agentlightning.errors import AgentLightningError, UnavailableError
from agentlightning.runner.patience import patiently
from agentlightning.store.base import LightningStore
from agentlightning.types import Condition

UNFINISHED: Final = Condition("status", "in", ["queuing", "preparing", "running", "requeuing"])
PERIOD_SECONDS: Final = 2.0
PATIENCE_SECONDS: Final = 300.0  # with a server or machines that do not answer; runners go on meanwhile
HEALTHY_SECONDS: Final = 60.0  # a runner that lived so long did not fail at its start
TURNS_TO_FAIL: Final = 6  # one after the other; the pauses between them add up to a minute
CLEAN_UP_SECONDS: Final = 20.0
_LASTING: Final = "-stays"  # ends the names of runners that do not leave when they are idle


@dataclass(frozen=True)
class Seen:
    """A runner that was started: one that drains has ended, as far as a pool is concerned."""

    state: Literal["running", "ended", "failed"]
    reason: str = ""


class Machines(Protocol):
    """Where runners are started; UnavailableError for what may pass."""

    async def start(self, name: str, arguments: Sequence[str]) -> None:
        """Start `agl runner ARGUMENTS`. After an error it may have been started all the same."""
        ...

    async def runners(self) -> Mapping[str, Seen]:
        """All that were started, by name, except for those that ended long ago."""
        ...

    async def stop(self, name: str) -> None:
        """Let a runner drain and end; nothing for one that has."""
        ...

    async def close(self) -> None:
        """Wait for those that drain, where they end with this process."""
        ...


@dataclass(frozen=True)
class Size:
    """How many runners there are: at least and at most so many, of `each` rollouts at once."""

    least: int
    most: int
    each: int

    def wanted(self, rollouts: int) -> int:
        """`Size(0, 4, 8)`: 0 → 0, 1 → 1, 9 → 2, 100 → 4."""
        return min(max(math.ceil(rollouts / self.each), self.least), self.most)


class Pool:
    """Runs `agl runner ARGUMENTS` on `machines` until `stop` is called. A runner leaves after `idle` seconds without
    work, unless it is one of the least, and is replaced after `lifetime` seconds. AgentLightningError when runners keep
    ending in failure; whatever ends the pool, runners are told to drain. `tell` is given lines for people."""

    def __init__(
        self,
        store: LightningStore,
        machines: Machines,
        size: Size,
        arguments: Sequence[str],
        *,
        idle: float,
        lifetime: float,
        project: str | None,
        tell: Callable[[str], object],
    ) -> None:
        self._store, self._machines, self._size, self._arguments = store, machines, size, tuple(arguments)
        self._idle, self._lifetime, self._project, self._tell = idle, lifetime, project, tell
        self._stopping = asyncio.Event()
        self._reached: float | None = None  # when store and machines answered last
        self._since: dict[str, float] = {}
        self._ended: set[str] | None = None
        self._failures, self._not_before = 0, 0.0

    def stop(self) -> None:
        """End: runners lease nothing more, and those that need it are waited for."""
        self._stopping.set()

    async def run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    await self._reconcile()
                    self._reached = time.monotonic()
                except UnavailableError as error:
                    if self._reached is None or time.monotonic() - self._reached > PATIENCE_SECONDS:
                        raise
                    self._tell(f"tried again: {error}")
                await asyncio.wait({asyncio.ensure_future(self._stopping.wait())}, timeout=PERIOD_SECONDS)
        finally:
            try:
                await patiently(self._stop_all, CLEAN_UP_SECONDS)
            finally:
                await self._machines.close()

    async def _reconcile(self) -> None:
        """Make what runs what is wanted, as far as that can be done now."""
        page = await self._store.page_rollouts(UNFINISHED, limit=1, with_total=True, project=self._project)
        running = self._mind(await self._machines.runners())
        for name in [name for name in running if time.monotonic() - self._since[name] > self._lifetime]:
            self._tell(f"{name} drains, after {self._lifetime:g} s")
            await self._machines.stop(name)
            running.remove(name)
        missing = self._size.wanted(page.total or 0) - len(running)
        if missing <= 0 or time.monotonic() < self._not_before:
            return
        self._tell(f"{page.total} rollouts, {len(running)} runners: starting {missing}")
        lasting = sum(name.endswith(_LASTING) for name in running)
        for number in range(missing):
            if not self._stopping.is_set():
                stays = lasting + number < self._size.least
                name = f"runner-{secrets.token_hex(4)}{_LASTING if stays else ''}"
                await self._machines.start(name, [*self._arguments, *([] if stays else [f"--idle={self._idle:f}s"])])

    def _mind(self, seen: Mapping[str, Seen]) -> list[str]:
        """Which run; those that have failed since the last time put off the next start. Who had failed before this
        process began to look does not count."""
        running = [name for name, one in seen.items() if one.state == "running"]
        now = time.monotonic()
        self._since = {name: self._since.get(name, now) for name in running}
        ended = set(seen) - set(running)
        fresh = [(name, seen[name]) for name in (set() if self._ended is None else ended - self._ended)]
        self._ended = ended
        failed = [(name, one.reason) for name, one in fresh if one.state == "failed"]
        if left := len(fresh) - len(failed):
            self._tell(f"{left} runners have left, {len(running)} run")
        if left or any(now - since > HEALTHY_SECONDS for since in self._since.values()):
            self._failures = 0
        if failed:
            self._failures += 1
            self._not_before = now + 2.0 ** (self._failures - 1)
            what = "; ".join(f"{name} failed: {reason}" for name, reason in failed[:3])
            if self._failures == TURNS_TO_FAIL:
                raise AgentLightningError(f"runners fail again and again ({what}); their logs say why")
            self._tell(what)
        return running

    async def _stop_all(self) -> None:
        running = [name for name, one in (await self._machines.runners()).items() if one.state == "running"]
        if running:
            self._tell(f"{len(running)} runners drain")
        await asyncio.gather(*map(self._machines.stop, running))
