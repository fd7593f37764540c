"""What a training came to: result.json, and the learning curve as a picture."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from agentlightning.algorithm.curves import draw_learning_curve
from agentlightning.cli.config import TrainConfig
from agentlightning.trainer import FitResult


def write_report(result: FitResult, config: TrainConfig, out: Path, seconds: float) -> None:
    """Write both into `out`: held-out rewards before and after, and all that was measured of each step."""
    rewards = [evaluation.reward for evaluation in result.evaluations]
    summary = {
        "seed": config.seed,
        "before": rewards[0],
        "after": rewards[-1],
        "curve": [{"step": one.step, **one.values} for one in result.metrics],
        "seconds": seconds,
        "settings": msgspec.to_builtins(config),
    }
    (out / "result.json").write_text(json.dumps(summary, indent=1) + "\n")
    draw_learning_curve(result.metrics, out / "learning_curve.png", f"text to SQL, seed {config.seed}")
