"""Options that commands share, and `--json`: what a command found or did, one object a line on stdout; what is for
people goes to stderr then."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, TypeAlias

import click
import msgspec

Option: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]

json_option = click.option(
    "--json", "as_json", is_flag=True, help="End stdout with JSON, one object a line; everything else to stderr."
)


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
