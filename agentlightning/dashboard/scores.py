"""What a person does with rollouts: give one a score, which becomes its reward, or a comment; take a selection home.

A score is a reward span of the last attempt like any other, marked as the last word and with who gave it.
"""

from __future__ import annotations

import csv
import io
import time
from collections.abc import AsyncGenerator
from typing import Any, Literal

import msgspec

from agentlightning.dashboard.rollouts import COMMENT, SCORED_BY, rows_of
from agentlightning.data.export import Wanted, dpo_lines, sft_lines
from agentlightning.data.recorded import recorded_groups
from agentlightning.errors import ConflictError, InvalidError
from agentlightning.semconv import ANNOTATION, REWARD_RETURNED
from agentlightning.store.base import LightningStore
from agentlightning.store.codec import plain
from agentlightning.tracing.context import AttemptTracer
from agentlightning.tracing.rewards import reward_attributes
from agentlightning.types import And, Attributes, Condition, Filter, Rollout

_COLUMNS = (
    "rollout_id", "run_id", "group_id", "group_index", "mode", "status", "reward", "error", "calls", "tokens_read",
    "tokens_written", "agents", "start_time", "end_time", "tags", "input",
)  # fmt: skip


class Score(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Without a `reward` it is only a `comment`. `name` is what the reward is called."""

    reward: float | None = None
    comment: str | None = None
    name: str = "human"


async def give(store: LightningStore, rollout: Rollout, score: Score, by: str) -> None:
    """InvalidError for neither a reward nor a comment; ConflictError for a rollout that was never tried."""
    if score.reward is None and not score.comment:
        raise InvalidError("give a reward, a comment, or both")
    attempt = await store.get_latest_attempt(rollout.rollout_id)
    if attempt is None:
        raise ConflictError(f"rollout {rollout.rollout_id} has no attempt yet that could be scored")
    attributes: Attributes = {SCORED_BY: by}
    if score.reward is not None:
        attributes |= reward_attributes({score.name: score.reward}) | {REWARD_RETURNED: True}
    if score.comment:
        attributes[COMMENT] = score.comment
    tracer = AttemptTracer(rollout.rollout_id, attempt.attempt_id)
    now = time.time()
    tracer.record(ANNOTATION, attributes, start_time=now, end_time=now)
    await store.add_many_spans(tracer.drain())


# --- selections as files ------------------------------------------------------------------------------------------


class Selection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Finished rollouts, those that match `where` and, if given, have one of the `rollout_ids`."""

    format: Literal["sft", "dpo", "rollouts", "csv"]
    where: Filter | None = None
    rollout_ids: list[str] | None = None

    @property
    def filter(self) -> Filter:
        ended = Condition("status", "in", ["succeeded", "failed", "cancelled"])
        named = [] if self.rollout_ids is None else [Condition("rollout_id", "in", self.rollout_ids)]
        return And([ended, *named, *([] if self.where is None else [self.where])])

    @property
    def file_name(self) -> str:
        return "rollouts.csv" if self.format == "csv" else f"{self.format}.jsonl"


async def export(store: LightningStore, selection: Selection) -> AsyncGenerator[bytes]:
    """The file of a selection, part by part."""
    if selection.format == "csv":
        yield csv_line(_COLUMNS)
    async for group in recorded_groups(store, selection.filter):
        match selection.format:
            case "rollouts":
                lines: list[Any] = [{"rollout": one.rollout, "spans": one.spans} for one in group]
            case "csv":
                rows = await rows_of(store, [one.rollout for one in group])
                yield b"".join(csv_line(_cells(msgspec.to_builtins(row))) for row in rows)
                continue
            case _:
                wanted = Wanted()
                lines = (sft_lines if selection.format == "sft" else dpo_lines)(group, wanted).lines
        yield b"".join(msgspec.json.encode(line, enc_hook=plain) + b"\n" for line in lines)


def _cells(row: dict[str, Any]) -> list[Any]:
    known = row["rollout"] | row
    known |= {"tags": ",".join(map(str, row["rollout"]["metadata"].get("tags", []))), "agents": ",".join(row["agents"])}
    known["input"] = msgspec.json.encode(row["rollout"]["input"]).decode()
    return [known[name] for name in _COLUMNS]


def csv_line(cells: Any) -> bytes:
    text = io.StringIO()
    # A spreadsheet would run a text that begins so as a formula.
    csv.writer(text).writerow(
        [f"'{one}" if isinstance(one, str) and one[:1] in "=+-@\t\r\n" and one else one for one in cells]
    )
    return text.getvalue().encode()
