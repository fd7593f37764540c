"""The finished rollouts of a store, group by group, each with the spans of its last attempt.

Knows stores and rollouts; what is made of them is for others to say.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Final

from agentlightning.errors import NotFoundError
from agentlightning.store.base import LightningStore
from agentlightning.tracing.rewards import find_final_reward
from agentlightning.types import And, Condition, Filter, Order, Rollout, Span

ENDED: Final = ("succeeded", "failed", "cancelled")
LEARNED_FROM: Final = ("train", "test")  # all but those that training is measured by
_AT_ONCE: Final = 200  # rollouts held in memory, without their spans


@dataclass(frozen=True)
class Recorded:
    """A finished rollout and the spans of its last attempt."""

    rollout: Rollout
    spans: Sequence[Span]

    @property
    def reward(self) -> float | None:
        """R as the agent gave it, None where it gave none or did not succeed."""
        reward = find_final_reward(self.spans) if self.rollout.status == "succeeded" else None
        return reward if reward is not None and math.isfinite(reward) else None


def finished_rollouts(
    run_id: str | None = None, modes: Sequence[str] = LEARNED_FROM, statuses: Sequence[str] = ENDED
) -> Filter:
    """Those of a run (None: of all) in these modes that ended so."""
    conditions = [Condition("status", "in", list(statuses)), Condition("mode", "in", list(modes))]
    return And(conditions if run_id is None else [*conditions, Condition("run_id", "eq", run_id)])


async def recorded_groups(store: LightningStore, where: Filter) -> AsyncGenerator[list[Recorded]]:
    """The rollouts of each group together, then those without one, each alone."""
    group: list[Recorded] = []
    cursor = None
    while True:
        order = [Order(field="group_id"), Order(field="group_index")]
        page = await store.page_rollouts(where, order, limit=_AT_ONCE, cursor=cursor)
        for rollout in page.items:
            if group and (rollout.group_id is None or rollout.group_id != group[0].rollout.group_id):
                yield group
                group = []
            with contextlib.suppress(NotFoundError):  # removed meanwhile
                group.append(Recorded(rollout, await store.query_spans(rollout.rollout_id, "latest")))
        cursor = page.next_cursor
        if cursor is None:
            break
    if group:
        yield group
