"""Candidates and rounds as resources versions, from which an interrupted search continues.

A candidate's version has its templates; its parent is the version it was made from, and its metadata say which template
was changed, by which critique, and how. At the end of a round its leader is stored again, as the latest version, with
the scores of all candidates in the race.
"""

from __future__ import annotations

import difflib
from typing import Final

import msgspec

from agentlightning.algorithm.base import RunContext
from agentlightning.errors import ConfigError, nearest
from agentlightning.types import LLM, PromptTemplate, ResourcesUpdate

CANDIDATE: Final = "candidate"
ROUND: Final = "round"


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A set of prompts. `texts` are those of the tuned templates. `calls` are the tokens that the optimiser had read
    and written by then, by model."""

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
    """The result of a round; round 0 measures the seed. `rejected` is why branches gave no candidate; `calls` are the
    tokens that the optimiser had read and written by then, by model."""

    number: int
    beam: list[str]
    scores: dict[str, Score]
    rejected: dict[str, str] = {}
    calls: dict[str, tuple[int, int]] = {}
    final: bool = False


class Lineage:
    """The candidates of one run by name, and its rounds."""

    def __init__(self, context: RunContext, base: ResourcesUpdate, wanted: tuple[str, ...]) -> None:
        there = {name: resource for name, resource in base.resources.items() if isinstance(resource, PromptTemplate)}
        if unknown := [name for name in wanted if name not in there]:
            raise ConfigError(f"templates: there is no prompt template {unknown[0]!r}; {nearest(unknown[0], there)}")
        if not there:
            raise ConfigError(
                "there is no prompt to optimise; give the Trainer initial_resources={'prompt': agl.PromptTemplate(…)}"
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
        return next((candidate for candidate in self.candidates.values() if candidate.texts == texts), None)

    def templates(self, candidate: Candidate) -> dict[str, PromptTemplate]:
        return {
            name: msgspec.structs.replace(self.tuned[name], template=text) for name, text in candidate.texts.items()
        }

    def calls(self) -> dict[str, tuple[int, int]]:
        """Tokens that the optimiser has read and written, by model, as far as stored."""
        stored = [item.calls for item in (*self.candidates.values(), *self.rounds)]
        return max(stored, key=lambda calls: sum(map(sum, calls.values())), default={})

    def models(self) -> list[str]:
        """Models whose endpoints agents receive."""
        return sorted({resource.model for resource in self._base.resources.values() if isinstance(resource, LLM)})

    async def version(self, candidate: Candidate) -> ResourcesUpdate:
        """The candidate's version beside the other resources of this process; stored if missing, because a model's
        endpoint changes after a restart."""
        resources = {**self._base.resources, **self.templates(candidate)}
        for update in self._stored.get(candidate.name, ()):
            if update.resources == resources:
                return update
        self.candidates[candidate.name] = candidate  # known before it is stored: other branches may find the same texts
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
        """End a round: its leader becomes the latest version, and its prompts are written to the run's directory."""
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
        lines += difflib.unified_diff(parent.texts[name].splitlines(), text.splitlines(), *files, lineterm="")
    return "\n".join(lines)
