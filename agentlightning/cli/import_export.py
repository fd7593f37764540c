"""`agl import` and `agl export`: traces and rollouts into a store, rollouts and datasets out of it.

`agentlightning.datasets` writes the lines of datasets, `agentlightning.store.transfer` files of
rollouts."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import tempfile
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from agentlightning.cli.options import MODE, note, print_json, print_result, quiet
from agentlightning.cli.store_location import (
    ANY_RUN,
    NEW,
    StoreLocation,
    newest_store,
    with_location,
)
from agentlightning.cli.stored_runs import StoredRun, choose_run
from agentlightning.datasets.hub import is_hub_name, push, read_hub_name
from agentlightning.errors import ConfigError
from agentlightning.types import Filter, Mode

if TYPE_CHECKING:
    from agentlightning.data.recordings import Recorded, Training
    from agentlightning.datasets.export import Lines, Wanted
    from agentlightning.store.base import LightningStore
    from agentlightning.store.transfer import Record

_AT_ONCE: Final = 16  # rollouts that share a commit
_UNITS: Final = {"parquet": "rows", "sft": "conversations", "dpo": "pairs"}


# --- import ---------------------------------------------------------------------------------------


@click.command("import")
@click.argument("files", metavar="FILE…", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--by",
    metavar="ATTRIBUTE",
    help="One rollout per value, such as session.id; default: per trace.",
)
@click.option("--reward", metavar="NAME", help="The attribute or evaluation that holds the reward.")
@click.option("--mode", type=MODE, default="train", help="Mode of the rollouts.")
@with_location(NEW)
async def import_(
    place: StoreLocation,
    files: tuple[Path, ...],
    by: str | None,
    reward: str | None,
    mode: Mode,
    as_json: bool,
) -> None:
    """Import traces or exported rollouts into a store.

    FILEs are traces of other tools, or what `agl export --format rollouts` wrote; they become
    finished rollouts.

    A FILE of traces is OTLP JSON: one ExportTraceServiceRequest, a list of them, or one per line;
    or a table of spans: CSV, Parquet or JSON, one span per row. If part of it cannot be read,
    nothing is stored. Rollouts that are stored already are left unchanged."""
    from agentlightning.datasets.foreign_traces import read_traces, rollouts_of
    from agentlightning.store.transfer import import_rollouts

    exported = [file for file in files if _is_export(file)]
    spans = [span for file in files if file not in exported for span in read_traces(file)]
    records = (
        rollouts_of(spans, by=by, reward=reward, mode=mode) if len(exported) < len(files) else []
    )
    async with place.open(create=True) as store:
        for file in exported:
            done = await import_rollouts(store, file)
            left = f"; {done.stored_already} were stored already" if done.stored_already else ""
            print_result(as_json, done, f"stored {done.rollouts} rollouts{left}")
        if len(exported) < len(files):
            await _import_traces(store, records, reward, as_json)


def _is_export(file: Path) -> bool:
    """Whether the file begins like one of `agl export --format rollouts`."""
    with (
        contextlib.suppress(OSError),
        (gzip.open if file.suffix == ".gz" else open)(file, "rb") as opened,
    ):
        return opened.read(11) == b'{"rollout":'
    return file.suffix == ".gz"


async def _import_traces(
    store: LightningStore, records: Sequence[Record], reward: str | None, as_json: bool
) -> None:
    from agentlightning.datasets.foreign_traces import without_messages
    from agentlightning.tracing.rewards import find_final_reward

    new: list[Record] = []
    for first in range(0, len(records), _AT_ONCE):
        batch = records[first : first + _AT_ONCE]
        imports = [
            store.import_rollout(record.rollout, record.attempts, record.spans) for record in batch
        ]
        new += itertools.compress(batch, await asyncio.gather(*imports))
    spans = sum(len(record.spans) for record in new)
    stored_already = len(records) - len(new)
    words = [f"stored {len(new)} rollouts with {spans} spans"]
    if stored_already:
        words.append(f"{stored_already} stored already, left as they are")
    if reward is not None and (
        without := sum(find_final_reward(record.spans) is None for record in new)
    ):
        words.append(f"{without} without a number as {reward!r}, so without a reward")
    print_result(
        as_json,
        {"rollouts": len(new), "spans": spans, "stored_already": stored_already},
        "; ".join(words),
    )
    if warning := without_messages(records):
        click.echo(f"warning: {warning}", err=True)


# --- export ---------------------------------------------------------------------------------------


@click.command()
@click.argument("file", metavar="FILE")
@click.option(
    "--format",
    "kind",
    type=click.Choice([*_UNITS, "rollouts", "model"]),
    help=(
        "parquet: transitions; sft: conversations to imitate; dpo: pairs to prefer; "
        "rollouts: all there is, as .jsonl or .jsonl.gz for `agl import`; model: the "
        "best weights of --run. Default: parquet for FILE.parquet, model for "
        "hf:ORG/NAME."
    ),
)
@click.option(
    "--run",
    "run_name",
    metavar="RUN",
    help="Only of this run: an id, or its directory, found below runs/.",
)
@click.option(
    "--mode",
    "modes",
    multiple=True,
    type=MODE,
    help="Only of this mode. Repeatable; default: all, for sft and dpo all but val.",
)
@click.option(
    "--status",
    "statuses",
    multiple=True,
    type=click.Choice(["succeeded", "failed", "cancelled"]),
    help="Only of this status. Repeatable; default: all, for sft and dpo succeeded.",
)
@click.option(
    "--model", "models", multiple=True, metavar="NAME", help="Only calls of this model. Repeatable."
)
@click.option("--agents", metavar="PATTERN", help="Only calls of these agents: 'writer|rewriter'.")
@click.option(
    "--label",
    "labels",
    multiple=True,
    metavar="LABEL",
    help="Only rollouts that `agl rollouts annotate` gave this label. Repeatable.",
)
@click.option(
    "--min-reward", type=float, metavar="X", help="Only rollouts with at least this reward."
)
@click.option("--best-of-group", is_flag=True, help="sft: only the best rollout of each group.")
@click.option("--force", is_flag=True, help="Overwrite FILE.")
@with_location(ANY_RUN)
async def export(
    place: StoreLocation,
    file: str,
    kind: str | None,
    run_name: str | None,
    modes: tuple[str, ...],
    statuses: tuple[str, ...],
    force: bool,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Export rollouts as a dataset, or a run's model.

    Finished rollouts are written to FILE.

    FILE may be on the Hugging Face hub: hf:ORG/NAME/FILE.jsonl, or, for --format model,
    hf:ORG/NAME."""
    from agentlightning.data.recordings import ENDED, LEARNED_FROM, finished_rollouts

    kind = kind or _kind_of(file)
    wanted = _selection(kind, **chosen)
    run = None if run_name is None else await choose_run(run_name, place)
    if kind == "model":
        _push_model(run, file, as_json)
        return
    everything = kind not in ("sft", "dpo")
    where = finished_rollouts(
        run and run.run.run_id,
        modes or (("train", "val", "test") if everything else LEARNED_FROM),
        statuses or (ENDED if everything else ("succeeded",)),
    )
    if run is not None:
        place = run.place
    elif not place.named:
        place = StoreLocation(newest_store())
    with _destination(file) as path:
        async with place.open(reading=True) as store:
            if kind == "rollouts":
                from agentlightning.store.transfer import export_rollouts

                copied = await export_rollouts(store, path, where=where, overwrite=force)
            else:
                done = await _export(store, where, wanted, kind, path, force, str(place))
                _print_export(kind, done, file, as_json)
                return
    print_result(
        as_json,
        copied,
        f"wrote {copied.rollouts} rollouts, {copied.attempts} attempts, {copied.spans} spans",
    )


def _kind_of(file: str) -> str:
    """The format that the name of a file says. UsageError if it could be several."""
    if file.endswith(".parquet"):
        return "parquet"
    if is_hub_name(file) and read_hub_name(file).file is None:
        return "model"
    raise click.UsageError(f"{file} may hold sft, dpo or rollouts: choose with --format")


def _selection(
    kind: str, models: tuple[str, ...], labels: tuple[str, ...], **others: Any
) -> Wanted:
    """The selection to export. UsageError for what this format has not, ConfigError for a wrong
    pattern of agents."""
    from agentlightning.data.agents import agent_pattern
    from agentlightning.datasets.export import Wanted

    for given, flag, kinds in (
        (others["best_of_group"], "--best-of-group", ("sft",)),
        (labels, "--label", tuple(_UNITS)),
    ):
        if given and kind not in kinds:
            raise click.UsageError(f"{flag} goes with --format {' or '.join(kinds)}")
    if others["agents"] is not None:
        agent_pattern(others["agents"])
    return Wanted(frozenset(models) or None, labels=frozenset(labels) or None, **others)


@contextlib.contextmanager
def _destination(file: str) -> Generator[Path]:
    """The file to write to, or a file that goes to the hub when it is complete."""
    if not is_hub_name(file):
        yield Path(file)
        return
    name = read_hub_name(file).file or ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / (Path(name).name or "file")
        yield path
        note(f"pushed to {push(path, file)}")


def _push_model(run: StoredRun | None, target: str, as_json: bool) -> None:
    """Push a run's best weights, or its last, to the hub."""
    from agentlightning.algorithm.rl.job import Checkpoints

    if run is None or not is_hub_name(target):
        raise click.UsageError(
            "--format model pushes the best weights of --run; FILE is hf:ORG/NAME"
        )
    checkpoints = Checkpoints(Path(str(run.place.address)).parent / "checkpoints")
    weights = checkpoints.best() or checkpoints.latest()
    if weights is None:
        raise ConfigError(
            f"the run {run.run.run_id} has no checkpoint beside its store, {run.place}"
        )
    address = push(weights, target)
    print_result(
        as_json, {"checkpoint": str(weights), "address": address}, f"pushed {weights} to {address}"
    )


@dataclass
class _Exported:
    """Counts of rollouts read, of lines or rows written, and of what was left out, by reason."""

    rollouts: int = 0
    written: int = 0
    left_out: Counter[str] = field(default_factory=Counter[str])
    notes: list[str] = field(default_factory=list[str])


async def _export(
    store: LightningStore,
    where: Filter,
    wanted: Wanted,
    kind: str,
    path: Path,
    force: bool,
    place: str,
) -> _Exported:
    """Write the file. Without lines there is no file, and a ConfigError."""
    from agentlightning.data.recordings import recorded_groups
    from agentlightning.datasets import export
    from agentlightning.datasets.parquet import TransitionFile
    from agentlightning.display import counting_rollouts
    from agentlightning.store.transfer import writing

    rows_of = _Rows(store, wanted)
    lines_of = {"sft": export.sft_lines, "dpo": export.dpo_lines}
    done = _Exported()
    total = (await store.page_rollouts(where, limit=0, with_total=True)).total
    with writing(path, force) as file:
        rows = TransitionFile(file) if kind == "parquet" else None
        with (
            contextlib.closing(rows) if rows else contextlib.nullcontext(),
            counting_rollouts(total, hidden=quiet()) as advance,
        ):
            async for group in recorded_groups(store, where):
                found = lines_of[kind](group, wanted) if kind in lines_of else await rows_of(group)
                if rows is not None:
                    rows.write(found.lines)
                else:
                    file.write(msgspec.json.Encoder().encode_lines(found.lines))
                done.written += len(found.lines)
                done.left_out += found.left_out
                done.rollouts += len(group)
                advance(done.rollouts)
        if not done.written:
            raise ConfigError(_nothing_written(kind, done, place))
        if rows is not None:
            done.notes = rows_of.notes(rows.filled)
    return done


class _Rows:
    """Rows of transitions, with what each run made of its groups' rewards."""

    _EMPTY: Final = {
        "call_reward": "no call was given an intermediate reward",
        "excluded": "every call trains",
        "step": "no rollout is of a training run",
    }

    def __init__(self, store: LightningStore, wanted: Wanted) -> None:
        self._store = store
        self._selection = wanted
        self._trainings: dict[str, Training] | None = None
        self._problems: dict[str, None] = {}

    async def __call__(self, group: Sequence[Recorded]) -> Lines:
        from agentlightning.data.recordings import training_of, whole_group
        from agentlightning.datasets.parquet import NO_CREDIT, group_credit, transition_lines

        if self._trainings is None:
            self._trainings = {
                run.run_id: training_of(run) for run in await self._store.query_runs()
            }
        first = group[0].rollout
        training = self._trainings.get(first.run_id or "")
        credit = NO_CREDIT
        if first.group_id is not None and training is not None and training.name is not None:
            whole = await whole_group(self._store, first.group_id)
            if whole is not None and len(whole.rollout_ids) == len(group):
                credit = group_credit(group, training)
            else:
                self._problems["not all rollouts of a group are in the file"] = None
            if credit.problem is not None:
                self._problems[credit.problem] = None
        return transition_lines(group, self._selection, credit)

    def notes(self, filled: set[str]) -> list[str]:
        """Why columns are empty, or cells of `advantages`."""
        found = [
            f"{name} is empty: {why}" for name, why in self._EMPTY.items() if name not in filled
        ]
        return [
            *found,
            *(f"advantages are missing: {problem}" for problem in list(self._problems)[:2]),
        ]


def _print_export(kind: str, done: _Exported, out: str, as_json: bool) -> None:
    from agentlightning.datasets.export import FEWEST_LINES

    if as_json:
        report = {"file": out, _UNITS[kind]: done.written, "rollouts": done.rollouts}
        print_json(report | {"left_out": dict(done.left_out)})
        return
    print(f"wrote {done.written:,} {_UNITS[kind]} of {done.rollouts:,} rollouts to {out}")
    for reason, count in done.left_out.most_common():
        print(f"left out: {count:,} {reason}")
    for remark in done.notes:
        print(f"note: {remark}")
    if kind in ("sft", "dpo") and done.written < FEWEST_LINES:
        print(f"OpenAI and Azure take no file of fewer than {FEWEST_LINES} lines")


def _nothing_written(kind: str, done: _Exported, place: str) -> str:
    from agentlightning.data.call_filter import FROZEN

    if not done.rollouts:
        val = (
            ""
            if kind == "parquet"
            else ". Held-out rollouts and calls of no attempt are exported with --mode val"
        )
        return f"no rollout in {place} matches; `agl rollouts ls` shows what there is{val}"
    reasons = "; ".join(f"{count:,} {reason}" for reason, count in done.left_out.most_common())
    hint = (
        ". Name a model with --model to learn from it although it is not trained"
        if done.left_out[f"calls ({FROZEN})"]
        else ""
    )
    return (
        f"nothing was written: {done.rollouts:,} rollouts give no {_UNITS[kind]}. Left out: "
        f"{reasons}{hint}"
    )
