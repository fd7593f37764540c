"""The metrics of a step: its rollouts, credit, optimiser steps and speed
(`docs/reference/metrics.md`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from agentlightning.algorithm.rl.groups import CompleteGroup, Dropped
from agentlightning.data.sequences import CreditedTransition
from agentlightning.data.transitions import TracedRollout, tool_success

_EXTREMES: Final[dict[str, Callable[[list[float]], float]]] = {
    "ratio_min": min,
    "ratio_max": max,
    "max_ratio_error": max,
    "weight_min": min,
    "weight_max": max,
}


def rollout_metrics(
    groups: Sequence[CompleteGroup], dropped: Dropped | None = None
) -> dict[str, float]:
    """The results of a step's rollouts, their age, and what was dropped. Mean rewards include the
    useless groups that were replaced; without them, a policy that is always right would seem to
    earn nothing."""
    dropped = dropped or Dropped()
    rollouts = [traced for group in groups for traced in group.rollouts]
    measured = [*groups, *dropped.useless]
    tries = [
        (share, reward, terms)
        for group in measured
        for share, reward, terms in zip(
            group.rewarded.lineage.shares, group.rewarded.rewards, group.rewarded.terms, strict=True
        )
    ]
    parts = next((terms for _, _, terms in tries if "unrewarded" not in terms), {})
    calls = [transition for traced in rollouts for transition in traced.transitions]
    breaks = [found for traced in rollouts for found in traced.breaks]
    worked = tool_success(rollouts)
    agreed = [group.agreement for group in measured if group.agreement is not None]
    return {
        "reward": _weighted((share, reward) for share, reward, _ in tries),
        **{
            f"reward/{name}": _weighted(
                (share, terms[name]) for share, _, terms in tries if name in terms
            )
            for name in parts
        },
        "rollouts": float(len(rollouts)),
        **_forks([traced for traced in rollouts if traced.rollout.source is not None]),
        "unrewarded": float(sum(traced.reward is None for traced in rollouts)),
        "calls": float(len(calls)),
        "sampled_tokens": float(sum(len(call.response_ids) for call in calls)),
        **_lengths("prompt_tokens", [len(call.prompt_ids) for call in calls]),
        **_lengths("response_tokens", [len(call.response_ids) for call in calls]),
        "calls_excluded": float(sum(traced.excluded.total() for traced in rollouts)),
        "clock_skew_seconds": max(
            (traced.clock_skew or 0.0 for traced in rollouts), key=abs, default=0.0
        ),
        "unmerged/rollouts": _mean([bool(traced.breaks) for traced in rollouts]),
        "groups_dropped": float(len(dropped.groups)),
        **({} if worked is None else {"tool_success": worked}),
        **({"judge_agreement": _mean(agreed)} if agreed else {}),
        **_counted("rollouts", (traced.outcome for traced in rollouts)),
        **_counted("excluded", *(traced.excluded.elements() for traced in rollouts)),
        **_counted("kept", *(traced.kept.elements() for traced in rollouts)),
        **_counted("rewards_lost", *(traced.rewards_lost.elements() for traced in rollouts)),
        **_counted(
            "unmerged",
            (found.kind for found in breaks),
            (f"{found.agent}/{found.kind}" for found in breaks if found.agent),
        ),
        **_counted("staleness", sorted(str(age) for group in groups for age in group.staleness)),
        **_counted("groups_dropped", dropped.reasons.elements()),
        **_counted("rollouts_dropped", dropped.rollouts.elements()),
    }


def credit_metrics(groups: Sequence[Sequence[Sequence[CreditedTransition]]]) -> dict[str, float]:
    """Advantages of all credited tokens, including useless groups; the critic's values before the
    step, and the share of the targets' variance that they explain."""
    items = [item for group in groups for transitions in group for item in transitions]
    values = np.concatenate([np.zeros(0), *(item.advantages for item in items)], dtype=np.float64)
    if not len(values):
        return {}
    metrics = {
        "advantage_mean": float(values.mean()),
        "advantage_std": float(values.std()),
        "advantage_min": float(values.min()),
        "advantage_max": float(values.max()),
        "advantage_zero": float((values == 0).mean()),
    }
    pairs = [
        (i.values, i.value_targets)
        for i in items
        if i.values is not None and i.value_targets is not None
    ]
    if pairs:
        estimates, targets = (
            np.concatenate(side).astype(np.float64) for side in zip(*pairs, strict=True)
        )
        metrics |= {
            "value_mean": float(estimates.mean()),
            "value_target_mean": float(targets.mean()),
        }
        if variance := float(targets.var()):
            metrics["explained_variance"] = 1 - float((targets - estimates).var()) / variance
    return metrics


def over_steps(history: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each metric over the optimiser steps of a batch: the sum for tokens, the extreme for
    extremes, else the mean."""
    totals: dict[str, float] = {}
    for name in {name: None for step in history for name in step}:
        values = [step[name] for step in history if name in step]
        if name.startswith("tokens"):
            totals[name] = sum(values)
        else:
            totals[name] = _EXTREMES.get(name, _mean)(values)
    if "tokens_computed" not in totals:  # corrections left out every token
        return totals
    return totals | {
        "tree_savings": totals["tokens_saved"]
        / (totals["tokens_saved"] + totals["tokens_computed"])
    }


class Usage(NamedTuple):
    """The usage of engines since their start: tokens sampled by all, and mean idle seconds of
    one."""

    generated_tokens: int
    idle_seconds: float


def speed_metrics(
    metrics: Mapping[str, float],
    waited: float,
    learned: float,
    before: Usage,
    after: Usage,
    *,
    overlaps: bool,
) -> dict[str, float]:
    """For a step with these `metrics`, given its seconds of waiting for rollouts and of
    learning."""
    total = waited + learned
    sampled, idle = (now - earlier for now, earlier in zip(after, before, strict=True))
    took = total if overlaps else waited
    computed = sum(
        value for name, value in metrics.items() if name.rpartition("/")[2] == "tokens_computed"
    )
    return {
        "rollout_seconds": waited,
        "learn_seconds": learned,
        "learner_idle": waited / total,
        "engine_idle": min(1.0, idle / total),
        "rollouts_per_second": metrics["rollouts"] / took,
        "tokens_per_second": metrics["sampled_tokens"] / took,
        "engine_tokens_per_second": sampled / max(1e-9, total - idle),
        "learner_tokens_per_second": computed / learned,
    }


def _forks(forks: Sequence[TracedRollout]) -> dict[str, float]:
    lost = sum(traced.is_lost_fork for traced in forks)
    return {"forks": float(len(forks)), "forks_lost": float(lost)} if forks else {}


def _weighted(shares_and_values: Iterable[tuple[float, float]]) -> float:
    """The mean of values by their shares: a rollout and its forks are one try together."""
    shares, values = np.array([*shares_and_values, (0.0, 0.0)], np.float64).T
    return float(shares @ values / (shares.sum() or 1.0))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def _lengths(name: str, lengths: Sequence[int]) -> dict[str, float]:
    return {f"{name}_mean": _mean(lengths), f"{name}_max": float(max(lengths, default=0))}


def _counted(what: str, *names: Iterable[str]) -> dict[str, float]:
    counts = Counter(name for some in names for name in some)
    return {f"{what}/{name}": float(count) for name, count in counts.items()}
