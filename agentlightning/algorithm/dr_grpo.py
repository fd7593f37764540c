"""Dr. GRPO: GRPO without its two biases, towards long wrong answers and towards tasks of little spread
(arXiv:2503.20783)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agentlightning.algorithm.grpo import GRPO
from agentlightning.data.sequences import Aggregation
from agentlightning.errors import ConfigError


@dataclass(kw_only=True)
class DrGRPO(GRPO):
    """A_i = R_i − mean over the group, and a call's loss is the sum over its tokens divided by `constant_length`,
    `max_tokens` unless given."""

    baseline: Any = "dr_grpo"
    aggregation: Aggregation = "constant"
    name: str = "dr_grpo"

    def __post_init__(self) -> None:
        if self.aggregation == "constant" and self.constant_length is None:
            if self.max_tokens is None:
                raise ConfigError("Dr. GRPO divides by a constant length; give max_tokens, or constant_length")
            self.constant_length = self.max_tokens
        super().__post_init__()
