"""The reward and the error of a rollout in its row, so that rollouts can be searched by them.

Both are the latest attempt's, from its stored spans and metadata.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from agentlightning.semconv import REWARD_FINAL, REWARD_RETURNED, reward_value
from agentlightning.store import codec
from agentlightning.store.database import FIND, Connection, Transaction
from agentlightning.types import Outcome

_AT_ONCE: Final = 500  # ids in one query
_RETURNED: Final = 1e11
"""Seconds by which a reward that was returned comes after every other reward, as `tracing.rewards` has it."""


def query_outcomes(tx: Transaction, rollout_ids: Sequence[str]) -> list[Outcome]:
    found: list[Outcome] = []
    for start in range(0, len(rollout_ids), _AT_ONCE):
        some = rollout_ids[start : start + _AT_ONCE]
        marks = ", ".join("?" * len(some))
        asked = f"SELECT rollout_id, reward, error FROM rollouts WHERE rollout_id IN ({marks})"
        rows = tx.connection.execute(asked, some).fetchall()
        found += [Outcome(rollout_id=name, reward=reward, error=error) for name, reward, error in rows]
    return found


class FinalReward(NamedTuple):
    """A final reward, and its order among those of its attempt, of which the last one counts."""

    value: float
    order: float


def final_reward(attributes: Mapping[str, Any], start_time: float) -> FinalReward | None:
    """The final reward in a span, if it has one."""
    value = attributes.get(reward_value(0))
    if value is None or isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    if attributes.get(REWARD_FINAL, True) is False:
        return None
    return FinalReward(float(value), start_time + (_RETURNED if attributes.get(REWARD_RETURNED) is True else 0.0))


def note_reward(connection: Connection, rollout_id: str, sequence_id: int, reward: FinalReward | None) -> None:
    """Note a final reward in a span of this attempt."""
    if reward is not None:
        connection.execute(
            "UPDATE rollouts SET reward = ?, reward_order = ? WHERE rollout_id = ? AND attempts = ? "
            "AND (reward_order IS NULL OR reward_order <= ?)",
            (reward.value, reward.order, rollout_id, sequence_id, reward.order),
        )


def note_error(connection: Connection, rollout_id: str, sequence_id: int, error: object) -> None:
    """Note why this attempt ended, if that is a text."""
    if isinstance(error, str):
        connection.execute(
            "UPDATE rollouts SET error = ? WHERE rollout_id = ? AND attempts = ?",
            (codec.text(error), rollout_id, sequence_id),
        )


def recall(connection: Connection, rollout_id: str) -> None:
    """Note reward and error again, from what is stored of the attempt that has become the latest again."""
    row = connection.execute(
        "SELECT a.number, a.sequence_id, a.status, a.metadata FROM attempts a JOIN rollouts r "
        "ON r.rollout_id = a.rollout_id AND r.attempts = a.sequence_id WHERE r.rollout_id = ?",
        (rollout_id,),
    ).fetchone()
    if row is None:
        return
    number, sequence_id, status, metadata = row
    reason = codec.from_json(metadata).get("reason")
    if reason or status in ("timeout", "unresponsive"):
        note_error(connection, rollout_id, sequence_id, reason or status)
    spans = connection.execute(
        "SELECT attributes, start_time FROM spans WHERE attempt = ? "
        f"AND {FIND[connection.dialect]}(attributes, ?) > 0 ORDER BY sequence_id",
        (number, f'"{reward_value(0)}"'),
    ).fetchall()
    for attributes, start_time in spans:
        note_reward(connection, rollout_id, sequence_id, final_reward(codec.from_json(attributes), start_time))
