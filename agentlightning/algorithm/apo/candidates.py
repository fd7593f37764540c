"""Candidates and rounds as resources versions, from which an interrupted search continues; and the
search's budget.

A candidate's version has its templates; its parent is the version it was made from, and its
metadata say which template was changed, by which critique, and how. At the end of a round its
leader is stored again, as the latest version, with the scores of all candidates in the race."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec

from agentlightning.algorithm.base import RunContext
from agentlightning.errors import AgentLightningError, ConfigError, nearest
from agentlightning.types import LLM, PromptTemplate, ResourcesUpdate

Price: TypeAlias = tuple[float, float]
"""US dollars for a million tokens read, and written."""
Usage: TypeAlias = Mapping[str, tuple[int, int]]
"""By model, tokens read and tokens written."""

_DATE: Final = re.compile(r"-\d{4}.*")


class OutOfBudget(AgentLightningError):
    """The next part of the search would exceed its budget."""


@dataclass
class Budget:
    """What a search may spend, and has spent. `None` is no limit. `free` are models that cost
    nothing, such as those served here. Tokens and money are known only afterwards: a batch is not
    started if it would exceed the budget at the mean cost per rollout so far."""

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
        """The price of `model`, or, for a dated release, of its base name (`gpt-4o` for
        `gpt-4o-2024-08-06`)."""
        if model in self.free:
            return 0.0, 0.0
        fits = (
            price
            for name, price in self.prices.items()
            if _DATE.fullmatch(model.removeprefix(name))
        )
        return self.prices.get(model) or next(fits, None)

    def require(self, rollouts: int = 0) -> None:
        """OutOfBudget unless so many more rollouts fit, or without a number one more call.
        ConfigError if the price of a model is needed but unknown."""
        if self.max_rollouts is not None and self.rollouts + rollouts > self.max_rollouts:
            raise OutOfBudget(
                f"max_rollouts is {self.max_rollouts}: {self.rollouts} are done, the next need "
                f"{rollouts}"
            )
        spent = self.spent
        more = rollouts / max(1, self.rollouts)
        if (
            self.max_tokens is not None
            and spent["tokens"] + more * _tokens(self.agents) > self.max_tokens
        ):
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
                    f"max_usd is {self.max_usd:g}, but the price of {model!r} is unknown; give "
                    f"prices={{{model!r}: (IN, OUT)}}, dollars for a million tokens read and "
                    "written, (0, 0) if it is free"
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


CANDIDATE: Final = "candidate"
ROUND: Final = "round"


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A set of prompts. `texts` are those of the tuned templates. `calls` are the tokens that the
    optimiser had read and written by then, by model."""

    name: str
    round: int
    texts: dict[str, str]
    parent: str | None = None
    changed: str | None = None
    critique: str | None = None
    calls: dict[str, tuple[int, int]] = {}


class Score(msgspec.Struct, frozen=True):
    """Mean reward over `tasks` held-out tasks; `failed` of them were not rewarded and count 0."""

    mean: float
    tasks: int
    failed: int = 0


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a round; round 0 measures the seed. `rejected` is why branches gave no
    candidate; `calls` are the tokens that the optimiser had read and written by then, by model."""

    number: int
    beam: list[str]
    scores: dict[str, Score]
    rejected: dict[str, str] = {}
    calls: dict[str, tuple[int, int]] = {}
    final: bool = False


class Lineage:
    """The candidates of one run by name, and its rounds."""

    def __init__(self, context: RunContext, base: ResourcesUpdate, wanted: tuple[str, ...]) -> None:
        there = {
            name: resource
            for name, resource in base.resources.items()
            if isinstance(resource, PromptTemplate)
        }
        if unknown := [name for name in wanted if name not in there]:
            raise ConfigError(
                f"templates: there is no prompt template {unknown[0]!r}; "
                f"{nearest(unknown[0], there)}"
            )
        if not there:
            raise ConfigError(
                "there is no prompt to optimise; give the Trainer initial_resources={'prompt': "
                "agl.PromptTemplate(…)}"
            )
        self.tuned = {name: there[name] for name in wanted or there}
        self.candidates: dict[str, Candidate] = {}
        self.rounds: list[Round] = []
        self._context = context
        self._base = base
        self._stored: dict[str, list[ResourcesUpdate]] = {}

    async def open(self) -> None:
        """Read what the run stored earlier."""
        for update in await self._context.store.query_resources():
            if update.run_id != self._context.run.run_id:
                continue
            if CANDIDATE in update.metadata:
                candidate = msgspec.convert(update.metadata[CANDIDATE], Candidate)
                self._remember(candidate, update)
            elif ROUND in update.metadata:
                self.rounds.append(msgspec.convert(update.metadata[ROUND], Round))

    def seed(self) -> Candidate:
        """The initial prompts."""
        texts = {name: template.template for name, template in self.tuned.items()}
        return self.candidates.get("seed") or Candidate(name="seed", round=0, texts=texts)

    def of_texts(self, texts: dict[str, str]) -> Candidate | None:
        """The candidate with exactly these texts, if there is one."""
        return next(
            (candidate for candidate in self.candidates.values() if candidate.texts == texts), None
        )

    def templates(self, candidate: Candidate) -> dict[str, PromptTemplate]:
        return {
            name: msgspec.structs.replace(self.tuned[name], template=text)
            for name, text in candidate.texts.items()
        }

    def calls(self) -> dict[str, tuple[int, int]]:
        """Tokens that the optimiser has read and written, by model, as far as stored."""
        stored = [item.calls for item in (*self.candidates.values(), *self.rounds)]
        return max(stored, key=lambda calls: sum(map(sum, calls.values())), default={})

    def models(self) -> list[str]:
        """Models whose endpoints agents receive."""
        return sorted(
            {
                resource.model
                for resource in self._base.resources.values()
                if isinstance(resource, LLM)
            }
        )

    async def version(self, candidate: Candidate) -> ResourcesUpdate:
        """The candidate's version beside the other resources of this process; stored if missing,
        because a model's endpoint changes after a restart."""
        resources = {**self._base.resources, **self.templates(candidate)}
        for update in self._stored.get(candidate.name, ()):
            if update.resources == resources:
                return update
        # known before it is stored: other branches may find the same texts
        self.candidates[candidate.name] = candidate
        parent = self.candidates.get(candidate.parent or "")
        diff = "" if parent is None else difference(parent, candidate)
        above = self._base if parent is None else await self.version(parent)
        update = await self._context.store.add_resources(
            resources,
            {CANDIDATE: msgspec.to_builtins(candidate), "diff": diff},
            run_id=self._context.run.run_id,
            parent_id=above.resources_id,
        )
        self._remember(candidate, update)
        return update

    async def publish(self, result: Round) -> None:
        """End a round: its leader becomes the latest version, and its prompts are written to the
        run's directory."""
        leader = self.candidates[result.beam[0]]
        version = await self.version(leader)
        await self._context.store.add_resources(
            version.resources,
            {ROUND: msgspec.to_builtins(result)},
            run_id=self._context.run.run_id,
            parent_id=version.resources_id,
        )
        self.rounds.append(result)
        folder = self._context.directory / "prompts"
        folder.mkdir(exist_ok=True)
        for name, text in leader.texts.items():
            (folder / f"{name}.txt").write_text(text, encoding="utf-8")

    def _remember(self, candidate: Candidate, update: ResourcesUpdate) -> None:
        self.candidates[candidate.name] = candidate
        self._stored.setdefault(candidate.name, []).append(update)


def difference(parent: Candidate, candidate: Candidate) -> str:
    """A unified diff of all templates."""
    lines: list[str] = []
    for name, text in candidate.texts.items():
        files = f"{parent.name}/{name}", f"{candidate.name}/{name}"
        lines += difflib.unified_diff(
            parent.texts[name].splitlines(), text.splitlines(), *files, lineterm=""
        )
    return "\n".join(lines)
