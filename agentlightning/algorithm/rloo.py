"""RLOO: REINFORCE whose baseline is what the other rollouts of the group got (arXiv:2402.14740)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agentlightning.algorithm.grpo import GRPO


@dataclass(kw_only=True)
class RLOO(GRPO):
    """A_i = R_i − the mean R of the others of its group. It is not divided by a spread, so that a group teaches as much
    as its rewards differ."""

    baseline: Any = "rloo"
    name: str = "rloo"
