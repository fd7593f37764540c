"""The command that compares recorded token ids with the tokenisation of their text: `agl drift`.

This module reads a store page by page and prints; what drift is and how its kinds are told is the business of
`agentlightning.gateway.chat.drift`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from agentlightning import semconv
from agentlightning.cli.options import print_json
from agentlightning.cli.place import STORE_ARGUMENT, Place, newest_store, with_place
from agentlightning.errors import ConfigError
from agentlightning.types import And, Condition, Filter

if TYPE_CHECKING:
    from agentlightning.gateway.chat.drift import Comparison, DriftCheck, DriftReport

_AT_ONCE: Final = 32  # spans held in memory, each with a whole prompt
_SEPARATOR: Final = "·"
_UNITS: Final = {"answer": "answers", "history": "histories", "prompt": "prompts"}


@click.command()
@click.option("--tokenizer", "source", metavar="ID|DIR", required=True, help="The model's: directory or hub id.")
@click.option("--run", "run_id", metavar="ID", help="Only calls of this run.")
@click.option("--model", metavar="NAME", help="Only calls that this model answered.")
@click.option("--examples", type=click.IntRange(min=0), default=1, show_default=True, help="Per check and kind.")
@with_place(STORE_ARGUMENT, newest_store)
async def drift(place: Place, source: str, run_id: str | None, model: str | None, examples: int, as_json: bool) -> None:
    """Compare what was sampled with its text tokenised anew.

    STORE is a SQLite file or a postgresql:// URL; default the newest of agentlightning.sqlite and runs/*."""

    check, report = await _compare(place, source, _calls(run_id, model), examples)
    if as_json:
        told = {"compared": report.compared, "drift": report.found(), "refused_prompts": check.refused}
        print_json(told | {"examples": report.examples()})
        return
    _show(check, report)


def _calls(run_id: str | None, model: str | None) -> Filter:
    asked = (
        (True, Condition("has_tokens", "eq", True)),
        (run_id, Condition("run_id", "eq", run_id)),
        (model, Condition(f"attributes.{semconv.GEN_AI_RESPONSE_MODEL}", "eq", model)),
    )
    return And([condition for value, condition in asked if value is not None])


async def _compare(place: Place, source: str, where: Filter, examples: int) -> tuple[DriftCheck, DriftReport]:
    async with place.open(reading=True) as store:
        from agentlightning.display import counting
        from agentlightning.gateway.backends.kinds import chat_template
        from agentlightning.gateway.chat.drift import DriftCheck, DriftReport, recorded_call

        check, report = DriftCheck(chat_template(source)), DriftReport(examples)
        cursor, done = None, 0
        with counting("calls", (await store.page_spans(where, limit=0, with_total=True)).total) as advance:
            while True:
                # In the order of attempts, and in each as its calls were finished: earlier ones come before later ones.
                page = await store.page_spans(where, limit=_AT_ONCE, cursor=cursor)
                for call in filter(None, map(recorded_call, page.items)):
                    for comparison in check.compare(call):
                        report.add(comparison)
                done += len(page.items)
                advance(done)
                cursor = page.next_cursor
                if cursor is None:
                    break
    if not report.compared["answer"].calls:
        asked = " of that run or model" if len(where.of) > 1 else ""
        raise ConfigError(
            f"{place} holds no calls with exact token ids{asked}; the gateway captures them where the "
            "backend returns them, and `agl runs` lists runs"
        )
    return check, report


# --- what is shown ------------------------------------------------------------------------------------------------


def _show(check: DriftCheck, report: DriftReport) -> None:
    from agentlightning.cli.tables import make_table, print_table

    compared = [f"{tally.calls:,} {_UNITS[name]} ({tally.tokens:,} tokens)" for name, tally in report.compared.items()]
    print(f"compared {', '.join(compared)}")
    if check.refused:
        refusal = visible(check.refusal)
        print(f"{check.refused:,} prompts were left out, which this tokenizer's template refuses: {refusal}")
    found = report.found()
    if not found:
        print("no drift")
        return
    names = ("check", "kind", "calls", "share", "tokens", "share")
    rows = [
        (
            one.check,
            one.kind,
            f"{one.calls:,}",
            f"{one.share_of_calls:.2%}",
            f"{one.tokens:,}",
            f"{one.share_of_tokens:.2%}",
        )
        for one in found
    ]
    print_table(make_table(names, rows, right=("calls", "share", "tokens")))
    for example in report.examples():
        print("\n".join(_lines(example)))


def _lines(example: Comparison) -> list[str]:
    drift = example.drift
    assert drift is not None, "only drift is kept as an example"
    call = "" if example.call_index is None else f", call {example.call_index}"
    before = _SEPARATOR.join(map(visible, drift.before))
    return [
        f"{example.check}, {drift.kind}: rollout {example.rollout_id}, attempt {example.attempt_id}{call}",
        f"    recorded  {before} » {_SEPARATOR.join(map(visible, drift.recorded))}",
        f"    anew      {before} » {_SEPARATOR.join(map(visible, drift.anew))}",
    ]


def visible(text: str) -> str:
    """A line break as `\\n`, and nothing that a terminal would obey."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
