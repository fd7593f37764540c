"""Recorded steps, trained again: from a checkpoint and what the store holds, without engine or agents.

Knows the record of a run (its batches and checkpoints), the store and learners. It does not know where a model comes
from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
from safetensors import deserialize

from agentlightning.algorithm.checkpoints import STATE_FILE
from agentlightning.algorithm.rl.batch import BATCHES_FILE, RecordedBatch, make_batches, trace_group
from agentlightning.algorithm.rl.policies import Policies, optimiser_steps
from agentlightning.algorithm.rl.reinforcement import Reinforcement
from agentlightning.data.sequences import TrainingSequence
from agentlightning.errors import ConfigError, NotFoundError, TrainingError
from agentlightning.store.base import LightningStore

_SHOWN = 5  # ids in a message


@dataclass(frozen=True)
class ReplayPlan:
    """What to load (None: the weights that the run started from), what to train after it, in order, and the checkpoint
    that the result should equal, None where none was kept."""

    start: Path | None
    batches: tuple[RecordedBatch, ...]
    goal: Path | None


@dataclass(frozen=True)
class ReplayedStep:
    """A step that was trained again, and the metrics of each of its optimiser steps; none where it taught nothing."""

    step: int
    sequences: int
    metrics: tuple[dict[str, float], ...]


def plan_replay(directory: Path, first: int | None = None, last: int | None = None) -> ReplayPlan:
    """How to train the steps `first` to `last` of the run in `directory` again: from the newest checkpoint before.

    Without steps, those that led to the newest checkpoint from the one before it. ConfigError names the steps that
    were not recorded."""
    batches = _recorded(directory)
    checkpoints = {
        int(state.parent.name.removeprefix("step-")): state.parent
        for state in (directory / "checkpoints").glob(f"step-*/{STATE_FILE}")
    }
    if last is None:
        last = max(checkpoints, default=max(batches))
    if first is None:
        first = max((step for step in checkpoints if step < last), default=0) + 1
    start = max((step for step in checkpoints if step < first), default=0)
    wanted = range(start + 1, last + 1)
    missing = [step for step in wanted if step not in batches]
    if missing or not wanted:
        raise ConfigError(
            f"steps {first} to {last} cannot be trained again from step {start} on: "
            f"{f'step {missing[0]} is' if missing else 'none of them is'} not in {directory / BATCHES_FILE}, which "
            f"holds steps {min(batches)} to {max(batches)}"
        )
    return ReplayPlan(checkpoints.get(start), tuple(batches[step] for step in wanted), checkpoints.get(last))


async def replay(
    plan: ReplayPlan,
    store: LightningStore,
    algorithm: Reinforcement,
    policies: Policies,
    *,
    seed: int,
    on_step: Callable[[ReplayedStep], None] = lambda step: None,
) -> None:
    """Train the steps of the plan, whose rollouts are in `store` unless the algorithm says where. The policies hold the
    weights that the run started from, and are called what its agents called them.

    NotFoundError names rollouts of a step that are not in the store any more; TrainingError the step in which a loss
    or a gradient is not finite."""
    if plan.start is not None:
        policies.load(plan.start)
    async with algorithm.traces_beside(store) as traces:
        for batch in plan.batches:
            metrics: list[dict[str, float]] = []
            sequences = await _sequences(batch, traces, algorithm, policies)
            for name, learner in policies.learners.items():
                steps = optimiser_steps(learner, sequences[name], algorithm, seed=seed, step=batch.step, version=None)
                try:
                    metrics += steps
                except TrainingError as error:
                    raise TrainingError(f"step {batch.step}, optimiser step {len(metrics) + 1}: {error}") from error
            on_step(ReplayedStep(batch.step, sum(map(len, sequences.values())), tuple(metrics)))


async def _sequences(
    batch: RecordedBatch, store: LightningStore, algorithm: Reinforcement, policies: Policies
) -> dict[str, list[TrainingSequence]]:
    """What the step trained each model on, made as the loop makes it."""
    ids = [name for group in (*batch.groups, *batch.replayed) for name in group]
    there = {rollout.rollout_id for rollout in await store.query_rollouts(rollout_id_in=ids)}
    gone = [name for name in ids if name not in there]
    if gone:
        raise NotFoundError(
            f"step {batch.step} cannot be trained again: {len(gone)} of its {len(ids)} rollouts are not in the store "
            f"any more: {', '.join(gone[:_SHOWN])}{' …' if len(gone) > _SHOWN else ''}"
        )
    sequences: dict[str, list[TrainingSequence]] = {model: [] for model in policies.names}
    for groups in (batch.groups, batch.replayed):
        traced = [await trace_group(store, group, algorithm, policies.names) for group in groups]
        for model, made in make_batches(algorithm, traced, policies.critics(algorithm)).items():
            sequences[model] += made.sequences
    return sequences


def _recorded(directory: Path) -> dict[int, RecordedBatch]:
    path = directory / BATCHES_FILE
    try:
        lines = path.read_bytes().splitlines()
        batches = [msgspec.json.decode(line, type=RecordedBatch) for line in lines if line.strip()]
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; a training run writes it as it goes") from None
    if not batches:
        raise ConfigError(f"{path} holds no step: the run trained nothing yet")
    return {batch.step: batch for batch in batches}


# --- the same bits -----------------------------------------------------------------------------------------------


def weights_digest(directory: Path) -> str:
    """SHA-256 of all tensors in a directory's safetensors files: their names, types, shapes and bytes, by name."""
    digest = hashlib.sha256()
    files = sorted(directory.rglob("*.safetensors"))
    tensors: list[tuple[str, Any]] = [one for file in files for one in deserialize(file.read_bytes())]
    for name, tensor in sorted(tensors, key=itemgetter(0)):
        digest.update(f"{name} {tensor['dtype']} {tensor['shape']}\n".encode() + tensor["data"])
    return digest.hexdigest()
