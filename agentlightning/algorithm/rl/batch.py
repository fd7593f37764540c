"""Builds training sequences from a step's groups. Training and a replay from the store give the
same batch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias, TypeVar, cast

import msgspec
import numpy as np

from agentlightning.algorithm.rl.metrics import credit_metrics
from agentlightning.algorithm.rl.settings import RLSettings
from agentlightning.data.credit import RewardedGroup
from agentlightning.data.sequences import (
    CreditedTransition,
    Level,
    TrainingSequence,
    build_sequences,
    weighed,
)
from agentlightning.data.transitions import FloatArray
from agentlightning.errors import ConfigError

T = TypeVar("T")

Sequences: TypeAlias = Sequence[TrainingSequence]
# A critic's value of each sampled token, float32[N] per sequence (`Learner.values`).
Values: TypeAlias = Callable[[Sequences], Sequence[FloatArray]]

BATCHES_FILE: Final = "batches.jsonl"  # in the run's directory, one `RecordedBatch` a line


class RecordedBatch(msgspec.Struct, frozen=True):
    """A step's training data: the rollouts of each group, in order, and the weights. If a step was
    repeated after a kill, the last line counts."""

    step: int
    policy_version: int
    groups: tuple[tuple[str, ...], ...]


def recorded_batches(directory: Path) -> dict[int, RecordedBatch]:
    """The training data of each step of the run in `directory`, by number. ConfigError if nothing
    was recorded."""
    path = directory / BATCHES_FILE
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error}; a training run writes it as it goes"
        ) from None
    batches: list[RecordedBatch] = []
    for line in lines:
        # a line that a full disk or a kill cut short; its step was repeated
        with suppress(msgspec.MsgspecError):
            batches.append(msgspec.json.decode(line, type=RecordedBatch))
    if not batches:
        raise ConfigError(f"{path} holds no step: the run trained nothing yet")
    return {batch.step: batch for batch in batches}


@dataclass(frozen=True)
class Batch:
    """One policy's training data of a step; empty if every group was skipped."""

    sequences: list[TrainingSequence]
    metrics: dict[str, float]


def make_batches(
    algorithm: RLSettings, groups: Sequence[RewardedGroup], critics: Mapping[str, Values | None]
) -> dict[str, Batch]:
    """Credit the groups of one step and lay their calls into sequences: a batch for each policy in
    `critics`, with its critic if any. With several policies, each policy's calls are compared with
    its own calls in the other rollouts. Groups without anything to learn are dropped and
    counted."""
    batches: dict[str, Batch] = {}
    enough = [group for group in groups if len(group.rewards) >= algorithm.fewest_rewarded]
    for model, values in critics.items():
        own = enough if len(critics) == 1 else [group.of_model(model) for group in enough]
        credited = algorithm.credited(
            own, None if values is None else values_of(own, algorithm.level, values)
        )
        useful = [any(item.trains for calls in group for item in calls) for group in credited]
        sequences = [
            sequence if trains else sequence.only(np.zeros(len(sequence.positions), bool))
            for number, (group, rollouts, trains) in enumerate(
                zip(own, credited, useful, strict=True)
            )
            for index, calls in enumerate(rollouts)
            for sequence in build_sequences(
                weighed(calls, algorithm.weigh_tokens)
                if algorithm.weigh_tokens and calls
                else calls,
                algorithm.level,
                group.origin(index, number),
            )
            if trains or sequence.observed is not None
        ]
        metrics = {
            "groups_too_few_rewarded": float(len(groups) - len(enough)),
            "groups_without_variance": float(len(credited) - sum(useful)),
            "sequences": float(len(sequences)),
            **algorithm.measured,
            **credit_metrics(credited),
        }
        versions = [
            version for sequence in sequences if (version := sequence.oldest_version) is not None
        ]
        if versions:
            metrics["policy_version_oldest"] = float(min(versions))
        batches[model] = Batch(sequences, metrics)
    return batches


def minibatches(
    sequences: Sequence[T], count: int, seed: int, step: int, epoch: int = 0
) -> list[list[T]]:
    """The sequences of a step in `count` parts (fewer if there are fewer), shuffled by seed, step
    and epoch."""
    order = list(sequences)
    random.Random(f"{seed}/minibatches/{step}{f'/{epoch}' if epoch else ''}").shuffle(order)
    count = min(count, len(order))
    bounds = [-(-len(order) * part // count) for part in range(count + 1)]
    return [order[start:end] for start, end in itertools.pairwise(bounds)]


def values_of(groups: Sequence[RewardedGroup], level: Level, values: Values) -> list[FloatArray]:
    """The values of each transition, in order, computed on the same sequences as in training."""
    rollouts = [transitions for group in groups for transitions in group.transitions]
    ends = np.cumsum(
        [len(transition.response_ids) for transitions in rollouts for transition in transitions]
    )
    if not len(ends):
        return []
    # Advantages carry each token's index, because sequences may have transitions in another order.
    numbers = iter(np.split(np.arange(ends[-1], dtype=np.float64), ends[:-1]))
    sequences = [
        sequence
        for transitions in rollouts
        for sequence in build_sequences(
            [
                CreditedTransition(transition, cast(FloatArray, next(numbers)))
                for transition in transitions
            ],
            level,
        )
    ]
    found = np.zeros(ends[-1], np.float32)
    for sequence, estimates in zip(sequences, values(sequences), strict=True):
        found[sequence.advantages.astype(np.int64)] = estimates
    return np.split(found, ends[:-1])
