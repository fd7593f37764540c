"""Calls that wait while weights change: a gate per model.

Knows how many calls run and which wait. Knows no models, and not what changes meanwhile.
"""

from __future__ import annotations

import asyncio


class Gate:
    """Lets calls through, holds them while weights change, and knows how many are running."""

    def __init__(self) -> None:
        self.running = 0
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def held(self) -> bool:
        return not self._open.is_set()

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    async def passed(self) -> None:
        """Return as soon as calls are let through."""
        await self._open.wait()

    async def idle(self) -> None:
        """Return when no call is running; those that wait to pass do not count."""
        await self._idle.wait()

    def enter(self) -> None:
        self.running += 1
        self._idle.clear()

    def leave(self) -> None:
        self.running -= 1
        if self.running == 0:
            self._idle.set()
