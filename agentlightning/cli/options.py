"""Options that commands share, such as durations (`30d`) and prices, and `--json`: what a command found or did, one
object a line on stdout; what is for people goes to stderr then."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import click
import msgspec
import yaml

from agentlightning.tracing.instrument import INSTRUMENT, instrument_as_told

Option: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]

json_option = click.option(
    "--json", "as_json", is_flag=True, help="End stdout with JSON, one object a line; everything else to stderr."
)


instrument_option = click.option(
    "--instrument", metavar="[NAMES]", is_flag=False, flag_value="all",
    help="Let Python frameworks report tools and agents: langchain,crewai,… or all that can be.",
)  # fmt: skip


def instrument_agents(told: str | None, *, here: bool) -> None:
    """Have the agents in processes below this one instrumented, and those `here`, before they are imported."""
    if told is None:
        return
    os.environ[INSTRUMENT] = told
    click.get_current_context().call_on_close(lambda: os.environ.pop(INSTRUMENT, None))
    if here:
        names = instrument_as_told()
        click.echo(f"instrumented: {', '.join(names) or 'nothing, no instrumentation is installed'}", err=True)


def together(*options: Option) -> Option:
    """These options as one, in the order in which `--help` lists them."""
    return lambda command: reduce(lambda made, option: option(made), reversed(options), command)


def print_json(what: object, enc_hook: Callable[[Any], Any] | None = None) -> None:
    """Print one object, at once; `enc_hook` is msgspec's."""
    click.echo(msgspec.json.encode(what, enc_hook=enc_hook).decode())


def tell(as_json: bool, what: object, words: str) -> None:
    """Print what was done: as JSON, or in words."""
    if as_json:
        print_json(what)
    else:
        click.echo(words)


class Numbers(click.ParamType[tuple[int, ...]]):
    """`"1,4,8"` → (1, 4, 8). A usage error for what is no list of whole numbers from 1 on."""

    name = "numbers"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return cast("tuple[int, ...]", value)
        parts = str(value).split(",")
        if not all(part.strip().isdecimal() and int(part) >= 1 for part in parts):
            self.fail(f"{value!r} is no list of numbers from 1 on; write 1,4,8", param, ctx)
        return tuple(map(int, parts))


# --- durations ---------------------------------------------------------------------------------------------------

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


# --- prices ------------------------------------------------------------------------------------------------------

# Prices change; none is built in.
price_option = click.option(
    "--price", multiple=True, metavar="MODEL=IN,OUT|FILE",
    help="Price of a million tokens read and written, or a YAML file of `MODEL: [IN, OUT]`. Repeatable.",
)  # fmt: skip


def read_prices(given: Sequence[str]) -> dict[str, tuple[float, float]]:
    """`["m=1,2"]` → `{"m": (1.0, 2.0)}`. A usage error says how a price is written."""
    prices: dict[str, tuple[float, float]] = {}
    for text in given:
        model, separator, numbers = text.rpartition("=")
        table: object = {model: numbers.split(",")} if separator else _table(text)
        if not isinstance(table, dict):
            raise click.BadParameter(f"{text} holds no table; write MODEL: [IN, OUT] a line", param_hint="'--price'")
        for name, pair in table.items():
            try:
                read, written = map(float, pair)
            except (TypeError, ValueError):
                raise click.BadParameter(
                    f"the price of {name!r} is {pair!r}; write MODEL=IN,OUT, such as gpt-4o=2.5,10",
                    param_hint="'--price'",
                ) from None
            prices[str(name)] = (read, written)
    return prices


def _table(path: str) -> object:
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise click.BadParameter(
            f"{path!r} is neither MODEL=IN,OUT nor a YAML file that can be read: {error}", param_hint="'--price'"
        ) from None
