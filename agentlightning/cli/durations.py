"""Durations on the command line: `30d`, `12h`, `45m`, `90s`.

This module knows how they are written, not what they are for.
"""

from __future__ import annotations

import re
from typing import Final

import click

_SECONDS: Final = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_WRITTEN: Final = re.compile(r"(\d+(?:\.\d+)?)([dhms])", re.ASCII)


class Duration(click.ParamType[float]):
    """`"1.5h"` → 5400.0 seconds. A usage error says how a duration is written; `zero` allows one of no length."""

    name = "duration"

    def __init__(self, *, zero: bool = False) -> None:
        self._zero = zero

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        written = _WRITTEN.fullmatch(str(value))
        if written is None:
            self.fail(f"{value!r} is no duration; write a number and d, h, m or s, such as 30d or 12h", param, ctx)
        seconds = float(written[1]) * _SECONDS[written[2]]
        if seconds == 0 and not self._zero:
            self.fail(f"{value!r} is no time at all; give more than that", param, ctx)
        return seconds
