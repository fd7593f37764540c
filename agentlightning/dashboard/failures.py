"""Why rollouts failed: their reasons, grouped into causes."""

from __future__ import annotations

import asyncio
import re
from typing import Final

import msgspec

from agentlightning.store.base import LightningStore
from agentlightning.types import And, Condition, Filter, Order, Rollout

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
    reasons = await asyncio.gather(*(_reason(store, rollout) for rollout in rollouts))
    found: dict[str, list[tuple[str, str]]] = {}
    for rollout, reason in zip(rollouts, reasons, strict=True):
        found.setdefault(_PARTICULAR.sub("…", reason), []).append((reason, rollout.rollout_id))
    alike = [
        Cause(reason=members[0][0], count=len(members), rollout_ids=[rollout_id for _, rollout_id in members[:_SHOWN]])
        for members in found.values()
    ]
    return sorted(alike, key=lambda cause: -cause.count)


async def _reason(store: LightningStore, rollout: Rollout) -> str:
    attempt = await store.get_latest_attempt(rollout.rollout_id)
    reason = attempt and (attempt.metadata.get("reason") or attempt.status)
    return str(reason or rollout.status).partition("\n")[0][:500]
