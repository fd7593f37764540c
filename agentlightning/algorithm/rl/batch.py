"""The rollouts of a step → its training sequences, and what was counted on the way.

`make_batch` is a pure function of the algorithm and the traced rollouts: the loop and a replay from the store give the
same batch.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias, cast

import msgspec
import numpy as np

from agentlightning.algorithm.rl.reinforcement import Reinforcement
from agentlightning.data.continuity import continuity
from agentlightning.data.credit_table import RewardedGroup
from agentlightning.data.recorded import rewarded_group
from agentlightning.data.sequences import CreditedTransition, Level, TrainingSequence, build_sequences
from agentlightning.data.transitions import FloatArray, TracedRollout, tool_success, trace_rollout
from agentlightning.store.base import LightningStore
from agentlightning.types import Rollout, Span

# What a critic says each sampled token is worth, one float32[N] per sequence (`Learner.values`).
Values: TypeAlias = Callable[[Sequence[TrainingSequence]], Sequence[FloatArray]]

BATCHES_FILE: Final = "batches.jsonl"  # in the run's directory, one `RecordedBatch` a line


class RecordedBatch(msgspec.Struct, frozen=True):
    """What a step trained on: the rollouts of each group, in order, and by which weights. Of a step that was done again
    after a kill the last line holds."""

    step: int
    policy_version: int
    groups: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Batch:
    """What a step teaches one policy; empty where every group taught nothing."""

    sequences: list[TrainingSequence]
    metrics: dict[str, float]


async def trace_group(
    store: LightningStore,
    rollout_ids: Sequence[str],
    algorithm: Reinforcement,
    models: Sequence[str],
) -> list[TracedRollout]:
    """What the store holds of these finished rollouts, as `algorithm` sees it when it trains `models`."""
    rollouts = {rollout.rollout_id: rollout for rollout in await store.query_rollouts(rollout_id_in=rollout_ids)}
    calls = algorithm.call_filter(*models)
    traced: list[TracedRollout] = []

    def trace(rollout: Rollout, spans: Sequence[Span]) -> TracedRollout:
        one = trace_rollout(rollout, spans, calls=calls, reward=algorithm.reward)
        return replace(one, breaks=continuity(one.transitions, spans).breaks)

    for name in rollout_ids:
        spans = await store.query_spans(name, "latest")
        traced.append(await asyncio.to_thread(trace, rollouts[name], spans))
    return traced


def make_batches(
    algorithm: Reinforcement, groups: Sequence[Sequence[TracedRollout]], critics: Mapping[str, Values | None]
) -> dict[str, Batch]:
    """The batch of each policy, which `critics` names with its critic if it has one: its own calls, compared with its
    own calls in the other rollouts."""
    if len(critics) == 1:
        return {model: make_batch(algorithm, groups, values) for model, values in critics.items()}
    return {
        model: make_batch(algorithm, [[_only(traced, model) for traced in group] for group in groups], values)
        for model, values in critics.items()
    }


def _only(traced: TracedRollout, model: str) -> TracedRollout:
    return replace(traced, transitions=tuple(call for call in traced.transitions if call.model == model))


def make_batch(
    algorithm: Reinforcement, groups: Sequence[Sequence[TracedRollout]], values: Values | None = None
) -> Batch:
    """Credit the groups of one step, with a critic's `values` where there is one, and lay their calls into sequences.
    Groups that teach nothing are dropped and counted."""
    rewarded = [rewarded_group(group, algorithm.unrewarded) for group in groups]
    enough = [group for group in rewarded if len(group.rewards) >= algorithm.fewest_rewarded]
    sequences: list[TrainingSequence] = []
    flat = 0
    said = None if values is None else values_of(enough, algorithm.level, values)
    credited = algorithm.credited(enough, said)
    for group in credited:
        if not any(item.teaches for transitions in group for item in transitions):
            flat += 1
            continue
        for transitions in group:
            sequences += build_sequences(transitions, algorithm.level)
    metrics = {
        "groups_too_few_rewarded": float(len(groups) - len(enough)),
        "groups_without_variance": float(flat),
        "sequences": float(len(sequences)),
        **algorithm.measured,
        **_advantage_metrics(credited),
        **_value_metrics(credited),
    }
    versions = [version for one in sequences if (version := one.oldest_version) is not None]
    if versions:
        metrics["policy_version_oldest"] = float(min(versions))
    return Batch(sequences, metrics)


def rollout_metrics(
    algorithm: Reinforcement,
    groups: Sequence[Sequence[TracedRollout]],
    useless: Sequence[Sequence[TracedRollout]] = (),
) -> dict[str, float]:
    """What the rollouts of a step came to, whatever is learned from them. The mean rewards are over those of `useless`
    groups too, which these replaced: a policy that is always right would seem to earn nothing."""
    rollouts = [traced for group in groups for traced in group]
    measured = [*groups, *useless]
    rewards = [reward for group in measured for reward in rewarded_group(group, algorithm.unrewarded).rewards]
    calls = [transition for traced in rollouts for transition in traced.transitions]
    return {
        "reward": sum(rewards) / max(1, len(rewards)),
        "rollouts": float(len(rollouts)),
        "unrewarded": float(sum(traced.reward is None for traced in rollouts)),
        "calls": float(len(calls)),
        "sampled_tokens": float(sum(len(call.response_ids) for call in calls)),
        **_lengths("prompt_tokens", [len(call.prompt_ids) for call in calls]),
        **_lengths("response_tokens", [len(call.response_ids) for call in calls]),
        "calls_excluded": float(sum(traced.excluded.total() for traced in rollouts)),
        "clock_skew_seconds": max((traced.clock_skew or 0.0 for traced in rollouts), key=abs, default=0.0),
        **_mean_terms(traced for group in measured for traced in group),
        **_by_name(rollouts),
        **_unmerged(rollouts),
    }


def groups_that_earned(algorithm: Reinforcement, groups: Sequence[Sequence[TracedRollout]]) -> list[bool]:
    """Whether a rollout of each group has a reward above 0, terms that were added to the agent's own aside."""
    return [any(one.reward_terms.get(algorithm.reward.base, 0.0) > 0 for one in group) for group in groups if group]


def minibatches(
    sequences: Sequence[TrainingSequence], count: int, seed: int, step: int, epoch: int = 0
) -> list[list[TrainingSequence]]:
    """The sequences of a step in `count` parts (fewer where there are fewer), shuffled by seed, step and epoch."""
    order = list(sequences)
    random.Random(f"{seed}/minibatches/{step}{f'/{epoch}' if epoch else ''}").shuffle(order)
    count = min(count, len(order))
    bounds = [-(-len(order) * part // count) for part in range(count + 1)]
    return [order[start:end] for start, end in itertools.pairwise(bounds)]


def _lengths(name: str, lengths: Sequence[int]) -> dict[str, float]:
    return {f"{name}_mean": sum(lengths) / max(1, len(lengths)), f"{name}_max": float(max(lengths, default=0))}


def values_of(groups: Sequence[RewardedGroup], level: Level, values: Values) -> list[FloatArray]:
    """The values of each transition, in order, computed as their sequences will be trained."""
    rollouts = [transitions for group in groups for transitions in group.transitions]
    ends = np.cumsum([len(transition.response_ids) for transitions in rollouts for transition in transitions])
    # What stands for advantages tells which token of all is which: sequences may hold transitions in another order.
    numbers = iter(np.split(np.arange(ends[-1] if len(ends) else 0, dtype=np.float64), ends[:-1]))
    sequences = [
        sequence
        for transitions in rollouts
        for sequence in build_sequences(
            [CreditedTransition(one, cast(FloatArray, next(numbers))) for one in transitions], level
        )
    ]
    found = np.zeros(ends[-1] if len(ends) else 0, np.float32)
    for sequence, said in zip(sequences, values(sequences), strict=True):
        found[sequence.advantages.astype(np.int64)] = said
    return np.split(found, ends[:-1]) if len(ends) else []


def _value_metrics(groups: Sequence[Sequence[Sequence[CreditedTransition]]]) -> dict[str, float]:
    """What a critic said of all sampled tokens before the step, and how much of the targets' variance that explains."""
    items = [item for group in groups for transitions in group for item in transitions]
    pairs = [(i.values, i.value_targets) for i in items if i.values is not None and i.value_targets is not None]
    if not pairs:
        return {}
    values, targets = (np.concatenate(side).astype(np.float64) for side in zip(*pairs, strict=True))
    metrics = {"value_mean": float(values.mean()), "value_target_mean": float(targets.mean())}
    if variance := float(targets.var()):
        metrics["explained_variance"] = 1 - float((targets - values).var()) / variance
    return metrics


def _advantage_metrics(groups: Sequence[Sequence[Sequence[CreditedTransition]]]) -> dict[str, float]:
    """Over all sampled tokens that were credited, those of groups that teach nothing too."""
    found = [item.advantages for group in groups for transitions in group for item in transitions]
    values = np.concatenate(found).astype(np.float64) if found else np.zeros(0)
    if not len(values):
        return {}
    return {
        "advantage_mean": float(values.mean()),
        "advantage_std": float(values.std()),
        "advantage_min": float(values.min()),
        "advantage_max": float(values.max()),
        "advantage_zero": float((values == 0).mean()),
    }


def _mean_terms(rollouts: Iterable[TracedRollout]) -> dict[str, float]:
    """The mean of each part of the rewards."""
    parts = [traced.reward_terms for traced in rollouts if traced.reward_terms]
    return {f"reward/{name}": sum(terms[name] for terms in parts) / len(parts) for name in (parts[0] if parts else ())}


def _by_name(rollouts: Sequence[TracedRollout]) -> dict[str, float]:
    """What rollouts came to, and what was left out or kept, by reason; how tools went."""
    return (
        _named("rollouts", Counter(traced.outcome for traced in rollouts))
        | _named("excluded", *(traced.excluded for traced in rollouts))
        | _named("kept", *(traced.kept for traced in rollouts))
        | _named("rewards_lost", *(traced.rewards_lost for traced in rollouts))
        | ({} if (worked := tool_success(rollouts)) is None else {"tool_success": worked})
    )


def _named(what: str, *counts: Counter[str]) -> dict[str, float]:
    return {f"{what}/{name}": float(count) for name, count in sum(counts, Counter[str]()).items()}


def _unmerged(rollouts: Sequence[TracedRollout]) -> dict[str, float]:
    """The share of rollouts with a call that should continue another and does not, and such calls by kind and agent."""
    breaks = [found for traced in rollouts for found in traced.breaks]
    kinds = Counter(found.kind for found in breaks)
    by_agent = Counter(f"{found.agent}/{found.kind}" for found in breaks if found.agent)
    return {"unmerged/rollouts": sum(bool(traced.breaks) for traced in rollouts) / max(1, len(rollouts))} | {
        f"unmerged/{name}": float(count) for name, count in (*kinds.items(), *by_agent.items())
    }
