"""GSPO: the importance ratio is that of a whole call (arXiv:2507.18071)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agentlightning.algorithm.grpo import GRPO
from agentlightning.data.sequences import Aggregation


@dataclass(kw_only=True)
class GSPO(GRPO):
    """GRPO's advantage; every token of a call is weighed by s = exp(mean over the call of log p − log p of sampling),
    clipped to [1 − 3e-4, 1 + 4e-4] unless `clip_low` and `clip_high` say otherwise."""

    loss: Any = "gspo"
    aggregation: Aggregation = "sequence-mean"
    name: str = "gspo"
