"""Removing what is old, on a timer.

This module knows when to look; what removing means is decided by the store.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from agentlightning.errors import UnavailableError
from agentlightning.store import calls
from agentlightning.store.base import LightningStore
from agentlightning.store.retention import ended_before

HOURLY: Final = 3600.0
_log: Final = logging.getLogger(__name__)


async def retain(
    store: LightningStore, older_than_seconds: float, *, keep_rewards: bool = False, every_seconds: float = HOURLY
) -> None:
    """Remove the rollouts that ended longer ago than that by the store's clock, each when all of its group did, at once
    and then again and again, until cancelled.

    With `keep_rewards` they stay, without their inputs and with no spans but the rewards. While the store cannot be
    written nothing is removed, and the next round tries again."""
    while True:
        try:
            where = ended_before(await store.perform(calls.GetTime()) - older_than_seconds)
            deleted = await store.perform(
                calls.DeleteRollouts(where=where, keep_rewards=keep_rewards, actor="retention")
            )
        except UnavailableError as error:
            _log.warning("old rollouts could not be removed, trying again in %g s: %s", every_seconds, error)
        else:
            if deleted.rollouts or deleted.rollouts_trimmed:
                _log.info(
                    "removed %d rollouts and trimmed %d to their rewards, with %d spans in all",
                    deleted.rollouts,
                    deleted.rollouts_trimmed,
                    deleted.spans,
                )
        await asyncio.sleep(every_seconds)
