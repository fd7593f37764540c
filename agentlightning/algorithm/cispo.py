"""CISPO: the importance weight is clipped, not the update, so that no token is without gradient (arXiv:2506.13585)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agentlightning.algorithm.grpo import GRPO


@dataclass(kw_only=True)
class CISPO(GRPO):
    """GRPO's advantage; the loss of a token is −min(ratio, 1 + `clip_high`)·A·log p, without gradient through the
    ratio. There is no lower bound, as in the paper (`clip_low` 1)."""

    loss: Any = "cispo"
    clip_low: float | None = 1.0
    clip_high: float | None = 0.2
    name: str = "cispo"
