"""DAPO: GRPO with four changes for long answers and sparse rewards (arXiv:2503.14476)."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from agentlightning.algorithm.grpo import GRPO
from agentlightning.errors import ConfigError


@dataclass(kw_only=True)
class DAPO(GRPO):
    """Its changes: a higher upper clip (`clip_high`), groups without variance replaced by others (`dynamic_sampling`),
    the mean over all tokens (`aggregation`), and a soft penalty on answers that come close to `max_tokens`.

    The penalty is R − min(1, max(0, (longest answer − (L − B)) / B)) with L = `max_tokens` and B the last fifth of it,
    unless `reward` states an `overlong_penalty` of its own; `overlong=False` leaves it out."""

    clip_low: float | None = 0.2
    clip_high: float | None = 0.28
    dynamic_sampling: bool = True
    overlong: bool = True
    name: str = "dapo"

    def __post_init__(self) -> None:
        if self.overlong and not self.reward.overlong_penalty:
            if self.max_tokens is None:
                raise ConfigError(
                    "DAPO punishes answers that come close to the longest allowed; give max_tokens, or overlong=False"
                )
            self.reward = msgspec.structs.replace(
                self.reward,
                overlong_penalty=1.0,
                overlong_length=self.max_tokens,
                overlong_buffer=max(1, self.max_tokens // 5),
            )
        super().__post_init__()
