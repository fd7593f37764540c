"""What is measured of an optimiser step, summed over its micro-batches, and over processes that had some of them each.

Knows sums, extremes and means per token. Knows no model and no loss.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from torch import Tensor


class Mismatch:
    """How far the learner's log-probabilities are from the engine's where both hold the same weights: of the tokens
    that `version` sampled, none where it is None."""

    def __init__(self, version: int | None) -> None:
        self.version = version
        self.tokens = 0
        self.k3 = 0.0
        self.worst = 0.0

    def add(self, difference: Tensor, versions: Tensor) -> None:
        """`difference` float[N] is learner − engine, `versions` int[N] who sampled the tokens."""
        if self.version is None:
            return
        own = difference[versions == self.version]
        if len(own):
            self.tokens += len(own)
            self.k3 += float((own.expm1() - own).sum())
            self.worst = max(self.worst, float(own.expm1().abs().max()))

    def metrics(self) -> dict[str, float]:
        if not self.tokens:
            return {}
        return {"inference_kl": self.k3 / self.tokens, "inference_mismatch": self.worst}


class Totals:
    """`sums` are over the batch, `per_token` too, of what is told as a mean."""

    def __init__(self, mismatch: Mismatch) -> None:
        self.mismatch = mismatch
        self.sums: defaultdict[str, float] = defaultdict(float, loss=0.0, tokens=0.0, reference_kl=0.0)
        self.per_token: defaultdict[str, float] = defaultdict(float)
        self.ratio_min = math.inf
        self.ratio_max = 0.0

    @classmethod
    def of_all(cls, parts: Sequence[Totals]) -> Totals:
        """Those of several processes, of each its micro-batches, as those of one."""
        out = cls(Mismatch(parts[0].mismatch.version))
        for part in parts:
            for name, value in part.sums.items():
                out.sums[name] += value
            for name, value in part.per_token.items():
                out.per_token[name] += value
            out.mismatch.tokens += part.mismatch.tokens
            out.mismatch.k3 += part.mismatch.k3
        out.ratio_min, out.ratio_max = min(p.ratio_min for p in parts), max(p.ratio_max for p in parts)
        out.mismatch.worst = max(part.mismatch.worst for part in parts)
        return out

    def add(self, loss: float, log_ratio: Tensor, **per_token: Tensor) -> None:
        ratio = log_ratio.exp()
        self.sums["loss"] += loss
        self.sums["tokens"] += log_ratio.numel()
        self.add_means(behaviour_kl=ratio - 1 - log_ratio, ratio_mean=ratio, **per_token)
        low, high = ratio.aminmax()
        self.ratio_min, self.ratio_max = min(self.ratio_min, float(low)), max(self.ratio_max, float(high))

    def add_means(self, **per_token: Tensor) -> None:
        for name, values in per_token.items():
            self.per_token[name] += float(values.sum())

    def metrics(self) -> dict[str, float]:
        return {
            **self.sums,
            **{name: total / self.sums["tokens"] for name, total in self.per_token.items()},
            "ratio_min": self.ratio_min,
            "ratio_max": self.ratio_max,
            "max_ratio_error": max(self.ratio_max - 1, 1 - self.ratio_min),
            **self.mismatch.metrics(),
        }
