"""Show one rollout as learning sees it: which calls train, how they go on from one another, and where they do not.

    python scripts/explain.py ROLLOUT [STORE] [--tokenizer ID|DIR] [--json]

The dashboard's page of a rollout shows the same. This script reads a store and prints;
`agentlightning.data.explanation` explains.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Final

import click

from agentlightning.cli.options import make_table, print_json, print_table
from agentlightning.cli.place import ARGUMENT, Place, with_place
from agentlightning.data.explanation import ExplainedBreak, ExplainedCall, Explanation, explain_rollout
from agentlightning.errors import AgentLightningError, NotFoundError

if TYPE_CHECKING:
    from rich.table import Table

    from agentlightning.data.drift_kinds import Classifier

_COLUMNS: Final = (
    "call", "agent", "model", "prompt", "shared", "new", "sampled", "version", "trains", "reward", "tools",
)  # fmt: skip
_NUMBERS: Final = ("call", "prompt", "shared", "new", "sampled", "version", "reward")


@click.command()
@click.argument("rollout_id", metavar="ROLLOUT")
@click.option("--tokenizer", "source", metavar="ID|DIR", help="The model's; default the run's own, beside its store.")
@with_place(ARGUMENT)
async def explain(rollout_id: str, place: Place, source: str | None, as_json: bool) -> None:
    """Show a rollout as learning sees it: which calls train, how they go on from one another, and where they do not.

    STORE is a SQLite file or a postgresql:// URL; default the newest of agentlightning.sqlite and runs/*."""

    from agentlightning.dashboard.credit import trained_by
    from agentlightning.dashboard.tokens import Tokenizers, classifier_of
    from agentlightning.data.transitions import trace_rollout
    from agentlightning.gateway.backends.kinds import chat_template

    async with place.open(reading=True) as store:
        rollout = await store.get_rollout_by_id(rollout_id)
        if rollout is None:
            raise NotFoundError(f"there is no rollout {rollout_id!r} in this store; `agl rollouts ls` lists them")
        spans = await store.query_spans(rollout_id, "latest")
        trained = await trained_by(store, rollout.run_id)
    own = Tokenizers(place.address).find()  # that of the run, beside its store
    classifier = classifier_of(chat_template(source).token_bytes if source else own and own[1])
    traced = trace_rollout(rollout, spans, calls=trained.calls, reward=trained.reward)
    explanation = explain_rollout(traced, spans, classifier)
    if as_json:
        print_json(explanation)
    else:
        _show(explanation, classifier)


# --- what is shown ------------------------------------------------------------------------------------------------


def _show(explanation: Explanation, classifier: Classifier | None) -> None:
    rollout = explanation.rollout
    said = dict.fromkeys((rollout.mode, rollout.status, explanation.outcome, _reward(explanation)))  # each once
    print(f"rollout {visible(rollout.rollout_id)}: {', '.join(said)}")
    if explanation.calls:
        print_table(_calls(explanation.calls))
    for line in (*_conversations(explanation), *_sizes(explanation)):
        print(line)
    for found in explanation.breaks:
        print("\n".join(["", *_break(found)]))
    if classifier is None and explanation.breaks:
        print("\nwith --tokenizer these are texts, and more kinds are told")


def _reward(explanation: Explanation) -> str:
    terms = " + ".join(f"{visible(name)} {value:g}" for name, value in explanation.reward_terms.items())
    lost = ", ".join(f"{count} {reason}" for reason, count in explanation.rewards_lost.items())
    total = "no reward" if explanation.reward is None else f"reward {explanation.reward:g} ({terms})"
    return f"{total}{f'; rewards lost: {lost}' if lost else ''}"


def _calls(calls: Sequence[ExplainedCall]) -> Table:
    rows: list[tuple[object, ...]] = []
    for call in calls:
        shared = call.shared if call.shared and call.shared.tokens else None
        versions = sorted(set(call.versions or ()))
        trains = f"no: {call.left_out}" if call.left_out else "yes" + ", cut" * (call.finish_reason == "length")
        row = (
            call.call_index,
            call.agent or "",
            call.model or "",
            call.prompt_tokens,
            f"{shared.tokens:,} of {shared.call_index}" if shared else "",
            call.prompt_tokens - (shared.tokens if shared else 0),
            call.sampled_tokens,
            "–".join(map(str, versions)),
            trains,
            "" if call.reward is None else f"{call.reward:+g}",
            ", ".join(f"{name} {'ok' if status > 0 else 'failed'}" for name, status in call.tools),
        )
        rows.append(row)
    return make_table(_COLUMNS, rows, right=_NUMBERS)


def _conversations(explanation: Explanation) -> Iterator[str]:
    """`0 → 1 ✗ 3`: 1 continues 0, 3 should continue a call and does not; after a comma, it continues another call."""
    broken = {one.found.call_index for one in explanation.breaks}
    trained = [call for call in explanation.calls if call.conversation is not None]
    ordered = sorted(trained, key=lambda call: (call.conversation, call.call_index))
    for number, group in groupby(ordered, key=lambda call: call.conversation):
        calls = list(group)
        line = str(calls[0].call_index)
        for before, call in pairwise(calls):
            follows = call.continues == before.call_index
            line += " ✗ " if call.call_index in broken else " → " if follows else ", "
            line += (
                str(call.call_index)
                if call.continues is None or follows
                else f"{call.call_index} (from {call.continues})"
            )
        yield f"conversation {number}  {visible(calls[0].agent or '')}  {line}"


def _sizes(explanation: Explanation) -> Iterator[str]:
    for size in explanation.levels:
        rows = f"{size.sequences:,} row{'s' * (size.sequences != 1)}"
        yield f"level {size.level:<10}  {rows:>9}  {size.tokens:>9,} tokens  {size.saved:6.1%} saved"


def _break(one: ExplainedBreak) -> list[str]:
    found = one.found
    sides = [
        texts or tuple(map(str, ids))
        for texts, ids in ((one.before, found.before), (one.recorded, found.recorded), (one.anew, found.found))
    ]
    before, recorded, anew = ("·".join(map(visible, side)) for side in sides)
    return [
        f"call {found.call_index} should continue call {found.earlier}, and is other from token {found.position:,} on, "
        f"in that call's {found.inside}: {found.kind}",
        f"    recorded  {before} » {recorded}",
        f"    prompt    {before} » {anew}",
        f"    {one.suggestion}",
    ]


def visible(text: str) -> str:
    """A line break as `\\n`, and nothing that a terminal would obey."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    try:
        return int(explain.main(None if arguments is None else list(arguments), standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except AgentLightningError as error:
        click.echo(f"error: {error}", err=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
