"""Runners on many machines, as many as the queue needs: one loop starts them, replaces what died and ends the old.

It knows how much work there is and which runners run; where they run is `Machines`. Each is an `agl runner` that leaves
once it is idle: it alone knows that it has not just leased a rollout.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from agentlightning.errors import AgentLightningError, UnavailableError
from agentlightning.runner.patience import patiently
from agentlightning.store.base import LightningStore
from agentlightning.types import Condition

UNFINISHED: Final = Condition("status", "in", ["queuing", "preparing", "running", "requeuing"])
PERIOD_SECONDS: Final = 2.0
PATIENCE_SECONDS: Final = 300.0  # with a server or machines that do not answer; runners go on meanwhile
HEALTHY_SECONDS: Final = 60.0  # a runner that lived so long did not fail at its start
TURNS_TO_FAIL: Final = 6  # one after the other; the pauses between them add up to half a minute
CLEAN_UP_SECONDS: Final = 20.0
RUNNING: Final = "running"
ENDED: Final = "ended"  # or drains
_LASTING: Final = "-stays"  # ends the names of runners that do not leave when they are idle


class Machines(Protocol):
    """Where runners are started, under names; UnavailableError for what may pass. `runners` tells RUNNING, ENDED or the
    reason why one failed; `stop` lets one drain; `close` waits for those that drain and would end with this process.
    After an error of `start` there may be a runner all the same."""

    async def start(self, name: str, arguments: Sequence[str]) -> None: ...
    async def runners(self) -> Mapping[str, str]: ...
    async def stop(self, name: str) -> None: ...
    async def close(self) -> None: ...


@dataclass(eq=False)
class Pool:
    """Keeps runners on `machines` until `stop` is called: one for each `each` rollouts, within `least` and `most`. A
    runner leaves after `idle` seconds without work, unless it is one of the least, and is replaced after `lifetime`
    seconds. AgentLightningError when they fail again and again. Whatever ends the pool, they are told to drain. `tell`
    is given lines for people."""

    store: LightningStore
    machines: Machines
    arguments: Sequence[str]
    least: int
    most: int
    each: int
    idle: float
    lifetime: float
    project: str | None
    tell: Callable[[str], object]
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _since: dict[str, float] = field(default_factory=dict[str, float])
    _ended: set[str] | None = None
    _failures: int = 0
    _not_before: float = 0.0

    def wanted(self, rollouts: int) -> int:
        """With 0 to 4 of 8 rollouts each: 0 → 0, 1 → 1, 9 → 2, 100 → 4."""
        return min(max(math.ceil(rollouts / self.each), self.least), self.most)

    def stop(self) -> None:
        """End; runners drain."""
        self._stopping.set()

    async def run(self) -> None:
        reached, stopping = time.monotonic(), asyncio.ensure_future(self._stopping.wait())
        try:
            while not stopping.done():
                try:
                    await self._reconcile()
                    reached = time.monotonic()
                except UnavailableError as error:
                    if self._ended is None or time.monotonic() - reached > PATIENCE_SECONDS:
                        raise
                    self.tell(f"tried again: {error}")
                await asyncio.wait({stopping}, timeout=PERIOD_SECONDS)
        finally:
            stopping.cancel()
            try:
                if self._ended is not None:  # else nothing was reached, and nothing started
                    await patiently(self._stop_all, CLEAN_UP_SECONDS)
            except AgentLightningError as error:  # which must not hide why the pool ends
                self.tell(f"runners could not be told to drain; they leave when they are idle: {error}")
            finally:
                await self.machines.close()

    async def _reconcile(self) -> None:
        """Make what runs what is wanted, as far as that can be done now."""
        rollouts = await patiently(self._rollouts, PERIOD_SECONDS)
        running = self._mind(await self.machines.runners())
        for name in [name for name in running if time.monotonic() - self._since[name] > self.lifetime]:
            self.tell(f"{name} drains, after {self.lifetime:g} s")
            await self.machines.stop(name)
            running.remove(name)
        missing = self.wanted(rollouts) - len(running)
        if missing <= 0 or time.monotonic() < self._not_before:
            return
        self.tell(f"{rollouts} rollouts, {len(running)} runners: starting {missing}")
        lasting = sum(name.endswith(_LASTING) for name in running)
        for number in range(lasting, lasting + missing):
            stays, name = number < self.least, f"runner-{secrets.token_hex(4)}"
            if not self._stopping.is_set():
                idle = [] if stays else [f"--idle={self.idle:f}s"]
                await self.machines.start(name + _LASTING * stays, [*self.arguments, *idle])

    async def _rollouts(self) -> int:
        page = await self.store.page_rollouts(UNFINISHED, limit=1, with_total=True, project=self.project)
        return page.total or 0

    def _mind(self, seen: Mapping[str, str]) -> list[str]:
        """Which run. Those that failed since the last time put off the next start."""
        running, now = [name for name, state in seen.items() if state == RUNNING], time.monotonic()
        self._since = {name: self._since.get(name, now) for name in running}
        ended = seen.keys() - running
        fresh = set[str]() if self._ended is None else ended - self._ended  # old failures are not this pool's
        self._ended = ended
        failed = sorted(name for name in fresh if seen[name] != ENDED)
        if left := len(fresh) - len(failed):
            self.tell(f"{left} runners have left, {len(running)} run")
        if left or any(now - since > HEALTHY_SECONDS for since in self._since.values()):
            self._failures = 0
        if failed:
            what = "; ".join(f"{name} failed: {seen[name]}" for name in failed[:3])
            self._not_before, self._failures = now + 2.0**self._failures, self._failures + 1
            if self._failures == TURNS_TO_FAIL:
                raise AgentLightningError(f"runners fail again and again ({what}); their logs say why")
            self.tell(what)
        return running

    async def _stop_all(self) -> None:
        running = [name for name, state in (await self.machines.runners()).items() if state == RUNNING]
        if running:
            self.tell(f"{len(running)} runners drain")
        await asyncio.gather(*map(self.machines.stop, running))
