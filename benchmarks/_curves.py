"""What runs of `benchmarks/experiments.py` earned and spent, and its curves."""

from __future__ import annotations

import itertools
import math
import statistics
from pathlib import Path
from typing import Any, Final

Run = dict[str, Any]

# What a step spends, by the metrics that measure it.
SPENT: Final = {
    "sampled tokens": ("sampled_tokens",),
    "tokens computed by the learner": ("tokens_computed",),
    "CPU seconds": ("rollout_seconds", "learn_seconds"),
}


def reward(steps: list[dict[str, float]]) -> float:
    """The mean reward of these steps."""
    return statistics.mean(step["reward"] for step in steps)


def spent(one: Run, what: str) -> list[float]:
    """What a run had spent by the end of each step. CPU seconds of a run are divided as its
    seconds are."""
    used = [sum(step.get(name, 0.0) for name in SPENT[what]) for step in one["curve"]]
    scale = one["cpu_seconds"] / sum(used) if what == "CPU seconds" else 1.0
    return [scale * total for total in itertools.accumulate(used)]


def draw(found: dict[str, list[Run]], path: Path) -> None:
    """Mean training reward against rollouts, a line per seed, held-out reward before and after as
    dots."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.4 * len(found), 3.2), layout="constrained")
    for axes, (name, runs) in zip(
        figure.subplots(1, len(found), sharey=True, squeeze=False).flat, found.items(), strict=True
    ):
        for index, one in enumerate(runs):
            rollouts, total = [], 0.0
            for step in one["curve"]:
                total += step["rollouts"]
                rollouts.append(total)
            rewards = [step["reward"] for step in one["curve"]]
            axes.plot(
                rollouts, rewards, color=f"C{index}", linewidth=1, label=f"seed {one['seed']}"
            )
            ends = (0, total), (one["before"], one["after"])
            axes.plot(
                *ends,
                "o",
                color=f"C{index}",
                markersize=5,
                markeredgecolor="black",
                markeredgewidth=0.6,
            )
        axes.set(title=name, ylim=(0, 1), xlabel="rollouts")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("reward: line training, dots held-out")
    figure.axes[0].legend(loc="lower right", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def draw_spent(found: dict[str, list[Run]], path: Path) -> None:
    """Training reward, means over seeds of five steps, against what was spent."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.4 * len(SPENT), 3.4), layout="constrained")
    for axes, what in zip(figure.subplots(1, len(SPENT), sharey=True), SPENT, strict=True):
        for name, runs in found.items():
            steps = min(len(one["curve"]) for one in runs)
            at = [
                statistics.mean(spent(one, what)[end - 1] for one in runs)
                for end in range(5, steps + 1)
            ]
            rewards = [
                statistics.mean(reward(one["curve"][end - 5 : end]) for one in runs)
                for end in range(5, steps + 1)
            ]
            axes.plot(at, rewards, label=name)
        axes.set(ylim=(0, 1), xlabel=what)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("training reward, five steps, mean of seeds")
    figure.axes[0].legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=110)


def draw_air(found: dict[str, list[Run]], path: Path) -> None:
    """Held-out reward and the share of tool calls that fail, by step: means over seeds, and the
    range of the reward."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    reward, failing = figure.subplots(1, 2, sharex=True)
    for index, (name, runs) in enumerate(found.items()):
        steps = [int(step) for step in runs[0]["heldout"]]
        at = list(zip(*(one["heldout"].values() for one in runs), strict=True))
        reward.plot(steps, list(map(statistics.mean, at)), color=f"C{index}", label=name)
        reward.fill_between(
            steps, list(map(min, at)), list(map(max, at)), color=f"C{index}", alpha=0.15
        )
        shares = [[1 - step.get("tool_success", math.nan) for step in one["curve"]] for one in runs]
        means = list(map(statistics.mean, zip(*shares, strict=True)))
        failing.plot(range(1, len(means) + 1), means, color=f"C{index}")
    for axes, title in (
        (reward, "held-out reward: mean, range"),
        (failing, "tool calls that fail"),
    ):
        axes.set(title=title, ylim=(0, 1), xlabel="step")
        axes.grid(alpha=0.3)
    reward.legend(loc="upper left", fontsize=8)
    figure.savefig(path, dpi=110)
