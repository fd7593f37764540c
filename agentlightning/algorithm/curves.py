"""The learning curve of a run as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentlightning.errors import imported
from agentlightning.types import Metrics


def draw_learning_curve(metrics: Sequence[Metrics], path: Path, title: str) -> Path:
    """Write a PNG: mean training reward per step, and held-out reward."""
    matplotlib = imported("matplotlib.figure", "a curve", "agent-lightning-next[train]")
    figure = matplotlib.Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for label, name in (("training, mean of a step", "reward"), ("held-out", "val_reward")):
        points = [(one.step, one.values[name]) for one in metrics if name in one.values]
        if points:
            axes.plot(*zip(*points, strict=True), "-o" if len(points) < 20 else "-", label=label, markersize=4)
    axes.set(xlabel="training step", ylabel="reward", title=title)
    axes.grid(alpha=0.3)
    if len(axes.lines) > 1:
        figure.legend(loc="outside lower center", ncols=2)  # below, where it covers nothing
    figure.savefig(path, dpi=120)
    return path
