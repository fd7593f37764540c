"""`agl fork`: runs a recorded rollout again from one of its calls, and with `--diagnose` from each
of them, to see which decided its reward."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final, get_args

import click
import msgspec
from rich.console import Console

from agentlightning.cli.evaluating import Forked, evaluation_options, read_forked
from agentlightning.cli.options import COUNT, make_table, note, number, print_json, print_table
from agentlightning.cli.run_file import check_files
from agentlightning.cli.store_location import StoreLocation
from agentlightning.tracing.tree import answers, one_line, own_answer, printable, refusal_of
from agentlightning.types import ForkSource, Rollout, Varying

if TYPE_CHECKING:
    from agentlightning.algorithm.diagnosis import Decision
    from agentlightning.algorithm.evaluation import EvaluatedTask
    from agentlightning.config import RunConfig

_TEXT: Final = 60  # characters of an answer in a table


@click.command()
@click.argument("rollout_id", metavar="ROLLOUT")
@click.argument("agent", metavar="[FILE.py:NAME|RUN.yaml]", required=False)
@click.option("--at", type=click.IntRange(min=0), metavar="CALL", help="The call to go on from.")
@click.option("--diagnose", is_flag=True, help="Fork at every call, and show which ones mattered.")
@click.option("--samples", type=COUNT, default=8, help="Number of forks at a call.")
@click.option("--answer", metavar="TEXT", help="The answer of this call, instead of sampling one.")
@click.option(
    "--replace",
    multiple=True,
    type=click.Choice(get_args(Varying)),
    help="What may differ from the record, and is sent as recorded. Repeatable.",
)
@click.option(
    "--on-divergence",
    type=click.Choice(["fail", "live"]),
    default="fail",
    help="Refuse a call that the record does not have, or sample it.",
)
@click.option(
    "--tools",
    type=click.Choice(["run", "recorded"]),
    default="run",
    help="Run operations and MCP tools before the call again, or give their recorded results.",
)
@evaluation_options
def fork(
    rollout_id: str,
    agent: str | None,
    at: int | None,
    diagnose: bool,
    samples: int,
    as_json: bool,
    answer: str | None,
    replace: tuple[Varying, ...],
    on_divergence: Any,
    tools: Any,
    **running: Any,
) -> int:
    """Run a rollout again from one of its calls.

    The agent runs from its start. The calls before get the recorded answers, which cost nothing;
    the model answers from call --at on.

    The agent and the model are those of the run in whose folder the store is, unless named. At a
    server, without an agent named here, runners of the server run the forks.

    \b
    agl fork ID --at 3                              # 8 times
    agl fork ID --at 3 --answer "…" --samples 1     # what if it had said that?
    agl fork ID --diagnose                          # which calls mattered"""
    from agentlightning.display import terminal

    if diagnose == (at is not None):
        raise click.UsageError("choose a call: --at CALL, or every call: --diagnose")
    if diagnose and answer is not None:
        raise click.UsageError("--answer is for one call: give --at instead of --diagnose")
    console = terminal(stderr=as_json, highlight=False)
    named = StoreLocation(running["store"], running["server"], running["api_key"])
    found = asyncio.run(read_forked(named, rollout_id, at))
    sources = [
        ForkSource(
            rollout_id=rollout_id,
            at=call.index,
            answer=answer,
            replace=replace,
            on_divergence=on_divergence,
        )
        for call in found.record.calls
        if diagnose or call.index == at
    ]
    # what the agent prints
    with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
        if found.place.server is not None and agent is None and running["model"] is None:
            forks = asyncio.run(_at_server(found, sources, samples, tools))
        else:
            forks = _here(found.config(agent, running, sources, samples, tools), console)
    tell = _tell_decisions if diagnose else _tell_forks
    tell(found, forks, console, as_json)
    rewarded = [each.reward for each in forks if each.reward is not None]
    if not rewarded:
        note(printable(f"no fork was rewarded; the first: {_problem(forks[0])}"))
    return 0 if rewarded else 1


def _here(config: RunConfig, console: Console) -> Sequence[EvaluatedTask]:
    """Run the forks in this process."""
    from agentlightning.cli.fit import fit
    from agentlightning.display import near

    check_files(config)
    result = fit(config, console)
    console.print(f"Run: {near(result.directory)}", markup=False, soft_wrap=True)
    return result.evaluations[0].tasks


async def _at_server(
    found: Forked, sources: Sequence[ForkSource], samples: int, tools: Any
) -> Sequence[EvaluatedTask]:
    """Queue the forks at the server, and wait until its runners have run them."""
    from agentlightning.algorithm.evaluation import EvaluatedTask
    from agentlightning.data.transitions import trace_rollout
    from agentlightning.store.sources import forked

    config = msgspec.structs.replace(found.rollout.config, tools=tools)
    requests = [
        forked(found.rollout, source, number, config=config)
        for source in sources
        for number in range(samples)
    ]
    async with found.place.open() as store:
        queued = await store.enqueue_many_rollouts(requests)
        names = [rollout.rollout_id for rollout in queued]
        note(f"{len(names)} forks wait for the runners of {found.place}; the first is {names[0]}")
        tasks: list[EvaluatedTask] = []
        for rollout in await store.wait_for_rollouts(names):
            spans = await store.query_spans(rollout.rollout_id, "latest")
            tasks.append(EvaluatedTask(trace_rollout(rollout, spans), tuple(spans)))
    return tasks


def _problem(fork: EvaluatedTask) -> str | None:
    """Why a fork failed: if it diverged, in the words of the gateway."""
    return refusal_of(fork.spans) or fork.rollout.error


def _tell_forks(
    found: Forked, forks: Sequence[EvaluatedTask], console: Console, as_json: bool
) -> None:
    """A row for each fork, with what it answered at the call where it left its source."""
    source = found.rollout
    at = _source(forks[0]).at
    rows = [
        {
            "rollout_id": fork.rollout.rollout_id,
            "status": fork.rollout.status,
            "reward": fork.reward,
            "answer": own_answer(fork.spans),
            "error": _problem(fork),
        }
        for fork in forks
    ]
    # without those that were refused before they came to this call
    rewards = [fork.reward or 0.0 for fork in forks if own_answer(fork.spans) is not None]
    mean = fmean(rewards) if rewards else None
    if as_json:
        told = {"rollout_id": source.rollout_id, "at": at, "reward": source.reward, "forks": rows}
        print_json(told | {"mean_reward": mean})
        return
    shown: list[tuple[object, ...]] = []
    for row in rows:
        said = one_line(str(row["answer"] or row["error"] or ""), _TEXT)
        shown.append((row["rollout_id"], row["status"], row["reward"], said))
    print_table(make_table(("fork", "status", "reward", f"call {at}"), shown), console)
    recorded = next(call for call in found.record.calls if call.index == at)
    said = one_line(answers(recorded.span.attributes).plain.strip(), _TEXT)
    console.print(
        f"Mean reward {'none' if mean is None else number(mean)} of {len(rewards)}. The rollout "
        f"earned {_reward(source)} with: "
        f"{printable(said)}",
        markup=False,
        soft_wrap=True,
    )


def _tell_decisions(
    found: Forked, forks: Sequence[EvaluatedTask], console: Console, as_json: bool
) -> None:
    """A row for each call, with what forks at it earned and what its answer brought."""
    from agentlightning.algorithm.diagnosis import decisions

    rewards: dict[int, list[float]] = {call.index: [] for call in found.record.calls}
    lost = 0
    for fork in forks:
        if own_answer(fork.spans) is None:  # it was refused before it came to its call
            lost += 1
        else:
            rewards[_source(fork).at].append(fork.reward or 0.0)
    found_out = decisions(found.record, found.rollout.reward or 0.0, rewards)
    if as_json:
        told = {"rollout_id": found.rollout.rollout_id, "reward": found.rollout.reward}
        print_json(told | {"decisions": found_out, "lost": lost})
        return
    rows = [_row(decision) for decision in found_out]
    names = ("call", "agent", "answer", "tries", "mean", "effect", "95% interval", "")
    print_table(make_table(names, rows), console)
    deciding = [decision for decision in found_out if decision.mattered]
    deciding.sort(key=lambda decision: -abs(decision.effect or 0.0))
    said = ", ".join(f"{each.call} ({each.effect:+.2f})" for each in deciding)
    samples = max(map(len, rewards.values()))
    console.print(
        f"The rollout earned {_reward(found.rollout)}. "
        + (f"Calls that mattered: {said}." if said else "No call can be told to have mattered")
        + ("" if said else f" by {samples} tries each; more --samples narrow the intervals."),
        soft_wrap=True,
    )
    if lost:
        error = next(_problem(fork) for fork in forks if own_answer(fork.spans) is None)
        note(printable(f"{lost} forks did not come to their call, the first: {error}"))


def _row(decision: Decision) -> tuple[object, ...]:
    effect = "" if decision.effect is None else f"{decision.effect:+.2f}"
    interval = "" if decision.interval is None else "{:+.2f} … {:+.2f}".format(*decision.interval)
    return (
        str(decision.call),
        decision.agent or "",
        one_line(decision.answer, _TEXT),
        len(decision.rewards),
        decision.value,
        effect,
        interval,
        "mattered" if decision.mattered else "",
    )


def _source(fork: EvaluatedTask) -> ForkSource:
    assert fork.rollout.source is not None
    return fork.rollout.source


def _reward(rollout: Rollout) -> str:
    return "no reward" if rollout.reward is None else number(rollout.reward)
