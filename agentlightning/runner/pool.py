"""Runners on many machines, as many as the queue needs: one loop starts them and replaces what died.

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
LEAVING_SECONDS: Final = 15  # beyond its drain a runner takes nine
RUNNING: Final = "running"
ENDED: Final = "ended"  # or drains


class Machines(Protocol):
    """Where runners are started, under names; UnavailableError for what may pass, after which there may be one all the
    same. `runners` tells RUNNING, ENDED or why one failed; `close` waits for those that would end with this process."""

    async def start(self, name: str, arguments: Sequence[str]) -> None: ...
    async def runners(self) -> Mapping[str, str]: ...
    async def drain(self) -> None: ...
    async def close(self) -> None: ...


@dataclass(eq=False)
class Pool:
    """Keeps runners on `machines` until `stop` is called: one for each `each` rollouts, at most `most`. `tell` is given
    lines for people."""

    store: LightningStore
    machines: Machines
    arguments: Sequence[str]
    most: int
    each: int
    tell: Callable[[str], object]
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _since: dict[str, float] = field(default_factory=dict[str, float])
    _ended: set[str] | None = None
    _failures: int = 0
    _not_before: float = 0.0

    def wanted(self, rollouts: int) -> int:
        """With up to 4 of 8 rollouts each: 0 → 0, 1 → 1, 9 → 2, 100 → 4."""
        return min(math.ceil(rollouts / self.each), self.most)

    def stop(self) -> None:
        """End; runners drain."""
        self._stopping.set()

    async def run(self) -> bool:
        """AgentLightningError when runners fail again and again. Whatever ends the pool, they are told to drain; False
        where they could not be told."""
        told = True
        try:
            await self._keep()
        finally:
            try:
                if self._ended is not None:  # else nothing was reached, and nothing started
                    await patiently(self.machines.drain, CLEAN_UP_SECONDS)
            except AgentLightningError as error:  # which must not hide why the pool ends
                self.tell(f"runners could not be told to drain; they leave when they are idle: {error}")
                told = False
            finally:
                await self.machines.close()
        return told

    async def _keep(self) -> None:
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

    async def _reconcile(self) -> None:
        """Make what runs what is wanted, as far as that can be done now."""
        rollouts = await patiently(self._rollouts, PERIOD_SECONDS)
        running = self._mind(await self.machines.runners())
        missing = self.wanted(rollouts) - len(running)
        if missing <= 0 or time.monotonic() < self._not_before:
            return
        self.tell(f"{rollouts} rollouts, {len(running)} runners: starting {missing}")
        for _ in range(missing):
            if not self._stopping.is_set():
                await self.machines.start(f"runner-{secrets.token_hex(4)}", self.arguments)

    async def _rollouts(self) -> int:
        page = await self.store.page_rollouts(UNFINISHED, limit=1, with_total=True)
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
