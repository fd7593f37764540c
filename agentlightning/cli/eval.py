"""`agl eval`: measures an agent with confidence intervals, compares two runs, and with `--show`
prints what it does.

It runs the agent on held-out tasks (`Baseline`), or reads stored rollouts.
`agentlightning.algorithm.measures` computes the figures."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec
from rich.console import Console

from agentlightning.cli.evaluating import (
    evaluation_config,
    evaluation_options,
    read_forked,
)
from agentlightning.cli.fit import fit
from agentlightning.cli.options import (
    COUNT,
    MODE,
    make_table,
    numbers,
    print_json,
    print_table,
    quiet,
)
from agentlightning.cli.run_file import check_files
from agentlightning.cli.store_location import StoreLocation
from agentlightning.cli.training import INTERRUPTED, RUN_FILE
from agentlightning.config import RunConfig
from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.tracing.tree import own_answer, printable
from agentlightning.types import ForkSource, Mode, Rollout

if TYPE_CHECKING:
    from agentlightning.algorithm.measures import (
        Comparison,
        Difference,
        Estimate,
        Measured,
        Measures,
        Summary,
    )
    from agentlightning.store.base import LightningStore

_STORED: Final = {"rollouts", "compare"}  # only of stored ones
_OF_TASKS: Final = {"dataset", "mode", "limit"}
_READING: Final = _STORED | {
    "mode",
    "ks",
    "threshold",
    "by",
    "as_json",
    "store",
    "server",
    "api_key",
}
_SHOWN: Final = 5  # tasks, if nobody says how many
_ALL: Final = "all tasks"


@click.command("eval")
@click.argument("agent", metavar="[FILE.py:NAME|RUN.yaml]", required=False)
@click.argument("dataset", metavar="[DATA]", required=False)
@evaluation_options
@click.option("--show", is_flag=True, help="Print what the agent did on each task, call by call.")
@click.option(
    "--limit", type=COUNT, metavar="N", help="Only the first N tasks; default with --show: 5."
)
@click.option("--samples", type=COUNT, default=1, help="Number of attempts per task.")
@click.option(
    "--rollouts",
    multiple=True,
    metavar="RUN[@N]",
    help="Measure the stored rollouts of a run. Repeatable.",
)
@click.option("--mode", type=MODE, help="Mode of the rollouts; default: test, or what is stored.")
@click.option(
    "--from-fork", "fork", metavar="ID@CALL", help="Measure tries again from a recorded call."
)
@click.option("--compare", nargs=2, metavar="A B", help="Compare two stored runs, RUN or RUN@N.")
@click.option(
    "-k",
    "ks",
    type=numbers,
    metavar="1,4,8",
    help="Values of k for pass@k; default: 1 and --samples.",
)
@click.option("--threshold", type=float, default=1.0, help="Reward at which an attempt passes.")
@click.option(
    "--by",
    multiple=True,
    metavar="FIELD",
    help="Results by a field of tasks; default: tags and kind.",
)
@click.pass_context
def eval(
    ctx: click.Context,
    agent: str | None,
    rollouts: tuple[str, ...],
    mode: Mode | None,
    compare: tuple[str, str] | None,
    ks: tuple[int, ...] | None,
    threshold: float,
    by: tuple[str, ...],
    show: bool,
    as_json: bool,
    fork: str | None,
    samples: int,
    **running: Any,
) -> int:
    """Measure an agent on held-out tasks.

    The tasks come from DATA or RUN.yaml. The result is the mean reward and pass@k with confidence
    intervals, overall and by tag.

    Without an agent, nothing is run: the rollouts that runs have stored are measured, or two runs
    compared.

    \b
    agl eval --show                                  # run.yaml of this folder, the first 5 tasks
    agl eval agent.py:agent heldout.jsonl --model Qwen/Qwen3-0.6B
    agl eval agent.py:agent heldout.jsonl --model runs/…/checkpoints/… --samples 8 -k 1,4,8
    agl eval --rollouts runs/grpo-…
    agl eval --from-fork ID@3 --samples 16 -k 1,8,16 # from call 3 of a rollout on
    agl eval --compare runs/grpo-…@0 runs/grpo-…@40"""
    from agentlightning.algorithm.base import Stopped
    from agentlightning.algorithm.measures import TAG_FIELDS, Measures
    from agentlightning.display import terminal

    measures = Measures(ks and tuple(sorted({*ks})), threshold)
    console = terminal(stderr=as_json, highlight=False)
    fields = by or TAG_FIELDS
    if show and agent is None and RUN_FILE.is_file():
        agent = str(RUN_FILE)
    _check(ctx, agent, rollouts, compare, fork)
    if ks is not None and (agent or fork) and (most := max(ks)) > samples:
        raise click.UsageError(f"pass@{most} needs {most} attempts at each task: --samples {most}")
    if agent is None and fork is None:
        place = StoreLocation(running["store"], running["server"], running["api_key"])
        sides = [(name,) for name in compare] if compare else [rollouts]
        groups = [
            [each for name in side for each in asyncio.run(_stored(name, mode, place, fields))]
            for side in sides
        ]
        names = [", ".join(side) for side in sides]
    else:
        names = [fork or agent or ""]
        limit = running.pop("limit") or (_SHOWN if show else None)
        try:
            # what the agent prints
            with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
                if fork is not None:
                    config = _of_fork(fork, agent, samples, running)
                else:
                    measured = {"mode": mode or "test", "samples": samples}
                    config = evaluation_config(agent or "", running, measured)
                groups = [_run(config, console, fields, show, limit)]
        except Stopped as stopped:
            console.print(
                f"{stopped}; finished attempts are kept, --resume continues", markup=False
            )
            return INTERRUPTED
    return _print_result(console, names, groups, measures, as_json=as_json)


def _check(
    ctx: click.Context,
    agent: str | None,
    rollouts: tuple[str, ...],
    compare: tuple[str, str] | None,
    fork: str | None,
) -> None:
    """UsageError for options that have no effect here."""
    if agent is None and bool(rollouts) + bool(compare) + bool(fork) != 1:
        raise click.UsageError(
            "choose what to measure: an agent and its DATA, stored --rollouts, --compare A B, or "
            "--from-fork ID@CALL"
        )
    given = {
        name
        for name in ctx.params
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    }
    if fork is not None:
        idle = given & (_STORED | _OF_TASKS)
    else:
        idle = given - _READING if agent is None else given & _STORED
    if idle:
        flags = {parameter.name: parameter.opts[0] for parameter in ctx.command.params}
        purpose = "reads what is stored, and an agent is named"
        if fork is not None:
            purpose = "measures tasks or reads what is stored, and a fork is named"
        elif agent is None:
            purpose = "runs an agent, and none is named"
        raise click.UsageError(f"{flags[min(idle)]} is for what {purpose}")


# --- running --------------------------------------------------------------------------------------


def _of_fork(fork: str, agent: str | None, samples: int, running: dict[str, Any]) -> RunConfig:
    """The run that forks the rollout at the call that `fork`, ID@CALL, names."""
    rollout_id, _, call = fork.rpartition("@")
    if not rollout_id or not call.isdecimal():
        raise click.UsageError(f"--from-fork {fork!r} is no call of a rollout; write ID@CALL")
    place = StoreLocation(running["store"], running["server"], running["api_key"])
    source = ForkSource(rollout_id=rollout_id, at=int(call))
    found = asyncio.run(read_forked(place, rollout_id, source.at))
    return found.config(agent, running, [source], samples)


def _run(
    config: RunConfig, console: Console, fields: Sequence[str], show: bool, limit: int | None
) -> list[Measured]:
    """The rollouts of one evaluation."""
    from agentlightning.algorithm.measures import measured
    from agentlightning.display import near, show_tasks

    check_files(config)
    result = fit(config, console, limit)
    tasks = result.evaluations[0].tasks
    came = [task for task in tasks if not task.rollout.source or own_answer(task.spans) is not None]
    if len(came) < len(tasks):
        refused = len(tasks) - len(came)
        console.print(f"{refused} forks asked something else than the record, and are left out")
    if show:
        show_tasks(console, tasks)
    console.print(f"Run: {near(result.directory)}", markup=False, soft_wrap=True)
    return [measured(task.traced, fields) for task in came]


# --- reading what is stored -----------------------------------------------------------------------


async def _stored(
    name: str, mode: Mode | None, place: StoreLocation, fields: Sequence[str]
) -> list[Measured]:
    """The rollouts of `RUN`, or with `RUN@N` of its evaluation after step N, or with version N of
    its resources."""
    from agentlightning.algorithm.measures import measured
    from agentlightning.cli.stored_runs import choose_run
    from agentlightning.data.transitions import trace_rollout
    from agentlightning.display import counting_rollouts

    run_name, _, wanted = name.partition("@")
    run = await choose_run(run_name, place)
    async with run.place.open(reading=True) as store:
        rollouts = await store.query_rollouts(
            run_id=run.run.run_id, mode_in=[mode] if mode else ["val", "test"]
        )
        if not rollouts:
            which = (
                f"rollouts of mode {mode}"
                if mode
                else "held-out rollouts; --mode train takes those of training"
            )
            raise ConfigError(f"{run_name} has no {which}")
        parts = await _parts(store, rollouts)
        chosen = parts.get(wanted) or [
            rollout for rollout in rollouts if wanted and rollout.resources_id == wanted
        ]
        if not chosen and not wanted:
            chosen = _last_step(run_name, parts)
        if not chosen:
            raise NotFoundError(f"{run_name} has measured no {wanted!r}; it has {', '.join(parts)}")
        found: list[Measured] = []
        with counting_rollouts(len(chosen), hidden=quiet()) as advance:
            for rollout in chosen:
                spans = await store.query_spans(rollout.rollout_id, "latest")
                found.append(measured(trace_rollout(rollout, spans), fields))
                advance(len(found))
    return found


async def _parts(store: LightningStore, rollouts: Sequence[Rollout]) -> dict[str, list[Rollout]]:
    """Rollouts by the training step they came after, or else by the number of their resources
    version."""
    from agentlightning.algorithm.measures import EVALUATED_STEP

    versions = {
        resource.resources_id: str(resource.version) for resource in await store.query_resources()
    }
    parts: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        version = versions.get(rollout.resources_id or "", "")
        parts.setdefault(str(rollout.metadata.get(EVALUATED_STEP, version)), []).append(rollout)
    return parts


def _last_step(run_name: str, parts: Mapping[str, list[Rollout]]) -> list[Rollout]:
    """The rollouts after the last step. ConfigError if there are several versions and none is the
    last."""
    from agentlightning.algorithm.measures import EVALUATED_STEP

    latest = max(parts.values(), key=lambda part: part[0].metadata.get(EVALUATED_STEP, -1))
    if len(parts) > 1 and EVALUATED_STEP not in latest[0].metadata:
        known = ", ".join(parts)
        raise ConfigError(
            f"{run_name} has measured versions {known}; choose one: {run_name}@{next(iter(parts))}"
        )
    return latest


# --- telling --------------------------------------------------------------------------------------


def _print_result(
    console: Console,
    names: Sequence[str],
    groups: Sequence[list[Measured]],
    measures: Measures,
    *,
    as_json: bool,
) -> int:
    """Print the result. The exit code: 1 if no rollout was rewarded."""
    from agentlightning.algorithm.measures import compare, summarise

    result: Summary | Comparison
    if len(groups) == 2:
        result = compare(groups[0], groups[1], measures)
        _show_comparison(console, names, result, measures.confidence)
        summaries = [result.first, result.second]
    else:
        result = summarise(groups[0], measures)
        _show_summary(console, result, measures.confidence)
        summaries = [result]
    if as_json:
        asked = {"names": names, "threshold": measures.threshold, "confidence": measures.confidence}
        print_json(asked | msgspec.to_builtins(result))
    return 0 if all(summary.ended.get("rewarded") for summary in summaries) else 1


def _show_summary(console: Console, summary: Summary, confidence: float) -> None:
    """Print how the rollouts ended, then a row per measure, for all tasks and for each tag."""
    _show_rollouts(console, "", summary)
    rows: list[tuple[object, ...]] = []
    for tag, estimates in [(_ALL, summary.estimates), *summary.tags.items()]:
        for name, estimate in estimates.items():
            rows.append(
                (tag, name, str(estimate.tasks), f"{estimate.value:.3f}", _interval(estimate))
            )
            tag = ""
    print_table(make_table(("", "", "tasks", "value", f"{confidence:.0%} interval"), rows), console)
    if summary.tasks == 1:
        console.print("A single task gives no confidence interval.")


def _show_comparison(
    console: Console, sides: Sequence[str], comparison: Comparison, confidence: float
) -> None:
    """The rows of two, with their difference."""
    for letter, name, summary in zip(
        "AB", sides, (comparison.first, comparison.second), strict=True
    ):
        console.print(f"{letter}: {printable(name)}", markup=False, soft_wrap=True)
        _show_rollouts(console, "   ", summary)
    if comparison.unpaired:
        console.print(f"Tasks that only one of them has, skipped: {comparison.unpaired}")
    first = comparison.first
    second = comparison.second
    rows = {_ALL: (first.estimates, second.estimates, comparison.differences)} | {
        tag: (first.tags[tag], second.tags.get(tag, {}), differences)
        for tag, differences in comparison.tags.items()
    }
    lines: list[tuple[object, ...]] = []
    for tag, (ours, theirs, differences) in rows.items():
        for name, difference in differences.items():
            values = [f"{side[name].value:.3f}" if name in side else "" for side in (ours, theirs)]
            p = "<0.001" if difference.p < 0.001 else f"{difference.p:.3f}"
            values += [f"{difference.value:+.3f}", _interval(difference, "+"), p]
            lines.append((tag, name, str(difference.tasks), *values))
            tag = ""
    names = ("", "", "tasks", "A", "B", "B − A", f"{confidence:.0%} interval", "p")
    print_table(make_table(names, lines), console)


def _show_rollouts(console: Console, indent: str, summary: Summary) -> None:
    console.print(f"{indent}{summary}", markup=False, soft_wrap=True)
    if summary.problem:
        console.print(
            f"{indent}first failure: {printable(summary.problem)}", markup=False, soft_wrap=True
        )


def _interval(estimate: Estimate | Difference, sign: str = "") -> str:
    return (
        ""
        if estimate.interval is None
        else " … ".join(f"{bound:{sign}.3f}" for bound in estimate.interval)
    )
