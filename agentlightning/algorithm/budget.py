"""The budget of a run, and its spending."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec

from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.store.base import LightningStore
from agentlightning.tracing.dialects import model_name, token_counts
from agentlightning.tracing.steps import read_steps
from agentlightning.types import RolloutStatus, Span

Price: TypeAlias = tuple[float, float]
"""US dollars for a million tokens read, and written."""
Usage: TypeAlias = Mapping[str, tuple[int, int]]
"""By model, tokens read and tokens written."""

_DATE: Final = re.compile(r"-\d{4}.*")


class OutOfBudget(AgentLightningError):
    """The next part of the run would exceed its budget."""


class BudgetTooSmall(ConfigError):
    """The budget leaves nothing between the evaluations before and after."""


class Budget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a run stops; None is no limit. `rollouts` counts those that were run, `tokens` and
    `usd` those of agents and of an editing model; `hours` are those of this process. Nothing is
    begun beyond it; of rollouts that run already, the tokens and dollars may exceed it."""

    rollouts: int | None = None
    tokens: int | None = None
    usd: float | None = None
    hours: float | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            limit = getattr(self, name)
            if limit is not None and not limit > 0:
                raise ConfigError(f"budget: {name} is {limit}; give more than 0, or leave it out")


UNLIMITED: Final = Budget()


@dataclass
class Spending:
    """The spending of a run: rollouts, each counted once by its id, and calls of an editing model.
    `free` are models that cost nothing, such as those served here.

    Tokens and money are known only afterwards: a batch is not started if it, and what is reserved,
    would exceed the budget at the mean cost per rollout so far."""

    budget: Budget
    prices: Mapping[str, Price] = field(default_factory=dict[str, Price])
    free: frozenset[str] = frozenset()
    reserved: int = 0  # rollouts that are kept for the end
    agents: Counter[tuple[str, int]] = field(default_factory=Counter[tuple[str, int]])
    editing: Counter[tuple[str, int]] = field(default_factory=Counter[tuple[str, int]])
    began: float = field(default_factory=time.monotonic)
    _counted: set[str] = field(default_factory=set[str])

    @property
    def rollouts(self) -> int:
        return len(self._counted)

    def add_rollout(self, rollout_id: str, usage: Usage) -> None:
        if rollout_id not in self._counted:
            self._counted.add(rollout_id)
            _add(self.agents, usage)

    async def add_run(self, store: LightningStore, run_id: str) -> None:
        """Count the rollouts that the run has ended earlier."""
        ended: list[RolloutStatus] = ["succeeded", "failed"]
        for rollout in await store.query_rollouts(run_id=run_id, status_in=ended):
            spans = await store.query_spans(rollout.rollout_id, "latest")
            self.add_rollout(rollout.rollout_id, usage_of(spans))

    def add_call(self, usage: Usage) -> None:
        """Calls of the editing model."""
        _add(self.editing, usage)

    @property
    def metrics(self) -> dict[str, float]:
        """`usd` covers models with a price."""
        both = self.agents + self.editing
        return {
            "rollouts": float(self.rollouts),
            "tokens": float(both.total()),
            "usd": self._cost(both),
        }

    def price(self, model: str) -> Price | None:
        """The price of `model`, or, for a dated release, of its base name (`gpt-4o` for
        `gpt-4o-2024-08-06`)."""
        if model in self.free:
            return 0.0, 0.0
        dated = (
            price
            for name, price in self.prices.items()
            if _DATE.fullmatch(model.removeprefix(name))
        )
        return self.prices.get(model) or next(dated, None)

    def require(self, rollouts: int = 0) -> None:
        """OutOfBudget unless so many more rollouts fit, or without a number one more call.
        ConfigError if the price of a model is needed but unknown."""
        limits = self.budget
        left = math.inf if limits.rollouts is None else limits.rollouts - self.rollouts
        if rollouts > left - self.reserved:
            kept = f", the report {self.reserved}" if self.reserved else ""
            raise OutOfBudget(
                f"the budget is {limits.rollouts} rollouts: {self.rollouts} are done, the next "
                f"need {rollouts}{kept}"
            )
        hours = (time.monotonic() - self.began) / 3600
        if limits.hours is not None and hours > limits.hours:
            raise OutOfBudget(f"the budget is {limits.hours:g} hours: they are over")
        more = (rollouts + self.reserved) / max(1, self.rollouts)
        tokens = (self.agents + self.editing).total()
        if limits.tokens is not None and tokens + more * self.agents.total() > limits.tokens:
            raise OutOfBudget(f"the budget is {limits.tokens:,} tokens: {tokens:,} are used")
        if limits.usd is not None:
            self.require_prices()
            usd = self._cost(self.agents + self.editing)
            if usd + more * self._cost(self.agents) > limits.usd:
                raise OutOfBudget(f"the budget is ${limits.usd:g}: {usd:.2f} are spent")

    def fitting(self, rollouts: int) -> int:
        """The number of so many rollouts, at least 1, that may be started now. OutOfBudget if
        none."""
        limit = self.budget.rollouts
        if limit is not None:
            rollouts = min(rollouts, max(1, limit - self.rollouts - self.reserved))
        while rollouts > 1:
            try:
                self.require(rollouts)
            except OutOfBudget:
                rollouts //= 2
            else:
                return rollouts
        self.require(1)
        return 1

    def require_prices(self, *models: str) -> None:
        """ConfigError unless these models, and all models used so far, have a price, where money is
        limited."""
        if self.budget.usd is None:
            return
        used = {model for model, _ in self.agents + self.editing}
        for model in sorted({*models, *used}):
            if self.price(model) is None:
                raise ConfigError(
                    f"the budget is ${self.budget.usd:g}, but the price of {model!r} is unknown; "
                    f"give prices={{{model!r}: (IN, OUT)}}, dollars for a million tokens read and "
                    "written, (0, 0) if it is free"
                )

    def cost_of(self, usage: Usage) -> float:
        """US dollars, of the models with a price."""
        tokens = Counter[tuple[str, int]]()
        _add(tokens, usage)
        return self._cost(tokens)

    def _cost(self, tokens: Counter[tuple[str, int]]) -> float:
        return sum(
            count * (self.price(model) or (0.0, 0.0))[direction] / 1e6
            for (model, direction), count in tokens.items()
        )


def _add(total: Counter[tuple[str, int]], usage: Usage) -> None:
    for model, counts in usage.items():
        for direction, count in enumerate(counts):
            total[model, direction] += count


def usage_of(spans: Sequence[Span]) -> Usage:
    """Tokens of the calls among the spans, each call once, by model."""
    usage: dict[str, tuple[int, int]] = {}
    for step in read_steps(spans):
        counts = token_counts(step.span.attributes) if step.kind == "call" else None
        if counts is not None:
            model = model_name(step.span.attributes) or "unknown"
            read, written = usage.get(model, (0, 0))
            usage[model] = (read + counts[0], written + counts[1])
    return usage
