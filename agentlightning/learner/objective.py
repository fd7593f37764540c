"""The objective of a step: the loss of a micro-batch, composed of its terms, and the metrics of all micro-batches.

Knows log-probabilities; no models or optimisers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentlightning.data.aggregation import Tokens
from agentlightning.data.sequences import MicroBatch
from agentlightning.learner import losses
from agentlightning.learner.losses import Loss

if TYPE_CHECKING:
    from torch import Tensor


def objective(
    micro: MicroBatch,
    loss: Loss,
    totals: Totals,
    logprobs: Tensor,
    *,
    entropy: Tensor | None = None,
    reference: Tensor | None = None,
) -> Tensor:
    """Σ weights · loss(token) over the sampled tokens, plus Σ observed · −log p over the observed ones: a scalar with a
    gradient through `logprobs` float[N + M]. `entropy` and the `reference`'s log-probabilities, float[N + M], are
    needed if the loss has these terms."""
    from torch import from_numpy

    seen: Tensor | float = 0.0
    if len(micro.observed):
        count = len(micro.weights)
        seen = -(logprobs[count:] * from_numpy(micro.observed).to(logprobs.device)).sum()
        totals.sums["observation_loss"] += float(seen.detach())
        totals.sums["tokens_observed"] += len(micro.observed)
        if not count:
            return seen
        logprobs = logprobs[:count]
        entropy, reference = (part if part is None else part[:count] for part in (entropy, reference))
    arrays = (micro.logprobs, micro.advantages, micro.weights, micro.transitions, micro.versions)
    old, advantages, weights, transitions, versions = (from_numpy(part).to(logprobs.device) for part in arrays)
    tokens = Tokens(micro.sequences)
    per_token, clipped, metrics = losses.policy_loss(logprobs, old, advantages, transitions, loss, tokens)
    measured = {"clip_fraction": clipped, **{f"loss/{name}": metric for name, metric in metrics.items()}}
    if reference is not None:
        divergence = losses.kl(logprobs, reference, loss.kl_estimator)
        per_token = per_token + loss.kl_coefficient * divergence
        totals.sums["reference_kl"] += float((divergence.detach() * weights).sum())
    if entropy is not None:
        measured["entropy"] = entropy
        if loss.entropy_coefficient:
            per_token = per_token - loss.entropy_coefficient * entropy
    log_ratio = logprobs.detach() - old
    totals.add(log_ratio, **measured)
    totals.compare(log_ratio, versions)
    return (per_token * weights).sum() + seen


class Totals:
    """Metrics of a step, accumulated over micro-batches and processes: `sums`, `means` per sampled token, and `peaks`.
    Learner and engine are compared on the tokens that `version` sampled."""

    def __init__(self, version: int | None) -> None:
        self.version = version
        self.sums: defaultdict[str, float] = defaultdict(float, loss=0.0, tokens=0.0, reference_kl=0.0)
        self.means: defaultdict[str, float] = defaultdict(float)
        self.matched: defaultdict[str, float] = defaultdict(float)
        self.peaks: dict[str, float] = {}

    @classmethod
    def of_all(cls, parts: Sequence[Totals]) -> Totals:
        """Combine the totals of several processes, each of its own micro-batches."""
        out = cls(parts[0].version)
        for part in parts:
            for own, added in ((out.sums, part.sums), (out.means, part.means), (out.matched, part.matched)):
                for name, value in added.items():
                    own[name] += value
            for name, value in part.peaks.items():
                out.peaks[name] = max(out.peaks.get(name, value), value)
        return out

    def add(self, log_ratio: Tensor, **per_token: Tensor) -> None:
        ratio = log_ratio.exp()
        self.sums["tokens"] += log_ratio.numel()
        self.add_means(behaviour_kl=ratio - 1 - log_ratio, ratio_mean=ratio, **per_token)
        self._peak("ratio_max", ratio)
        self._peak("ratio_min", -ratio)

    def add_means(self, **per_token: Tensor) -> None:
        for name, values in per_token.items():
            self.means[name] += float(values.detach().sum())

    def compare(self, difference: Tensor, versions: Tensor) -> None:
        """`difference` float[N] is learner − engine; `versions` int[N] is the policy that sampled each token."""
        if self.version is not None and len(own := difference[versions == self.version]):
            self.matched["tokens"] += len(own)
            self.matched["k3"] += float((own.expm1() - own).sum())
            self._peak("inference_mismatch", own.expm1().abs())

    def _peak(self, name: str, values: Tensor) -> None:
        self.peaks[name] = max(self.peaks.get(name, -math.inf), float(values.max()))

    def mismatch(self) -> dict[str, float]:
        if not self.matched:
            return {}
        apart = self.matched["k3"] / self.matched["tokens"]
        return {"inference_kl": apart, "inference_mismatch": self.peaks["inference_mismatch"]}

    def metrics(self) -> dict[str, float]:
        if not self.sums["tokens"]:  # only observed tokens
            return dict(self.sums)
        lowest, highest = -self.peaks["ratio_min"], self.peaks["ratio_max"]
        return {
            **self.sums,
            **{name: total / self.sums["tokens"] for name, total in self.means.items()},
            "ratio_min": lowest,
            "ratio_max": highest,
            "max_ratio_error": max(highest - 1, 1 - lowest),
            **self.mismatch(),
        }
