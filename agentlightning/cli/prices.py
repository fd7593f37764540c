"""`--price`: what a million tokens cost, told by the user. Prices change; none is built in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import yaml

PRICE_HELP = "Price of a million tokens read and written, or a YAML file of `MODEL: [IN, OUT]`. Repeatable."


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
