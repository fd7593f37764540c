"""The budget of a prompt search, and what it has spent.

Rollouts are counted exactly. Tokens and money are known only afterwards: a batch is not started if it would exceed the
budget at the mean cost per rollout so far.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from agentlightning.errors import AgentLightningError, ConfigError

Price: TypeAlias = tuple[float, float]
"""US dollars for a million tokens read, and written."""
Usage: TypeAlias = Mapping[str, tuple[int, int]]
"""By model, tokens read and tokens written."""

_DATE: Final = re.compile(r"-\d{4}.*")


class OutOfBudget(AgentLightningError):
    """The next part of the search would exceed its budget."""


@dataclass
class Budget:
    """`None` is no limit. `free` are models that cost nothing, such as those served here."""

    max_rollouts: int | None = None
    max_tokens: int | None = None
    max_usd: float | None = None
    prices: Mapping[str, Price] = field(default_factory=dict[str, Price])
    free: frozenset[str] = frozenset()
    rollouts: int = 0
    agents: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    optimizer: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    def spend_rollout(self, usage: Usage) -> None:
        self.rollouts += 1
        _add(self.agents, usage)

    def spend_calls(self, usage: Usage) -> None:
        """Calls of the optimiser's models."""
        _add(self.optimizer, usage)

    @property
    def spent(self) -> dict[str, float]:
        """The spending as metrics. `usd` covers models with a price."""
        tokens = _tokens(self.agents) + _tokens(self.optimizer)
        usd = self._cost(self.agents) + self._cost(self.optimizer)
        return {"rollouts": float(self.rollouts), "tokens": float(tokens), "usd": usd}

    def price(self, model: str) -> Price | None:
        """The price of `model`, or, for a dated release, of its base name (`gpt-4o` for `gpt-4o-2024-08-06`)."""
        if model in self.free:
            return 0.0, 0.0
        fits = (price for name, price in self.prices.items() if _DATE.fullmatch(model.removeprefix(name)))
        return self.prices.get(model) or next(fits, None)

    def require(self, rollouts: int = 0) -> None:
        """OutOfBudget unless so many more rollouts fit, or without a number one more call. ConfigError if the price of
        a model is needed but unknown."""
        if self.max_rollouts is not None and self.rollouts + rollouts > self.max_rollouts:
            raise OutOfBudget(
                f"max_rollouts is {self.max_rollouts}: {self.rollouts} are done, the next need {rollouts}"
            )
        spent, more = self.spent, rollouts / max(1, self.rollouts)
        if self.max_tokens is not None and spent["tokens"] + more * _tokens(self.agents) > self.max_tokens:
            raise OutOfBudget(f"max_tokens is {self.max_tokens:,}: {spent['tokens']:,.0f} are used")
        if self.max_usd is not None:
            self.require_prices()
            if spent["usd"] + more * self._cost(self.agents) > self.max_usd:
                raise OutOfBudget(f"max_usd is {self.max_usd:g}: {spent['usd']:.2f} are spent")

    def require_prices(self, *models: str) -> None:
        """ConfigError unless these models, and all models used so far, have a price."""
        for model in sorted({*models, *self.agents, *self.optimizer}):
            if self.price(model) is None:
                raise ConfigError(
                    f"max_usd is {self.max_usd:g}, but the price of {model!r} is unknown; give prices={{{model!r}: "
                    "(IN, OUT)}, dollars for a million tokens read and written, (0, 0) if it is free"
                )

    def _cost(self, usage: Usage) -> float:
        priced = ((self.price(model) or (0.0, 0.0), tokens) for model, tokens in usage.items())
        return sum((read * in_ + written * out) / 1e6 for (in_, out), (read, written) in priced)


def _add(total: dict[str, tuple[int, int]], usage: Usage) -> None:
    for model, (read, written) in usage.items():
        before = total.get(model, (0, 0))
        total[model] = before[0] + read, before[1] + written


def _tokens(usage: Usage) -> int:
    return sum(map(sum, usage.values()))
