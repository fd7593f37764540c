"""`agl import`: traces that other tools exported, brought into a store."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agentlightning.cli.options import tell
from agentlightning.cli.place import NEW_STORE, SERVER_STORE, Place, with_place
from agentlightning.types import Mode

if TYPE_CHECKING:
    from agentlightning.store.transfer import Record

_AT_ONCE = 16  # rollouts that share a commit


@click.command("import")
@click.argument("files", metavar="FILE…", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--by", metavar="ATTRIBUTE", help="One rollout per value of this, such as session.id; else per trace.")
@click.option("--reward", metavar="NAME", help="The attribute, or the evaluation, whose score is the reward.")
@click.option("--mode", type=click.Choice(["train", "val", "test"]), default="train", show_default=True,
              help="What the rollouts are for.")  # fmt: skip
@with_place(NEW_STORE, lambda: str(SERVER_STORE))
def import_(
    place: Place,
    files: tuple[Path, ...],
    by: str | None,
    reward: str | None,
    mode: Mode,
    as_json: bool,
) -> int:
    """Store traces exported as OTLP JSON as finished rollouts, for fine-tuning, prompt optimisation and analysis.

    FILE holds one ExportTraceServiceRequest, a list of these, or one a line. If a part cannot be read, nothing
    is stored. What is stored already stays as it is."""
    from agentlightning.data.foreign_traces import read_traces, rollouts_of

    spans = [span for file in files for span in read_traces(file)]
    records = rollouts_of(spans, by=by, reward=reward, mode=mode)
    new = asyncio.run(_stored(place, records))
    _report(records, new, reward, as_json)
    return 0


async def _stored(place: Place, records: Sequence[Record]) -> list[Record]:
    """Those that were not there before."""
    new: list[Record] = []
    async with place.open(create=True) as store:
        for first in range(0, len(records), _AT_ONCE):
            batch = records[first : first + _AT_ONCE]
            imports = [store.import_rollout(one.rollout, one.attempts, one.spans) for one in batch]
            new += itertools.compress(batch, await asyncio.gather(*imports))
    return new


def _report(records: Sequence[Record], new: Sequence[Record], reward: str | None, as_json: bool) -> None:
    from agentlightning.tracing.rewards import find_final_reward

    count = sum(len(record.spans) for record in new)
    stored_already = len(records) - len(new)
    told = [f"stored {_number(len(new), 'rollout')} with {_number(count, 'span')}" if new else "stored nothing"]
    if stored_already:
        told.append(f"{stored_already} stored already, left as they are")
    if reward is not None and (without := sum(find_final_reward(record.spans) is None for record in new)):
        told.append(f"{without} without a number as {reward!r}, so without a reward")
    what = {"rollouts": len(new), "spans": count, "stored_already": stored_already}
    tell(as_json, what, "; ".join(told))


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
