"""Where the measurements of a run go: into the store, and to every tracker.

A tracker is told of them in a thread of its own, one after the other: what it waits for, nothing else waits for, and
what goes wrong in it is told once and stops no training. This module knows no tracker by name (see `trackers`).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, Protocol, runtime_checkable

from agentlightning.store.base import LightningStore
from agentlightning.types import Metrics, Run

CLOSING_SECONDS: Final = 60.0  # how long the end of a run waits for a tracker to send what it holds


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is given when it starts. `directory` is the run's own; `history` is what was measured before,
    oldest step first: of a run that is resumed, up to the step that it goes on from."""

    run_id: str
    kind: str
    manifest: Mapping[str, Any]
    directory: Path
    history: Sequence[Metrics] = ()

    @property
    def config(self) -> Mapping[str, Any]:
        """The resolved settings, nested."""
        return self.manifest.get("config", {})


@runtime_checkable
class Tracker(Protocol):
    """Shows or keeps what a run measures. Called by one thread; all calls may block, and raise what they will."""

    name: str

    def start(self, run: TrackedRun) -> str | None:
        """Called once, before the rest. Returns where a person finds it, if that is worth a line."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """What was measured at `step` (0: before training). A step may come more than once, each time with other
        names, and late: that of an evaluation beside training."""
        ...

    def close(self) -> None:
        """Called once, at the end, if `start` went well."""
        ...


class Tracking:
    """The measurements of one run. `history` holds them by step."""

    def __init__(
        self,
        store: LightningStore,
        run: Run,
        directory: Path,
        trackers: Sequence[Tracker],
        note: Callable[[str], None],
    ) -> None:
        self.history: dict[int, dict[str, float]] = {}
        self._store = store
        self._run = run
        self._directory = directory
        self._outboxes = [_Outbox(tracker, note) for tracker in trackers]
        self._measured: list[Metrics] = []
        self._started = False

    async def go_on_after(self, step: int) -> None:
        """Take up what a run that is resumed had measured up to `step`; what came later will come again."""
        self._measured = [one for one in await self._store.query_metrics(self._run.run_id) if one.step <= step]
        self.history = {one.step: dict(one.values) for one in self._measured}

    async def record(self, step: int, values: Mapping[str, float]) -> None:
        """Keep what was measured at `step`, beside what was before."""
        if not self._started:
            self._started = True
            run = TrackedRun(self._run.run_id, self._run.kind, self._run.manifest, self._directory, self._measured)
            for outbox in self._outboxes:
                outbox.start(run)
        for outbox in self._outboxes:
            outbox.log(step, dict(values))
        known = self.history[step] = self.history.get(step, {}) | dict(values)
        await self._store.add_metrics(Metrics(run_id=self._run.run_id, step=step, time=time.time(), values=known))

    async def close(self) -> None:
        """Wait until every tracker has closed, for a minute at most."""
        if self._started:
            await asyncio.gather(*(outbox.close() for outbox in self._outboxes))


class _Outbox:
    """What a tracker is still to be told, and the thread that tells it."""

    def __init__(self, tracker: Tracker, note: Callable[[str], None]) -> None:
        self._tracker = tracker
        self._note = note
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"tracker {tracker.name}", daemon=True)
        self._failed = False

    def start(self, run: TrackedRun) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs.put(lambda: self._begin(run))
        self._thread.start()

    def log(self, step: int, values: dict[str, float]) -> None:
        self._jobs.put(lambda: self._tracker.log(step, values))

    async def close(self) -> None:
        self._jobs.put(self._tracker.close)
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join, CLOSING_SECONDS)
        if self._thread.is_alive():
            self._note(f"{self._tracker.name}: not done after {CLOSING_SECONDS:.0f} s; what it has not sent is lost")

    # --- in the thread ---

    def _work(self) -> None:
        if not self._try(self._jobs.get()):
            return  # it never began
        while (job := self._jobs.get()) is not None:
            self._try(job)

    def _begin(self, run: TrackedRun) -> None:
        where = self._tracker.start(run)
        if where:
            self._tell(where)

    def _try(self, job: Callable[[], object] | None) -> bool:
        try:
            if job is not None:
                job()
        except Exception as error:  # noqa: BLE001 (whatever it is, training goes on)
            if not self._failed:
                self._failed = True
                self._tell(f"{type(error).__name__}: {error} (told once; training goes on)")
            return False
        return True

    def _tell(self, message: str) -> None:
        with contextlib.suppress(RuntimeError):  # the run has ended without it
            self._loop.call_soon_threadsafe(self._note, f"{self._tracker.name}: {message}")
