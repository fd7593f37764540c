"""Whether a store can be written: told to the log when that ends and when it is back, and to
whoever asks.

Knows no database: its owner reports what became of writes, and says how to try one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from agentlightning.errors import UnavailableError

_log: Final = logging.getLogger(__name__)
# between trial writes while the store is away, and until a good one counts as old
_TRY_SECONDS: Final = 1.0


class Availability:
    """The state of a store called `what`. `try_to_write` makes the smallest durable write, or
    raises UnavailableError.

    `refused` counts the calls that failed since the store cannot be written, `transactions` those
    that were committed, which took `seconds` in all."""

    def __init__(self, what: str, try_to_write: Callable[[], Awaitable[object]]) -> None:
        self.refused = self.transactions = 0
        self.seconds = 0.0
        self._what = what
        self._try_to_write = try_to_write
        self._error: UnavailableError | None = None
        self._since = 0.0
        self._refused_before = 0
        self._written = time.monotonic()
        self._trying: asyncio.Task[None] | None = None
        self._trial: asyncio.Future[object] | None = None

    @property
    def away(self) -> bool:
        return self._error is not None

    def report(self, error: Exception | None, seconds: float) -> None:
        """Note that a transaction was committed within `seconds`, or the error of a call. An error
        that is no UnavailableError says nothing about the store."""
        if error is None:
            self.transactions += 1
            self.seconds += seconds
            self._written = time.monotonic()
            if self._error is not None:
                self._log_recovery()
        elif isinstance(error, UnavailableError):
            self.refused += 1
            if self._error is None:
                self._since = time.monotonic()
                self._refused_before = self.refused - 1
                _log.error(
                    "the store %s cannot be written; calls are refused until it is back: %s",
                    self._what,
                    error,
                )
                self._trying = asyncio.create_task(
                    self._try_until_back(), name="store that cannot be written"
                )
            self._error = error

    async def check(self) -> None:
        """UnavailableError unless the store can be written now. All who ask at once share a trial
        write, which goes on when they stop waiting for it."""
        if self._error is not None:
            # an error that is raised again and again keeps every traceback
            raise UnavailableError(str(self._error))
        if time.monotonic() - self._written > _TRY_SECONDS:
            if self._trial is None or self._trial.done():
                self._trial = asyncio.ensure_future(self._try_to_write())
                self._trial.add_done_callback(lambda trial: trial.cancelled() or trial.exception())
            await asyncio.shield(self._trial)

    def close(self) -> None:
        self._error = UnavailableError("the store is closed")
        if self._trying is not None:
            self._trying.cancel()

    def _log_recovery(self) -> None:
        seconds = time.monotonic() - self._since
        refused = self.refused - self._refused_before
        _log.warning(
            "the store %s can be written again after %.1f s; %d calls failed",
            self._what,
            seconds,
            refused,
        )
        self._error = None

    async def _try_until_back(self) -> None:
        while self._error is not None:
            await asyncio.sleep(_TRY_SECONDS)
            try:
                await self._try_to_write()
            except UnavailableError:
                self.refused -= 1  # nobody's call
