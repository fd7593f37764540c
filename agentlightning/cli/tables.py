"""How commands show tables: what a cell may hold, how wide a table is, and curves of one line in it.

Cells hold what others wrote (models, agents, users): nothing of it is taken for markup, and nothing acts on the
terminal. This module does not know what the tables are about.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from agentlightning.tracing.tree import one_line

_LONGEST = 200  # characters of a cell
STYLES = {
    "succeeded": "green",
    "failed": "red",
    "running": "yellow",
    "busy": "yellow",
    "gone": "red",
    "healthy": "green",
    "ejected": "red",
    "ok": "green",
    "warning": "yellow",
}
"""A word that says how something stands → its colour."""


def make_table(
    names: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None, right: Collection[str] = ()
) -> Table:
    """A table of these columns; numbers, and the columns named `right`, go to the right. A cell is a number, a text of
    others, or ready to be shown (a `Text` of our own)."""
    rows = list(rows)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for index, name in enumerate(names):
        numbers = all(isinstance(row[index], int | float | None) for row in rows) and bool(rows)
        table.add_column(name, justify="right" if numbers or name in right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(_cell, row))
    return table


def print_table(table: Table, console: Console | None = None) -> None:
    """Print a table whole: ids are there to be copied, and a narrow terminal wraps lines rather than cutting cells."""
    console = console or Console()
    widest = Console(width=10_000).measure(table).maximum
    Console(file=console.file, width=max(console.width, widest), highlight=False).print(table)


def number(value: float) -> str:
    """Four significant digits, and the thousands set apart: `0.1235`, `12,346`, `1e-06`."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def squeezed(values: Sequence[float], width: int) -> list[float]:
    """At most `width` values, each the mean of as many neighbours: `([1, 3, 5, 7], 2)` → `[2, 6]`."""
    if len(values) <= width:
        return list(values)
    edges = [round(index * len(values) / width) for index in range(width + 1)]
    return [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def _cell(value: object) -> RenderableType:
    if value is None:
        return ""
    if isinstance(value, float):
        return number(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Text):
        return value
    text = one_line(str(value), _LONGEST)
    return Text(text, STYLES.get(text, ""))
