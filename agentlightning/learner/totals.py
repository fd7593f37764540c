"""Sums over the tokens of one step, for its metrics."""

from __future__ import annotations

import math

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
    """Of all tokens."""

    def __init__(self, mismatch: Mismatch) -> None:
        self.mismatch = mismatch
        self.loss = 0.0
        self.reference_kl = 0.0
        self.tokens = 0
        self.clipped = 0
        self.entropy = 0.0
        self.k3 = 0.0
        self.value_loss: float | None = None  # where there is no critic
        self.values_clipped = 0
        self.ratio = 0.0
        self.ratio_min = math.inf
        self.ratio_max = 0.0

    def add(self, loss: float, log_ratio: Tensor, clipped: Tensor, entropy: Tensor) -> None:
        ratio = log_ratio.exp()
        self.loss += loss
        self.tokens += log_ratio.numel()
        self.clipped += int(clipped.sum())
        self.entropy += float(entropy.sum())
        self.k3 += float((ratio - 1 - log_ratio).sum())
        self.ratio += float(ratio.sum())
        low, high = ratio.aminmax()
        self.ratio_min, self.ratio_max = min(self.ratio_min, float(low)), max(self.ratio_max, float(high))

    def add_values(self, loss: float, clipped: Tensor) -> None:
        self.value_loss = (self.value_loss or 0.0) + loss
        self.values_clipped += int(clipped.sum())

    def metrics(self) -> dict[str, float]:
        return {
            "loss": self.loss,
            "tokens": float(self.tokens),
            "entropy": self.entropy / self.tokens,
            "clip_fraction": self.clipped / self.tokens,
            "behaviour_kl": self.k3 / self.tokens,
            "ratio_mean": self.ratio / self.tokens,
            "ratio_min": self.ratio_min,
            "ratio_max": self.ratio_max,
            "max_ratio_error": max(self.ratio_max - 1, 1 - self.ratio_min),
            "reference_kl": self.reference_kl,
            **self._of_critic(),
            **self.mismatch.metrics(),
        }

    def _of_critic(self) -> dict[str, float]:
        if self.value_loss is None:
            return {}
        return {"value_loss": self.value_loss, "value_clip_fraction": self.values_clipped / self.tokens}
