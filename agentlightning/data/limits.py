"""Limits on merged trajectories, by the names they have in Agent Lightning 0.3, and how sequences are cut to them.

Knows sequences alone. What is cut is counted: whole calls where another sequence can begin with them or nothing of them
fits, else sampled tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, get_args

import numpy as np
import numpy.typing as npt

from agentlightning.data.sequences import Level, TrainingSequence
from agentlightning.errors import ConfigError, nearest

_KEYS: Final = ("level", "trajectory_max_prompt_length", "trajectory_max_response_length")


@dataclass(frozen=True)
class TrajectoryLimits:
    """A sequence begins with a prompt of at most `max_prompt_length` tokens and goes on for at most
    `max_response_length`, sampled or not; None is no limit."""

    max_prompt_length: int | None = None
    max_response_length: int | None = None


def read_trace_aggregator(settings: Mapping[str, Any]) -> tuple[Level, TrajectoryLimits]:
    """What 0.3's `trace_aggregator` says. ConfigError for an unknown key, a level that there is not, a limit that is no
    positive integer, or limits of trajectories at another level."""
    for key in settings:
        if key not in _KEYS:
            raise ConfigError(f"trace_aggregator has no key {key!r}; {nearest(str(key), _KEYS)}")
    level = settings.get("level", "transition")  # as in 0.3
    if level not in get_args(Level):
        raise ConfigError(f"trace_aggregator.level is {level!r}; {nearest(str(level), get_args(Level))}")
    limits = [settings.get(key) for key in _KEYS[1:]]
    for key, limit in zip(_KEYS[1:], limits, strict=True):
        if limit is not None and (type(limit) is not int or limit < 1):
            raise ConfigError(f"trace_aggregator.{key} is {limit!r}; give a number of tokens, at least 1")
        if limit is not None and level != "trajectory":
            raise ConfigError(
                f"trace_aggregator.{key} limits merged trajectories and level is {level!r}: leave it out, or limit "
                f"single calls by {key.removeprefix('trajectory_')}"
            )
    return level, TrajectoryLimits(*limits)


def cut_sequences(
    sequences: Sequence[TrainingSequence], limits: TrajectoryLimits
) -> tuple[list[TrainingSequence], Counter[str]]:
    """The sequences within the limits, and how many `calls` were cut whole, how many sampled `tokens` with them and
    from others, and how many `sequences` were begun anew because one was full.

    With a response limit of 4, (P A1 O A2), of which A2 does not fit: A2 is trained in a sequence of its own, after the
    prompt P A1 O, if that is short enough for a prompt; else its first tokens are, as many as fit."""
    cuts: Counter[str] = Counter()
    if limits == TrajectoryLimits():
        return list(sequences), cuts
    within: list[TrainingSequence] = []
    for sequence in sequences:
        parts = list(_parts(sequence, limits))
        within += parts
        kept = sum(len(part.positions) for part in parts)
        calls = sum(int(part.transitions[-1]) + 1 for part in parts)
        cuts["tokens"] += len(sequence.positions) - kept
        cuts["calls"] += int(sequence.transitions[-1]) + 1 - calls
        cuts["sequences"] += max(0, len(parts) - 1)
    return within, cuts


def _parts(sequence: TrainingSequence, limits: TrajectoryLimits) -> list[TrainingSequence]:
    """What of a sequence fits, as one or several."""
    longest_prompt = limits.max_prompt_length or len(sequence)
    longest_response = limits.max_response_length or len(sequence)
    parts: list[list[npt.NDArray[np.int64]]] = []  # of each, the indices of the sampled tokens of each call
    end = 0  # where what is open has to end
    for sampled in np.split(np.arange(len(sequence.positions)), np.flatnonzero(np.diff(sequence.transitions)) + 1):
        positions = sequence.positions[sampled]
        prompt = int(positions[0])
        if int(positions[-1]) >= end and prompt <= longest_prompt:
            parts.append([])
            end = prompt + longest_response
        if prompt < end:
            parts[-1].append(sampled[positions < end])
    return [_part(sequence, np.concatenate(part)) for part in parts]


def _part(sequence: TrainingSequence, sampled: npt.NDArray[np.int64]) -> TrainingSequence:
    if len(sampled) == len(sequence.positions):
        return sequence
    transitions = sequence.transitions[sampled]
    return replace(
        sequence,
        token_ids=sequence.token_ids[: sequence.positions[sampled[-1]] + 1],
        positions=sequence.positions[sampled],
        transitions=transitions - transitions[0],
        logprobs=sequence.logprobs[sampled],
        advantages=sequence.advantages[sampled],
        versions=sequence.versions[sampled],
        values=None if sequence.values is None else sequence.values[sampled],
        value_targets=None if sequence.value_targets is None else sequence.value_targets[sampled],
    )
