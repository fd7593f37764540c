"""What a training came to: result.json, and the learning curve as a picture."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from agentlightning.algorithm.curves import draw_learning_curve
from agentlightning.cli.config import TrainConfig
from agentlightning.trainer import FitResult


def write_report(result: FitResult, config: TrainConfig, out: Path, seconds: float) -> None:
    """Write both into `out`. `curve` has the mean reward of each step's rollouts, `heldout` that of held-out tasks."""
    curve, heldout = (
        [[one.step, round(one.values[name], 4)] for one in result.metrics if name in one.values]
        for name in ("reward", "val_reward")
    )
    summary = {
        "example": "text_to_sql",
        "seed": config.seed,
        "before": heldout[0][1],
        "after": heldout[-1][1],
        "heldout": heldout,
        "curve": curve,
        "seconds": round(seconds, 1),
        "stopped_because": result.stopped_because,
        "settings": msgspec.to_builtins(config),
    }
    (out / "result.json").write_text(json.dumps(summary, indent=1) + "\n")
    draw_learning_curve(result.metrics, out / "learning_curve.png", f"text to SQL, seed {config.seed}")
