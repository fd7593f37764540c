"""Shared by commands: options such as durations (`30d`), those that every command takes, and
printing.

Table cells contain the text of models, agents and users: it is never markup, and never acts on the
terminal."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import reduce
from itertools import pairwise
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import click
import msgspec

from agentlightning.config import FIELDS, RunConfig
from agentlightning.learner.policy_config import settings_of
from agentlightning.tracing import instrument
from agentlightning.tracing.instrument import INSTRUMENT

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Option: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]

COUNT: Final = click.IntRange(min=1)
MODE: Final = click.Choice(["train", "val", "test"])
STATUSES: Final = (
    "queuing",
    "preparing",
    "running",
    "requeuing",
    "succeeded",
    "failed",
    "cancelled",
)
_STYLES: Final = {"succeeded": "green", "failed": "red", "stopped": "red", "running": "yellow"}
_LONGEST: Final = 200  # characters of a cell

json_option = click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print JSON on stdout, one object per line, and everything else on stderr.",
)


set_option = click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change one key: algorithm.group_size=4",
)
steps_option = click.option(
    "--steps", type=int, help="Number of training steps; short for --set algorithm.steps=…"
)
model_options = (
    click.option("--model-name", default="policy", help="Name by which clients call the model."),
    click.option("--seed", type=int, default=0, help="For sampling, and for making MODEL."),
)


def key_option(help_: str, **settings: Any) -> Option:
    """`--key`, or the variable AGL_KEY."""
    return click.option(
        "--key", metavar="KEY", envvar="AGL_KEY", show_envvar=True, help=help_, **settings
    )


class Flag(click.Option):
    """An option that is also accepted by `former` names, which `--help` does not show."""

    def __init__(self, *names: Any, former: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(*names, **settings)
        self._former = former

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        shown = self.opts
        self.opts = [*shown, *self._former]
        super().add_to_parser(parser, ctx)
        self.opts = shown


# --- options of every command ---------------------------------------------------------------------

_PACKAGE: Final = "agentlightning"


def _set_quiet(ctx: click.Context, param: click.Parameter, given: bool) -> None:
    if given:
        ctx.ensure_object(dict)["quiet"] = True


class TerminalFormatter(logging.Formatter):
    """Log records without anything that could be a key: they quote agents and servers."""

    def format(self, record: logging.LogRecord) -> str:
        from agentlightning.store.redaction import text_without_secrets

        return text_without_secrets(super().format(record))


def _set_verbose(ctx: click.Context, param: click.Parameter, given: bool) -> None:
    if given:
        ctx.ensure_object(dict)["verbose"] = True
        logging.basicConfig()
        for handler in logging.getLogger().handlers:
            handler.setFormatter(TerminalFormatter("%(levelname)s %(name)s: %(message)s"))
        before = logging.getLogger(_PACKAGE).level
        logging.getLogger(_PACKAGE).setLevel(logging.DEBUG)
        ctx.find_root().call_on_close(lambda: logging.getLogger(_PACKAGE).setLevel(before))


def _disable_color(ctx: click.Context, param: click.Parameter, given: bool) -> None:
    if given:
        ctx.find_root().color = False
        before = os.environ.get("NO_COLOR")
        os.environ["NO_COLOR"] = "1"
        if before is None:
            ctx.find_root().call_on_close(lambda: os.environ.pop("NO_COLOR", None))


def common_options(*, hidden: bool = False) -> list[click.Option]:
    """`-q`, `-v` and `--no-color`: shown by `agl --help`, and `hidden` behind each command's
    name."""
    given: dict[str, Any] = {
        "is_flag": True,
        "expose_value": False,
        "is_eager": True,
        "hidden": hidden,
    }
    return [
        click.Option(
            ["-q", "--quiet"], callback=_set_quiet, help="Print results and errors alone.", **given
        ),
        click.Option(
            ["-v", "--verbose"],
            callback=_set_verbose,
            help="Print the log, and tracebacks.",
            **given,
        ),
        click.Option(
            ["--no-color"], callback=_disable_color, help="Print without colours.", **given
        ),
    ]


def quiet() -> bool:
    """Whether the command was called with `-q`."""
    ctx = click.get_current_context(silent=True)
    asked = None if ctx is None else ctx.find_object(dict)
    return bool(asked and asked.get("quiet"))


def note(words: str) -> None:
    """Print a line on stderr that is no result, unless the command was called with `-q`."""
    if not quiet():
        click.echo(words, err=True)


def combined(*options: Option) -> Option:
    """These options as one, in the order of `--help`."""
    return lambda command: reduce(lambda made, option: option(made), reversed(options), command)


def key_flags(*left_out: str, only: Collection[str] = ()) -> Option:
    """The flags of all settings that have one, or `only` of these, except `left_out`; None if not
    given."""
    names = [name for name in FIELDS if name not in left_out and (name in only or not only)]
    described = settings_of(RunConfig)
    kinds = get_type_hints(RunConfig)
    return combined(
        *(
            _option(name, kinds[name], described[name])
            for name in names
            if described[name].extra is not None
        )
    )


def _option(name: str, kind: Any, described: msgspec.Meta) -> Option:
    settings: dict[str, Any] = {"help": described.description, "default": None}
    settings |= described.extra or {}
    flag = settings.pop("name") or f"--{name.replace('_', '-')}"
    first = get_args(kind)[0] if get_origin(kind) in (UnionType, Union) else kind
    if settings.pop("duration", False):
        settings["type"] = Duration(bare=True)
    elif get_origin(first) is Literal:
        settings["type"] = click.Choice(get_args(first))
    elif first in (int, float):
        settings["type"] = first
    return click.option(flag, name, cls=Flag, **settings)


def instrument_agents(names: str | None, *, here: bool) -> None:
    """Instrument the agents of child processes and, with `here`, of this one, before they are
    imported."""
    if names is None:
        return
    click.get_current_context().call_on_close(lambda: os.environ.pop(INSTRUMENT, None))
    found = instrument.instrument_agents(names, here=here)
    if here:
        note(f"instrumented: {', '.join(found) or 'nothing, no instrumentation is installed'}")


def numbers(text: str) -> tuple[int, ...]:
    """`"1,4,8"` → (1, 4, 8). UsageError unless all are whole numbers from 1."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) >= 1 for part in parts):
        raise click.BadParameter(f"{text!r} is no list of numbers from 1 on; write 1,4,8")
    return tuple(map(int, parts))


_SECONDS: Final = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_WRITTEN: Final = re.compile(r"(\d+(?:\.\d+)?)([dhms]?)", re.ASCII)


def seconds_in(text: str, *, zero: bool = False, bare: bool = False) -> float:
    """`"1.5h"` → 5400.0; `bare` allows seconds without a unit. ValueError says how to write a
    duration."""
    written = _WRITTEN.fullmatch(text.strip())
    if written is None or not (written[2] or bare):
        raise ValueError(
            f"{text!r} is no duration; write a number and d, h, m or s, such as 30d or 12h"
        )
    seconds = float(written[1]) * _SECONDS[written[2] or "s"]
    if seconds == 0 and not zero:
        raise ValueError(f"{text!r} is zero; give a longer time")
    return seconds


class Duration(click.ParamType[float]):
    """A duration in seconds, read by `seconds_in`. UsageError if it is malformed."""

    name = "duration"

    def __init__(self, *, zero: bool = False, bare: bool = False) -> None:
        self._zero = zero
        self._bare = bare

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, float):
            return value
        try:
            return seconds_in(str(value), zero=self._zero, bare=self._bare)
        except ValueError as error:
            self.fail(str(error), param, ctx)


# --- printing -------------------------------------------------------------------------------------


# Control characters that JSON allows unescaped, and those that change the direction of writing.
_TERMINAL_CONTROLS: Final = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def print_json(what: object, enc_hook: Callable[[Any], Any] | None = None) -> None:
    """Print one object, in which no character acts on a terminal, and flush; `enc_hook` is
    msgspec's."""
    text = msgspec.json.encode(what, enc_hook=enc_hook).decode()
    click.echo(_TERMINAL_CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def print_result(as_json: bool, what: object, words: str) -> None:
    """Print a result, as JSON or in words."""
    if as_json:
        print_json(what)
    else:
        click.echo(words)


def make_table(
    names: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str | None = None,
    right: Collection[str] = (),
) -> Table:
    """A table with these columns; numbers and the columns named `right` are aligned to the
    right."""
    from rich import box
    from rich.table import Table

    rows = list(rows)
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left", title_style="bold"
    )
    for index, name in enumerate(names):
        numbers = all(isinstance(row[index], int | float | None) for row in rows) and bool(rows)
        table.add_column(
            name, justify="right" if numbers or name in right else "left", no_wrap=True
        )
    for row in rows:
        table.add_row(*map(_cell, row))
    return table


def print_table(table: Table, console: Console | None = None) -> None:
    """Print a whole table: you can copy ids, and a narrow terminal wraps lines instead of cutting
    cells."""
    from rich.console import Console

    console = console or Console()
    widest = Console(width=10_000).measure(table).maximum
    Console(file=console.file, width=max(console.width, widest), highlight=False).print(table)


def _cell(value: object) -> Any:
    from rich.text import Text

    from agentlightning.tracing.tree import one_line

    if value is None or isinstance(value, Text):
        return value or ""
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else number(value)
    text = one_line(str(value), _LONGEST)
    return Text(text, _STYLES.get(text, ""))


def number(value: float) -> str:
    """Four significant digits, with separated thousands: `0.1235`, `12,346`, `1e-06`."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def resampled(values: Sequence[float], width: int) -> list[float]:
    """At most `width` values, each the mean of neighbours: `([1, 3, 5, 7], 2)` → `[2, 6]`."""
    if len(values) <= width:
        return list(values)
    edges = [round(index * len(values) / width) for index in range(width + 1)]
    return [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
