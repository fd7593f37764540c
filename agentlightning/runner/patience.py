"""Calls that are repeated while the store is away."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from agentlightning.errors import AgentLightningError, UnavailableError

T = TypeVar("T")

_FIRST_RETRY_SECONDS: Final = 0.1
_LAST_RETRY_SECONDS: Final = 5.0


async def patiently(call: Callable[[], Awaitable[T]], seconds: float) -> T:
    """Repeat a harmless-to-repeat call for so long while the store is away or has a defect; then UnavailableError."""
    deadline = time.monotonic() + seconds
    pause = _FIRST_RETRY_SECONDS
    while True:
        try:
            return await call()
        except AgentLightningError as error:
            if not (isinstance(error, UnavailableError) or is_defect(error)):
                raise
            if time.monotonic() + pause > deadline:
                raise UnavailableError(
                    f"it did not answer for {seconds:g} s: {error}. "
                    "Attempts in flight are retried by whoever finds them, once it is back"
                ) from error
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, _LAST_RETRY_SECONDS)


def is_defect(error: AgentLightningError) -> bool:
    """Whether the server failed by itself (HTTP 500), which may pass."""
    return type(error) is AgentLightningError
