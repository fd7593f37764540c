"""Candidates: new texts for what a search may change, each stored as a version of the resources.

A candidate's version has its texts; its parent is the version it was made from, and its metadata
say which text was changed, by which critique, and how."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from agentlightning.algorithm.base import RunContext
from agentlightning.algorithm.prompt_search.tunable import Tunable
from agentlightning.prompts.lineage import CANDIDATE, ROUND, SEED, Candidate, Round
from agentlightning.types import LLM, ResourcesUpdate


class Candidates:
    """The candidates of one run, by name. The texts that the search begins with are `seed`, others
    are named by a hash of theirs."""

    def __init__(self, context: RunContext, base: ResourcesUpdate) -> None:
        self.by_name: dict[str, Candidate] = {}
        self.seed = Candidate(name=SEED, round=0, texts={})
        self._context = context
        self._base = base
        self._tunable: Tunable | None = None
        self._stored: dict[str, list[ResourcesUpdate]] = {}
        self._rounds: set[int] = set()

    def tune(self, tunable: Tunable) -> None:
        """Have candidates for these texts; until then there is the seed alone, which changes
        nothing."""
        self._tunable = tunable
        self.seed = self.of(tunable.texts, 0)

    async def open(self) -> None:
        """Read what the run stored earlier."""
        for update in await self._context.store.query_resources():
            if update.run_id != self._context.run.run_id:
                continue
            if CANDIDATE in update.metadata:
                stored = msgspec.convert(update.metadata[CANDIDATE], Candidate)
                self._stored.setdefault(stored.name, []).append(update)
            elif ROUND in update.metadata:
                self._rounds.add(msgspec.convert(update.metadata[ROUND], Round).number)

    def of(self, texts: Mapping[str, str], round: int, **made: Any) -> Candidate:
        """The candidate with these texts: the one that is known, or a new one."""
        packed = msgspec.json.encode(texts, order="sorted")
        name = hashlib.sha256(packed).hexdigest()[:8]
        if self._tunable is not None and texts == self._tunable.texts:
            name = SEED
            made = {}
        new = Candidate(name=name, round=round, texts=dict(texts), **made)
        return self.by_name.setdefault(name, new)

    def replaced(self, candidate: Candidate) -> frozenset[str]:
        """The texts of the candidate that the gateway puts into calls."""
        return frozenset() if self._tunable is None else self._tunable.replaced(candidate.texts)

    @property
    def models(self) -> list[str]:
        """Models whose endpoints agents receive."""
        given = self._base.resources.values()
        return sorted({resource.model for resource in given if isinstance(resource, LLM)})

    async def version(self, candidate: Candidate) -> ResourcesUpdate:
        """The candidate's version beside the other resources of this process; stored if missing,
        because a model's endpoint changes after a restart."""
        resources = dict(self._base.resources)
        if self._tunable is not None:
            resources |= self._tunable.resources(candidate.texts)
        versions = self._stored.setdefault(candidate.name, [])
        for update in versions:
            if update.resources == resources:
                return update
        above = self._base
        metadata: dict[str, Any] = {CANDIDATE: msgspec.to_builtins(candidate), "diff": ""}
        if candidate.parent is not None:
            parent = self.by_name[candidate.parent]
            above = await self.version(parent)
            metadata["diff"] = difference(parent, candidate)
        update = await self._context.store.add_resources(
            resources,
            metadata,
            run_id=self._context.run.run_id,
            parent_id=above.resources_id,
        )
        versions.append(update)
        return update

    async def publish(self, result: Round) -> bool:
        """End a round: its leader becomes the latest version, and its texts are written to the
        run's directory. False if the run has ended this round before."""
        leader = self.by_name[result.beam[0]]
        if self._tunable is not None:
            self._tunable.save(leader.texts, self._context.directory)
        if result.number in self._rounds and not result.final:
            return False
        version = await self.version(leader)
        await self._context.store.add_resources(
            version.resources,
            {ROUND: msgspec.to_builtins(result)},
            run_id=self._context.run.run_id,
            parent_id=version.resources_id,
        )
        return True


def difference(parent: Candidate, candidate: Candidate) -> str:
    """A unified diff of all texts."""
    lines: list[str] = []
    for name, text in candidate.texts.items():
        files = f"{parent.name}/{name}", f"{candidate.name}/{name}"
        lines += difflib.unified_diff(
            parent.texts[name].splitlines(), text.splitlines(), *files, lineterm=""
        )
    return "\n".join(lines)
