"""Show one rollout as learning sees it: which calls train, how they go on from one another, and where they do not.

    python scripts/explain.py ROLLOUT [STORE] [--tokenizer ID|DIR] [--json]

The dashboard's page of a rollout shows the same.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Final

import click
import msgspec
import numpy as np

from agentlightning.cli.options import make_table, print_json, print_table
from agentlightning.cli.place import ARGUMENT, Place, with_place
from agentlightning.data.agents import agent_of
from agentlightning.data.continuity import Break, Continuity, continuity
from agentlightning.data.conversations import call_index
from agentlightning.data.forest import prefix_order, shared_length
from agentlightning.data.sequences import CreditedTransition, Level, build_sequences
from agentlightning.data.transitions import IntArray, TracedRollout, Transition, trace_rollout
from agentlightning.errors import AgentLightningError, NotFoundError
from agentlightning.tracing.messages import model_name, token_counts
from agentlightning.tracing.steps import read_steps
from agentlightning.types import Rollout, Span

if TYPE_CHECKING:
    from rich.table import Table

    from agentlightning.data.token_bytes import TokenBytes

_LEVELS: Final[tuple[Level, ...]] = ("transition", "trajectory", "tree")


class Shared(msgspec.Struct, frozen=True):
    """The longest beginning of a prompt that an earlier call holds."""

    tokens: int
    call_index: int


class ExplainedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of the final attempt. Of one that does not train, `left_out` says why, and what is only known of those
    that do is None. `versions` are the policy versions of its first and last token, `tools` how each went (±1)."""

    call_index: int
    agent: str | None
    model: str | None
    prompt_tokens: int
    sampled_tokens: int
    left_out: str | None = None
    shared: Shared | None = None
    continues: int | None = None
    conversation: int | None = None
    versions: tuple[int, int] | None = None
    finish_reason: str | None = None
    reward: float | None = None
    tools: tuple[tuple[str, int], ...] = ()


class LevelSize(msgspec.Struct, frozen=True):
    """What training the rollout takes at a level; `saved` is the share of the tokens of level `transition`."""

    level: Level
    sequences: int
    tokens: int
    saved: float


class ExplainedBreak(msgspec.Struct, frozen=True, kw_only=True):
    """A break, what can be done about it, and the texts of its tokens where a tokenizer was given."""

    found: Break
    suggestion: str
    before: tuple[str, ...] | None = None
    recorded: tuple[str, ...] | None = None
    anew: tuple[str, ...] | None = None


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    rollout: Rollout
    outcome: str
    reward: float | None
    reward_terms: dict[str, float]
    rewards_lost: dict[str, int]
    calls: tuple[ExplainedCall, ...]
    levels: tuple[LevelSize, ...]
    breaks: tuple[ExplainedBreak, ...]


def explain_rollout(traced: TracedRollout, spans: Sequence[Span], token_bytes: TokenBytes | None = None) -> Explanation:
    """What `trace_rollout` made of these spans, explained; `token_bytes` are those of its tokenizer."""
    read = continuity(traced.transitions, spans)
    calls = [*_trained(traced.transitions, read), *_left_out(traced, spans)]
    return Explanation(
        rollout=traced.rollout,
        outcome=traced.outcome,
        reward=traced.reward,
        reward_terms=dict(traced.reward_terms),
        rewards_lost=dict(traced.rewards_lost),
        calls=tuple(sorted(calls, key=lambda call: call.call_index)),
        levels=tuple(_level_sizes(traced.transitions)) if traced.transitions else (),
        breaks=tuple(explain_break(found, token_bytes) for found in read.breaks),
    )


def _trained(transitions: Sequence[Transition], read: Continuity) -> Iterable[ExplainedCall]:
    earlier: list[tuple[IntArray, int]] = []
    for one, continues, conversation in zip(transitions, read.continues, read.conversations, strict=True):
        shared = [Shared(shared_length(tokens, one.prompt_ids), index) for tokens, index in earlier]
        known = one.versions[one.versions >= 0]
        yield ExplainedCall(
            call_index=one.call_index,
            agent=one.agent,
            model=one.model,
            prompt_tokens=len(one.prompt_ids),
            sampled_tokens=len(one.response_ids),
            shared=max(shared, key=lambda most: (most.tokens, most.call_index), default=None),
            continues=None if continues is None else transitions[continues].call_index,
            conversation=conversation,
            versions=(int(known[0]), int(known[-1])) if len(known) else None,
            finish_reason=one.finish_reason,
            reward=one.reward,
            tools=tuple((tool.tool, tool.status) for tool in one.tools),
        )
        earlier.append((np.concatenate([one.prompt_ids, one.response_ids]), one.call_index))


def _left_out(traced: TracedRollout, spans: Sequence[Span]) -> Iterable[ExplainedCall]:
    attempt_id = next((span.attempt_id for span in spans if span.span_id in traced.left_out), None)
    for step in read_steps([span for span in spans if span.attempt_id == attempt_id]):
        span = step.span
        if span.span_id not in traced.left_out:
            continue
        read, written = token_counts(span.attributes) or (0, 0)
        if span.tokens is not None:
            read = len(span.tokens.prompt_token_ids)
            written = sum(len(choice.token_ids) for choice in span.tokens.choices)
        yield ExplainedCall(
            call_index=call_index(span) or 0,
            agent=agent_of(step).name,
            model=model_name(span.attributes),
            prompt_tokens=read,
            sampled_tokens=written,
            left_out=traced.left_out[span.span_id],
        )


def _level_sizes(transitions: Sequence[Transition]) -> Iterable[LevelSize]:
    credited = [CreditedTransition(one, np.zeros(len(one.response_ids), np.float32)) for one in transitions]
    alone = sum(len(one.prompt_ids) + len(one.response_ids) for one in transitions)
    for level in _LEVELS:
        rows = [sequence.token_ids for sequence in build_sequences(credited, level)]
        shared = int(prefix_order(rows)[1].sum()) if level == "tree" else 0
        tokens = sum(map(len, rows)) - shared
        yield LevelSize(level, len(rows), tokens, 1 - tokens / alone)


def explain_break(found: Break, token_bytes: TokenBytes | None) -> ExplainedBreak:
    """A break with what can be done about it, and, with a tokenizer, the texts of its tokens."""
    if token_bytes is None:
        return ExplainedBreak(found=found, suggestion=found.suggestion)
    before, recorded, anew = (_texts(ids, token_bytes) for ids in (found.before, found.recorded, found.found))
    return ExplainedBreak(found=found, suggestion=found.suggestion, before=before, recorded=recorded, anew=anew)


def _texts(ids: Sequence[int], token_bytes: TokenBytes) -> tuple[str, ...]:
    """The text of each token; of one without any its id, as `#17`."""
    return tuple(token_bytes[one].decode(errors="backslashreplace") or f"#{one}" for one in ids)


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
    from agentlightning.dashboard.tokens import Tokenizers
    from agentlightning.gateway.backends.factory import chat_template

    async with place.open(reading=True) as store:
        rollout = await store.get_rollout_by_id(rollout_id)
        if rollout is None:
            raise NotFoundError(f"there is no rollout {rollout_id!r} in this store; `agl rollouts ls` lists them")
        spans = await store.query_spans(rollout_id, "latest")
        trained = await trained_by(store, rollout.run_id)
    own = Tokenizers(lambda _: place.address).find("")  # that of the run, beside its store
    token_bytes = chat_template(source).token_bytes if source else own and own[1]
    traced = trace_rollout(rollout, spans, calls=trained.calls, reward=trained.reward)
    explanation = explain_rollout(traced, spans, token_bytes)
    if as_json:
        print_json(explanation)
    else:
        _show(explanation, spelled=token_bytes is not None)


# --- what is shown ------------------------------------------------------------------------------------------------


def _show(explanation: Explanation, *, spelled: bool) -> None:
    rollout = explanation.rollout
    said = dict.fromkeys((rollout.mode, rollout.status, explanation.outcome, _reward(explanation)))  # each once
    print(f"rollout {visible(rollout.rollout_id)}: {', '.join(said)}")
    if explanation.calls:
        print_table(_calls(explanation.calls))
    for line in (*_conversations(explanation), *_sizes(explanation)):
        print(line)
    for found in explanation.breaks:
        print("\n".join(["", *_break(found)]))
    if not spelled and explanation.breaks:
        print("\nwith --tokenizer these are texts")


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
