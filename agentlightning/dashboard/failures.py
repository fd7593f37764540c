"""Why rollouts failed: their reasons, grouped into causes."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from agentlightning.store.base import LightningStore
from agentlightning.types import And, Condition, Filter, Order

_MOST: Final = 500  # latest failures to read
_SHOWN: Final = 20  # rollouts shown per cause
_PARTICULAR: Final = re.compile(r"0x[0-9a-f]+|[\w-]*\d[\w.-]*|'[^']*'|\"[^\"]*\"")


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """A cause of failures: a typical `reason`, the `count` of rollouts, and the latest of them."""

    reason: str
    count: int
    rollout_ids: list[str]


def failed(run_id: str) -> Filter:
    return And([Condition("run_id", "eq", run_id), Condition("status", "eq", "failed")])


async def causes(store: LightningStore, run_id: str) -> list[Cause]:
    """The causes of a run's latest failures, the most frequent first. Reasons that differ only in numbers, ids and
    quoted words have one cause."""
    newest = Order(field="start_time", descending=True)
    rollouts = (await store.page_rollouts(failed(run_id), [newest], limit=_MOST)).items
    names = [rollout.rollout_id for rollout in rollouts]
    reasons = {outcome.rollout_id: outcome.error or "failed" for outcome in await store.query_outcomes(names)}
    found: dict[str, list[tuple[str, str]]] = {}
    for name in names:
        reason = reasons.get(name, "failed").partition("\n")[0][:500]
        found.setdefault(_PARTICULAR.sub("…", reason), []).append((reason, name))
    alike = [
        Cause(reason=members[0][0], count=len(members), rollout_ids=[rollout_id for _, rollout_id in members[:_SHOWN]])
        for members in found.values()
    ]
    return sorted(alike, key=lambda cause: -cause.count)
