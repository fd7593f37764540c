"""A line chart of characters: several curves, each in a colour of its own, in a grid of dots eight to a character.

This module knows points and cells. It does not know what is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, TypeAlias

from rich.text import Text

from agentlightning.cli.tables import number

Points: TypeAlias = Sequence[tuple[float, float]]

COLOURS: Final = ("cyan", "yellow", "magenta", "green", "red", "blue")
_BLANK: Final = 0x2800  # the braille pattern without dots
_DOTS: Final = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # by column and row within a character


def draw_chart(curves: Mapping[str, Points], width: int = 72, height: int = 12) -> Text:
    """The curves over a common x and y, `height` lines and two more with the ends of both axes; empty without a point.

    Points are joined in the order of their x. The curve at index i has the colour `COLOURS[i % 6]`."""
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return Text("")
    (left, right), (low, high) = (_span([point[axis] for point in points]) for axis in (0, 1))
    labels = {0: number(high), height - 1: number(low)}
    margin = max(map(len, labels.values()))
    columns, rows = 2 * (width - margin - 1), 4 * height
    cells: dict[tuple[int, int], tuple[int, str]] = {}
    for index, curve in enumerate(curves.values()):
        for column, row in _line(curve, left, right, low, high, columns, rows):
            place = (row // 4, column // 2)
            dots, _ = cells.get(place, (0, ""))
            cells[place] = dots | _DOTS[column % 2][row % 4], COLOURS[index % len(COLOURS)]
    chart = Text()
    for line in range(height):
        chart.append(f"{labels.get(line, ''):>{margin}}┤", "dim")
        for column in range(columns // 2):
            dots, style = cells.get((line, column), (0, ""))
            chart.append(chr(_BLANK + dots) if dots else " ", style)
        chart.append("\n")
    ends = (number(left), number(right))
    chart.append(f"{' ' * margin}└{'─' * (columns // 2)}\n", "dim")
    chart.append(f"{' ' * (margin + 1)}{ends[0]}{ends[1]:>{columns // 2 - len(ends[0])}}", "dim")
    return chart


def _span(values: Sequence[float]) -> tuple[float, float]:
    """The least and the greatest; of equal ones somewhat around them, so that a line has a height to be at."""
    low, high = min(values), max(values)
    margin = 0.0 if high > low else abs(low) * 0.1 or 0.5
    return low - margin, high + margin


def _line(
    curve: Points, left: float, right: float, low: float, high: float, columns: int, rows: int
) -> list[tuple[int, int]]:
    """The dots, (column, row from the top), of a curve."""
    placed = [
        (round((x - left) / (right - left) * (columns - 1)), round((high - y) / (high - low) * (rows - 1)))
        for x, y in sorted(curve)
    ]
    dots = placed[:1]
    for (column, row), (column_after, row_after) in pairwise(placed):
        steps = max(abs(column_after - column), abs(row_after - row))
        dots += [
            (column + round((column_after - column) * n / steps), row + round((row_after - row) * n / steps))
            for n in range(1, steps + 1)
        ]
    return dots
