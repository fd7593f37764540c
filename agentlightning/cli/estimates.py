"""Estimates and differences as tables for people. Knows what was measured, not how."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from agentlightning.algorithm.measures import Comparison, Difference, Estimate, Summary
from agentlightning.cli.tables import make_table, print_table
from agentlightning.tracing.tree import printable

_ALL = "all tasks"


def show_summary(console: Console, summary: Summary, confidence: float) -> None:
    """How the rollouts ended; then a row for each thing measured, of all tasks and of each tag."""
    _show_rollouts(console, "", summary)
    rows: list[tuple[object, ...]] = []
    for tag, estimates in [(_ALL, summary.estimates), *summary.tags.items()]:
        for name, estimate in estimates.items():
            rows.append((tag, name, str(estimate.tasks), f"{estimate.value:.3f}", _interval(estimate)))
            tag = ""
    print_table(make_table(("", "", "tasks", "value", f"{confidence:.0%} interval"), rows), console)
    if summary.tasks == 1:
        console.print("One task says nothing of others: there is no interval.")


def show_comparison(console: Console, sides: Sequence[str], comparison: Comparison, confidence: float) -> None:
    """The same of two, with what the second has over the first."""
    for letter, name, summary in zip("AB", sides, (comparison.first, comparison.second), strict=True):
        console.print(f"{letter}: {printable(name)}", markup=False, soft_wrap=True)
        _show_rollouts(console, "   ", summary)
    if comparison.unpaired:
        console.print(f"Tasks of one of them alone, left out: {comparison.unpaired}")
    first, second = comparison.first, comparison.second
    rows = {_ALL: (first.estimates, second.estimates, comparison.differences)} | {
        tag: (first.tags[tag], second.tags.get(tag, {}), differences) for tag, differences in comparison.tags.items()
    }
    lines: list[tuple[object, ...]] = []
    for tag, (ours, theirs, differences) in rows.items():
        for name, one in differences.items():
            values = [f"{side[name].value:.3f}" if name in side else "" for side in (ours, theirs)]
            values += [f"{one.value:+.3f}", _interval(one, "+"), "<0.001" if one.p < 0.001 else f"{one.p:.3f}"]
            lines.append((tag, name, str(one.tasks), *values))
            tag = ""
    names = ("", "", "tasks", "A", "B", "B − A", f"{confidence:.0%} interval", "p")
    print_table(make_table(names, lines), console)


def _show_rollouts(console: Console, indent: str, summary: Summary) -> None:
    console.print(f"{indent}{summary}", markup=False, soft_wrap=True)
    if summary.problem:
        console.print(f"{indent}first failure: {printable(summary.problem)}", markup=False, soft_wrap=True)


def _interval(estimate: Estimate | Difference, sign: str = "") -> str:
    return "" if estimate.interval is None else " … ".join(f"{bound:{sign}.3f}" for bound in estimate.interval)
