"""Curves of runs as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from agentlightning.errors import imported
from agentlightning.types import Metrics


def draw_learning_curve(metrics: Sequence[Metrics], path: Path, title: str) -> Path:
    """Write a PNG: mean training reward per step, and held-out reward."""
    names = {"training, mean of a step": "reward", "held-out": "val_reward"}
    curves: dict[str, list[tuple[float, float]]] = {
        label: [(one.step, one.values[name]) for one in metrics if name in one.values] for label, name in names.items()
    }
    return draw_curves(curves, path, title=title, along="training step", measured="reward")


def draw_curves(
    curves: Mapping[str, Sequence[tuple[float, float]]], path: Path, *, title: str, along: str, measured: str
) -> Path:
    """Write a PNG of several curves, by what each is called, over one another; few points have dots."""
    matplotlib = imported("matplotlib.figure", "a curve", "agent-lightning-next[train]")
    figure = matplotlib.Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for label, points in curves.items():
        if points:
            style = "-o" if len(points) < 20 else "-"
            axes.plot(*zip(*points, strict=True), style, label=_literal(label), markersize=4)
    axes.set(xlabel=_literal(along), ylabel=_literal(measured), title=_literal(title))
    axes.grid(alpha=0.3)
    if len(axes.lines) > 1:
        figure.legend(loc="outside lower center", ncols=2)  # below, where it covers nothing
    figure.savefig(path, dpi=120)
    return path


def _literal(text: str) -> str:
    """A dollar begins a formula."""
    return text.replace("$", r"\$")
