"""The record of a prompt search in a store: candidates, who came of whom, rounds and scores, in the
metadata of resources; and the tasks on which they were measured, in those of rollouts."""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from agentlightning.types import Mode

SEED: Final = "seed"
CANDIDATE: Final = "candidate"
ROUND: Final = "round"
MEASURE: Final = "measure"
Measure: TypeAlias = tuple[str, Mode, int]
"""Name of a candidate, mode, number of the task among those of the mode."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A set of texts, made in a round from those of a parent. `copied` are words of a task that the
    changed text repeats."""

    name: str
    round: int
    texts: dict[str, str]
    parent: str | None = None
    changed: str | None = None
    critique: str | None = None
    copied: str | None = None


class Score(msgspec.Struct, frozen=True):
    """Mean reward over `tasks` held-out tasks; `failed` of them were not rewarded and count 0.
    `tokens` are read and written for a rollout, on average; in `overflows` of the rollouts a call
    was refused as too long for its model."""

    mean: float
    tasks: int
    failed: int = 0
    tokens: float = 0.0
    overflows: int = 0


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a round; round 0 measures the seed. `rejected` is why edits gave no
    candidate, by their names."""

    number: int
    beam: list[str]
    scores: dict[str, Score]
    rejected: dict[str, str] = {}
    final: bool = False
