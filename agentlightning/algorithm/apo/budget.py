"""What a search may spend, what it has spent, and what it will probably spend.

Rollouts are counted exactly. Tokens and money are known after the fact: a batch is not begun if, at the mean cost of a
rollout so far, it would not fit. Prices change, so none is built in.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from agentlightning.errors import AgentLightningError, ConfigError

Price: TypeAlias = tuple[float, float]
"""US dollars for a million tokens read, and written."""
Usage: TypeAlias = Mapping[str, tuple[int, int]]
"""By model, tokens read and tokens written."""

ASSUMED: Final = (3_000, 500)  # tokens of a rollout, or of a call of the optimiser, before any was measured
_DATE: Final = re.compile(r"-\d{4}.*")


class OutOfBudget(AgentLightningError):
    """What comes next would cost more than the search may spend."""


@dataclass
class Budget:
    """`None` is no limit. `free` are models that cost nothing, such as those served here."""

    max_rollouts: int | None = None
    max_tokens: int | None = None
    max_usd: float | None = None
    prices: Mapping[str, Price] = field(default_factory=dict[str, Price])
    free: frozenset[str] = frozenset()
    rollouts: int = 0
    agents: dict[str, tuple[int, int]] = field(default_factory=lambda: defaultdict(lambda: (0, 0)))
    optimizer: dict[str, tuple[int, int]] = field(default_factory=lambda: defaultdict(lambda: (0, 0)))

    def spend_rollout(self, usage: Usage) -> None:
        self.rollouts += 1
        _add(self.agents, usage)

    def spend_calls(self, usage: Usage) -> None:
        """Calls of the optimiser's models."""
        _add(self.optimizer, usage)

    @property
    def tokens(self) -> int:
        return _tokens(self.agents) + _tokens(self.optimizer)

    @property
    def spent(self) -> dict[str, float]:
        """As metrics."""
        return {"rollouts": float(self.rollouts), "tokens": float(self.tokens), "usd": self.usd}

    @property
    def usd(self) -> float:
        """What models with a price have cost."""
        return self._cost(self.agents) + self._cost(self.optimizer)

    def price(self, model: str) -> Price | None:
        """The price of `model`, or of the one that it is a dated release of (`gpt-4o-2024-08-06` of `gpt-4o`)."""
        if model in self.free:
            return 0.0, 0.0
        names = (name for name in self.prices if model == name or _DATE.fullmatch(model.removeprefix(name)))
        name = max((name for name in names if model.startswith(name)), key=len, default=None)
        return None if name is None else self.prices[name]

    def require(self, rollouts: int = 0) -> None:
        """OutOfBudget unless that many more rollouts, or without a number one more call, may be made. ConfigError for a
        model whose price is needed and unknown."""
        if self.max_rollouts is not None and self.rollouts + rollouts > self.max_rollouts:
            raise OutOfBudget(
                f"max_rollouts is {self.max_rollouts}: {self.rollouts} are done, the next need {rollouts}"
            )
        more = rollouts / max(1, self.rollouts)
        if self.max_tokens is not None and self.tokens + more * _tokens(self.agents) > self.max_tokens:
            raise OutOfBudget(f"max_tokens is {self.max_tokens:,}: {self.tokens:,} are used")
        if self.max_usd is not None:
            self.require_prices()
            if self.usd + more * self._cost(self.agents) > self.max_usd:
                raise OutOfBudget(f"max_usd is {self.max_usd:g}: {self.usd:.2f} are spent")

    def require_prices(self, *models: str) -> None:
        """ConfigError unless these models, and all that were used, have a price."""
        for model in sorted({*models, *self.agents, *self.optimizer}):
            if self.price(model) is None:
                raise ConfigError(
                    f"max_usd is {self.max_usd:g}, but the price of {model!r} is unknown; give prices={{{model!r}: "
                    "(IN, OUT)}, dollars for a million tokens read and written, (0, 0) if it is free"
                )

    def estimate(self, rollouts: int, calls: Mapping[str, int], agent_models: list[str]) -> str:
        """What at most that many rollouts and calls by model would cost in all, in words.

        Tokens of a rollout are as measured, or ASSUMED before any was; which, is said."""
        if self.rollouts:
            each = {
                model: (read / self.rollouts, written / self.rollouts) for model, (read, written) in self.agents.items()
            }
            basis = f"{_tokens(self.agents) / self.rollouts:,.0f} tokens a rollout, as measured"
        else:
            each = {model: (float(ASSUMED[0]), float(ASSUMED[1])) for model in agent_models}
            basis = f"if a rollout and a call take {ASSUMED[0]:,} tokens to read and {ASSUMED[1]:,} to write"
        planned = {model: (read * rollouts, written * rollouts) for model, (read, written) in each.items()}
        _add(planned, {model: (ASSUMED[0] * count, ASSUMED[1] * count) for model, count in calls.items()})
        said = f"at most {rollouts:,} rollouts and about {sum(calls.values()):,} calls of the optimiser"
        unknown = [model for model in planned if self.price(model) is None]
        if unknown:
            return f"{said}; what they cost is unknown: no price for {', '.join(sorted(unknown))}"
        return f"{said}; about ${self._cost(planned):.2f}, {basis}"

    def _cost(self, usage: Mapping[str, tuple[float, float]]) -> float:
        priced = ((self.price(model) or (0.0, 0.0), tokens) for model, tokens in usage.items())
        return sum((read * in_ + written * out) / 1e6 for (in_, out), (read, written) in priced)


def _add(
    total: dict[str, tuple[float, float]] | dict[str, tuple[int, int]], usage: Mapping[str, tuple[float, float]]
) -> None:
    for model, (read, written) in usage.items():
        before = total.get(model, (0, 0))
        total[model] = (before[0] + read, before[1] + written)  # type: ignore[assignment]


def _tokens(usage: Usage) -> int:
    return sum(read + written for read, written in usage.values())
