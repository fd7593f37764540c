"""Why rollouts failed: their reasons, grouped into causes."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from agentlightning.store.base import LightningStore
from agentlightning.types import And, Condition, Filter, Order

_MOST: Final = 500  # of the latest failures that are read
_SHOWN: Final = 20  # rollouts of a cause that are named
_PARTICULAR: Final = re.compile(r"0x[0-9a-f]+|[\w-]*\d[\w.-]*|'[^']*'|\"[^\"]*\"")


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """A cause of failures: one `reason` of its `count` rollouts, of which the latest are named."""

    reason: str
    count: int
    rollout_ids: list[str]


def failed(run_id: str) -> Filter:
    return And([Condition("run_id", "eq", run_id), Condition("status", "eq", "failed")])


async def causes(store: LightningStore, run_id: str) -> list[Cause]:
    """The causes of the latest failures of a run, the most frequent first. Reasons that differ in numbers, ids and
    quoted words alone are one cause."""
    newest = Order(field="start_time", descending=True)
    rollouts = (await store.page_rollouts(failed(run_id), [newest], limit=_MOST)).items
    names = [rollout.rollout_id for rollout in rollouts]
    reasons = {one.rollout_id: one.error or "failed" for one in await store.query_outcomes(names)}
    found: dict[str, list[tuple[str, str]]] = {}
    for name in names:
        reason = reasons.get(name, "failed").partition("\n")[0][:500]
        found.setdefault(_PARTICULAR.sub("…", reason), []).append((reason, name))
    alike = [
        Cause(reason=members[0][0], count=len(members), rollout_ids=[rollout_id for _, rollout_id in members[:_SHOWN]])
        for members in found.values()
    ]
    return sorted(alike, key=lambda cause: -cause.count)
