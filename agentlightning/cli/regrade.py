"""`agl regrade`: another reward for the rollouts of a run, without sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from agentlightning.cli.options import MODE, note, number, print_result
from agentlightning.cli.store_location import ANY_RUN, StoreLocation, with_location
from agentlightning.cli.stored_runs import choose_run
from agentlightning.data.references import load_reference
from agentlightning.errors import InvalidError
from agentlightning.tracing.tree import printable

if TYPE_CHECKING:
    from agentlightning.algorithm.regrading import Comparison


@click.command()
@click.argument("run", metavar="RUN")
@click.argument("grader", metavar="FILE.py:NAME")
@click.option(
    "--mode", "modes", multiple=True, type=MODE, help="Only of this mode. Repeatable; default: all."
)
@click.option(
    "--save", is_flag=True, help="Give each rollout its new reward: from then on it is the one."
)
@with_location(ANY_RUN)
async def regrade(
    place: StoreLocation,
    run: str,
    grader: str,
    modes: tuple[str, ...],
    save: bool,
    as_json: bool,
) -> None:
    """Compute another reward for stored rollouts.

    Compared with the rewards that the rollouts of RUN have.

    The grader is a function of (task, rollout), or an agl.rewards.RelativeJudge, which ranks the
    rollouts of each task. The agent is not run."""
    from agentlightning.algorithm.regrading import compare, regrade
    from agentlightning.data.recordings import finished_rollouts, recorded_groups
    from agentlightning.tracing.scores import give_score

    function: Any = load_reference(grader)
    found = await choose_run(run, place)
    where = finished_rollouts(found.run.run_id, modes or ("train", "val", "test"))
    async with found.place.open(reading=not save) as store:
        regraded = await regrade(recorded_groups(store, where), function)
        if save:
            for one in regraded:
                if one.reward is not None:
                    given = {grader.rpartition(":")[2]: one.reward}
                    await give_score(store, one.stored.rollout, given, None, "agl regrade")
    compared = compare(regraded)
    print_result(as_json, compared, _in_words(compared))
    for problem, count in compared.problems.items():
        note(printable(f"{count} rollouts got no reward: {problem}"))
    if not compared.graded:
        raise InvalidError("no rollout was graded")


def _in_words(compared: Comparison) -> str:
    lines = [f"{compared.graded} of {compared.rollouts} rollouts graded"]
    if compared.before is not None and compared.after is not None:
        lines.append(f"mean reward {number(compared.before)} → {number(compared.after)}")
    for share, pairs, than in (
        (compared.same_order, compared.pairs, "their rewards before"),
        (compared.labelled, compared.labelled_pairs, "the labels good and bad"),
    ):
        if share is not None:
            lines.append(f"ordered as {than}: {share:.0%} of {pairs} pairs of one task")
    if compared.agreement is not None:
        lines.append(f"the judge agrees with itself about {compared.agreement:.0%} of pairs")
    return "\n".join(lines)
