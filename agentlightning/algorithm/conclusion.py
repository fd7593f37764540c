"""Says of a training that did not improve its held-out reward how far it fell short, and what to
try next.

Knows evaluations and metrics; nothing of the algorithm that made them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from agentlightning.algorithm.evaluation import Evaluation
from agentlightning.algorithm.measures import mean_interval
from agentlightning.types import Metrics

_CONFIDENCE: Final = 0.95
_FLAT: Final = 0.02  # a change of the training reward that counts as none
_USELESS: Final = 0.7  # share of sampled tokens without an advantage that keeps a run from learning
_SOLVED: Final = 0.99


def conclusion(evaluations: Sequence[Evaluation], metrics: Sequence[Metrics]) -> str | None:
    """The words for the end of a training; None where the held-out reward rose by more than chance,
    or was not measured before and after the same number of tasks."""
    if (
        len(evaluations) < 2
        or len(evaluations[0].tasks) != len(evaluations[-1].tasks)
        or not evaluations[0].tasks
    ):
        return None
    first, last = (
        np.array([task.reward or 0.0 for task in evaluations[end].tasks]) for end in (0, -1)
    )
    difference = float((last - first).mean())
    interval = mean_interval(last - first, _CONFIDENCE) if len(first) > 1 else None
    if difference > 0 and (interval is None or interval[0] > 0):
        return None
    rewards = f"{first.mean():.3f} before, {last.mean():.3f} after"
    if interval is not None:
        rewards += (
            f", a difference of {difference:+.3f} with a 95 % interval of {interval[0]:+.3f} to "
            f"{interval[1]:+.3f}"
        )
    verb = (
        "fell" if interval is not None and interval[1] < 0 else "did not rise by more than chance"
    )
    advice = _advice(first, last, metrics, verb == "fell")
    return f"The held-out reward {verb} ({rewards}; {len(first)} rollouts). {advice}"


def _advice(first: np.ndarray, last: np.ndarray, metrics: Sequence[Metrics], fell: bool) -> str:
    """The next thing to try, by what the steps measured."""
    if first.mean() >= _SOLVED:
        return "These tasks were solved before: train on harder ones."
    steps = [one.values for one in metrics if one.step > 0 and "reward" in one.values]
    if not steps:
        return "Look at a few rollouts: agl rollouts ls, agl rollouts show ID."
    idle = np.mean([values.get("advantage_zero", 1.0) for values in steps])
    if idle > _USELESS:
        return (
            f"{idle:.0%} of the sampled tokens had no advantage, as whole groups earned the same "
            "reward: give tasks that are sometimes solved, a finer reward, or a larger "
            "group_size."
        )
    rewards = [values["reward"] for values in steps]
    part = max(1, len(rewards) // 4)
    before = float(np.mean(rewards[:part]))
    after = float(np.mean(rewards[-part:]))
    rates = [values["learning_rate"] for values in steps if values.get("learning_rate")]
    rate = f" (now {max(rates):g})" if rates else ""
    if fell or after < before - _FLAT:
        serve = (
            ", and serve the best checkpoint, not the last" if last.mean() < first.mean() else ""
        )
        return f"Try a learning rate a third as large{rate}{serve}."
    if after > before + _FLAT:
        return (
            f"The training reward rose from {before:.3f} to {after:.3f}: train on more tasks, "
            "like those held out, and hold out more of them, so that a small gain can be seen."
        )
    return (
        f"The training reward stayed at {after:.3f}: try a learning rate three times as "
        f"large{rate}, or more than {len(steps)} steps."
    )
