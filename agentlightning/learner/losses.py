"""The loss of a batch: its settings, each kind of loss per sampled token, their sum and a step's
metrics.

Every loss is a pure function of tensors of shape [N], which it takes by name; gradients flow only
through `logprobs`.
Aggregation is in the batch's weights. Tests compare the functions with verl. Imports no torch,
because algorithms make losses.

GRPO's: a sampled token with advantage A and r = exp(log p now − log p when sampled) costs max(−r·A,
−clip(r)·A) (`ppo_clip`), plus `kl_coefficient` times its divergence from the reference, if kept.
The loss is the sum of each token's cost times its weight (`data/aggregation.py`)."""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    NamedTuple,
    TypeAlias,
    cast,
    get_args,
)

from agentlightning.data.aggregation import AGGREGATIONS, Aggregation, Tokens
from agentlightning.data.functions import call, find_function, function_name, is_ours, takes
from agentlightning.data.sequences import MicroBatch
from agentlightning.errors import ConfigError, check_settings

if TYPE_CHECKING:
    from torch import Tensor

KLEstimator: TypeAlias = Literal["k1", "k2", "k3"]
LossKind: TypeAlias = Literal["ppo_clip", "policy_gradient", "importance_sampling", "gspo", "cispo"]
LossFunction: TypeAlias = "Callable[..., Tensor]"
Old: TypeAlias = Literal["behaviour", "proximal"]


def policy_gradient(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """−A·log p: right only for tokens sampled from the weights being trained (REINFORCE, Williams
    1992)."""
    return -advantages * logprobs


def importance_sampling(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """−r·A with r = exp(logprob − old), unclipped: at r = 1 its gradient is that of
    `policy_gradient`."""
    return -(logprobs - old_logprobs).exp() * advantages


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
) -> Tensor:
    """max(−r·A, −clip(r, 1−low, 1+high)·A) with r = exp(logprob − old) (PPO, arXiv:1707.06347).

    With `dual` c, tokens of negative advantage lose at most −c·A (dual-clip PPO,
    arXiv:1912.09729)."""
    ratio = (logprobs - old_logprobs).exp()
    value = (-ratio * advantages).maximum(-ratio.clamp(1 - low, 1 + high) * advantages)
    return value if dual is None else value.minimum(-dual * advantages).where(advantages < 0, value)


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    transitions: Tensor,
    low: float = 3e-4,
    high: float = 4e-4,
) -> Tensor:
    """PPO's clipped surrogate with the ratio of the whole transition (GSPO, arXiv:2507.18071).

    This is the token variant: each token's ratio has the transition's value and the token's
    gradient, so advantages may differ within a transition. If they do not, then with
    `sequence-mean` it equals GSPO."""
    means = over_transitions((logprobs - old_logprobs).detach(), transitions, "mean")
    ratio = (means + logprobs - logprobs.detach()).exp()
    return (-ratio * advantages).maximum(-ratio.clamp(1 - low, 1 + high) * advantages)


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    low: float = 0.2,
    high: float = 0.2,
) -> Tensor:
    """−clip(r, 1−low, 1+high)·A·log p, no gradient through r (CISPO, arXiv:2506.13585): a clipped
    token still learns, with a bounded weight."""
    ratio = (logprobs - old_logprobs).detach().exp()
    return -ratio.clamp(1 - low, 1 + high) * advantages * logprobs


def over_transitions(
    values: Tensor, transitions: Tensor, over: Literal["token", "sum", "mean", "max"]
) -> Tensor:
    """For each token, float[N]: its own value, or the sum, mean or max over its transition."""
    if over == "token":
        return values
    count = int(transitions.max()) + 1 if len(transitions) else 0
    how = "amax" if over == "max" else over
    return values.new_zeros(count).scatter_reduce(0, transitions, values, how, include_self=False)[
        transitions
    ]


LOSSES: Final[dict[str, LossFunction]] = {
    function.__name__: function
    for function in (ppo_clip, policy_gradient, importance_sampling, gspo, cispo)
}


@dataclass(frozen=True)
class Loss:
    """The loss of one batch: the aggregated loss of its sampled tokens, plus KL to a reference and
    entropy.

    Settings: kind: name of a function of this module, or a function of any of logprobs,
            old_logprobs, advantages, transitions, each [N]; transitions number the tokens'
            transitions, and `tokens` have each token's task, group and reward
            (`data/aggregation.py`). It returns the loss of each token, float[N], or a tuple of that
            and a mapping of metrics, float[N] each, whose means are shown as `loss/<name>`.
        clip_low, clip_high: for functions that clip the importance ratio, which take `low` and
            `high`; default: those of the function.
        dual_clip: bound of the loss of tokens with negative advantage (arXiv:1912.09729), for
            functions that take `dual`.
        aggregation: a function of `data/aggregation.py`, by name, or your own; `constant_length` is
        for `constant`.
        kl_coefficient: weight of the KL term (`kl_estimator`, see `kl`), for a learner that keeps a
        reference policy.
        entropy_coefficient: weight of the entropy bonus.
        temperature: of the sampling; the learner's log-probabilities use it too.
        old: what the importance ratio compares with. `behaviour`: the recorded log-probabilities;
            the ratio corrects for the weights that sampled. `proximal`: the weights at the start of
            the step; a weight per token (`learner/corrections.py`) corrects for those that sampled.
            Never both, or the difference would count twice.
        value_coefficient: weight of the critic's loss; `value_clip` bounds it (`value_loss`).
        critic_alone: train only the critic."""

    kind: LossKind | LossFunction = "ppo_clip"
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    aggregation: Aggregation = "token-mean"
    constant_length: int | None = None
    kl_coefficient: float = 0.0
    kl_estimator: KLEstimator = "k3"
    entropy_coefficient: float = 0.0
    temperature: float = 1.0
    old: Old = "behaviour"
    value_coefficient: float = 0.5
    value_clip: float | None = 0.2
    critic_alone: bool = False

    def __post_init__(self) -> None:
        find_function("loss", self.kind, LOSSES)
        if self.clip_range is None and (self.clip_low, self.clip_high) != (None, None):
            raise ConfigError(
                f"clip_low and clip_high are set, but {self.name} does not use them; ppo_clip, "
                "gspo, cispo do"
            )
        low, high = self.clip_range or (1.0, math.inf)
        if not 0 < low <= 1 or not high > 0:
            raise ConfigError(f"clip range ({low}, {high}): low must lie in (0, 1], high above 0")
        if self.dual_clip is not None and not takes(self.function, "dual"):
            raise ConfigError(
                f"dual_clip is set, but the loss is {self.name}: only ppo_clip uses it"
            )
        check_settings(
            self,
            least={"kl_coefficient": 0},
            above={"dual_clip": 1, "temperature": 0, "value_coefficient": 0, "value_clip": 0},
            choices={"old": get_args(Old), "kl_estimator": get_args(KLEstimator)},
        )
        if self.aggregation == "constant" and not (
            self.constant_length and self.constant_length >= 1
        ):
            raise ConfigError(
                "aggregation 'constant' needs constant_length, the length to divide by (at least 1)"
            )
        find_function("aggregation", self.aggregation, AGGREGATIONS)

    @property
    def function(self) -> LossFunction:
        return self.kind if callable(self.kind) else LOSSES[self.kind]

    @property
    def name(self) -> str:
        """The kind's name for messages."""
        return function_name(self.function, LOSSES)

    @property
    def clip_range(self) -> tuple[float, float] | None:
        """The distances that the ratio may be below and above 1; None if the function does not clip
        it."""
        if not takes(self.function, "low", "high"):
            return None
        defaults = inspect.signature(self.function).parameters
        low = defaults["low"].default if self.clip_low is None else self.clip_low
        high = defaults["high"].default if self.clip_high is None else self.clip_high
        return low, high


class TokenLoss(NamedTuple):
    """For each sampled token: its loss, float[N]; whether a clip changed it, bool[N]; and the
    function's metrics, by name."""

    values: Tensor
    clipped: Tensor
    metrics: Mapping[str, Tensor]


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    transitions: Tensor,
    loss: Loss,
    tokens: Tokens | None = None,
) -> TokenLoss:
    """The loss of each sampled token, by `loss.kind`.

    `transitions` int64[N] numbers the transitions of the tokens, from 0; each must be complete.
    `tokens` describe the same tokens, for functions that take them."""
    given = {"old_logprobs": old_logprobs, "transitions": transitions, "tokens": tokens}
    low, high = loss.clip_range or (None, None)
    clips = {"low": low, "high": high, "dual": loss.dual_clip}
    found, metrics = _answer(loss, logprobs, advantages, **given, **clips)
    if loss.old == "proximal" and not is_ours(loss.function):
        twice, _ = _answer(loss, logprobs.detach(), 2 * advantages, **given, **clips)
        if not twice.allclose(2 * found.detach()):
            raise ConfigError(
                f"old='proximal' scales the advantages, and loss {loss.name} is not "
                "proportional to them; give old='behaviour'"
            )
    if loss.clip_range is None:
        return TokenLoss(found, logprobs.new_zeros(len(logprobs)).bool(), metrics)
    unclipped = clips | {"low": 1.0, "high": math.inf}
    free, _ = _answer(loss, logprobs.detach(), advantages, **given, **unclipped)
    return TokenLoss(found, found.detach() != free, metrics)


def _answer(
    loss: Loss, logprobs: Tensor, advantages: Tensor, **given: Any
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """A function's result as (loss of each token, metrics of each token)."""
    from torch import is_grad_enabled

    answer = call(
        f"loss {loss.name}", loss.function, logprobs=logprobs, advantages=advantages, **given
    )
    values, metrics = cast("tuple[Any, Any]", answer) if isinstance(answer, tuple) else (answer, {})
    shape = getattr(values, "shape", None)
    asked = logprobs.requires_grad and is_grad_enabled()
    lost = asked and not getattr(values, "requires_grad", False)
    if shape != logprobs.shape or lost:
        raise ConfigError(
            f"loss {loss.name} must return a loss for each of {len(logprobs)} tokens, with a "
            f"gradient through logprobs, but returned {values!r:.200}"
        )
    for name, metric in metrics.items():
        if getattr(metric, "shape", None) != values.shape:
            raise ConfigError(
                f"loss {loss.name} must return a number for each of {len(values)} tokens as its "
                f"metric {name!r}, whose mean is shown; it returned {metric!r:.200}"
            )
    return values, metrics


def value_loss(
    values: Tensor, old_values: Tensor, targets: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """½·max((V − target)², (V' − target)²), with V' = V clipped to within `clip` of its old value,
    and where the second is larger: float[N], bool[N] (as in the PPO authors' code,
    github.com/openai/baselines). Gradients flow through `values`."""
    free = (values - targets).square() / 2
    kept = values if clip is None else values.clamp(old_values - clip, old_values + clip)
    bounded = (kept - targets).square() / 2
    return free.maximum(bounded), bounded > free


def kl(logprobs: Tensor, reference: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate of KL(policy ‖ reference) per token (Schulman, "Approximating KL divergence"), with
    d = log p − log q:

    k1 = d; k2 = d²/2; k3 = exp(−d) − 1 + d. For k3, −d is limited to ±20 and the value to 10, as
    verl does."""
    difference = logprobs - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    negative = (-difference).clamp(-20, 20)
    return (negative.exp() - 1 - negative).clamp(-10, 10)


def entropy(log_probabilities: Tensor) -> Tensor:
    """Entropy in nats of each row's distribution: log-probabilities float[N, V] → float[N]."""
    return -(log_probabilities.exp() * log_probabilities).sum(-1)


def objective(
    micro: MicroBatch,
    loss: Loss,
    totals: Totals,
    logprobs: Tensor,
    *,
    entropy: Tensor | None = None,
    reference: Tensor | None = None,
) -> Tensor:
    """Σ weights · loss(token) over the sampled tokens, plus Σ observed · −log p over the observed
    ones: a scalar with a gradient through `logprobs` float[N + M]. `entropy` and the `reference`'s
    log-probabilities, float[N + M], are needed if the loss has these terms."""
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
        entropy, reference = (
            part if part is None else part[:count] for part in (entropy, reference)
        )
    arrays = (micro.logprobs, micro.advantages, micro.weights, micro.transitions, micro.versions)
    old, advantages, weights, transitions, versions = (
        from_numpy(part).to(logprobs.device) for part in arrays
    )
    tokens = Tokens(micro.sequences)
    per_token, clipped, metrics = policy_loss(logprobs, old, advantages, transitions, loss, tokens)
    measured = {
        "clip_fraction": clipped,
        **{f"loss/{name}": metric for name, metric in metrics.items()},
    }
    if reference is not None:
        divergence = kl(logprobs, reference, loss.kl_estimator)
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
    """Metrics of a step, accumulated over micro-batches and processes: `sums`, `means` per sampled
    token, and `peaks`. Learner and engine are compared on the tokens that `version` sampled."""

    def __init__(self, version: int | None) -> None:
        self.version = version
        self.sums: defaultdict[str, float] = defaultdict(
            float, loss=0.0, tokens=0.0, reference_kl=0.0
        )
        self.means: defaultdict[str, float] = defaultdict(float)
        self.matched: defaultdict[str, float] = defaultdict(float)
        self.peaks: dict[str, float] = {}

    @classmethod
    def of_all(cls, parts: Sequence[Totals]) -> Totals:
        """Combine the totals of several processes, each of its own micro-batches."""
        out = cls(parts[0].version)
        for part in parts:
            for own, added in (
                (out.sums, part.sums),
                (out.means, part.means),
                (out.matched, part.matched),
            ):
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
        """`difference` float[N] is learner − engine; `versions` int[N] is the policy that sampled
        each token."""
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
        lowest = -self.peaks["ratio_min"]
        highest = self.peaks["ratio_max"]
        return {
            **self.sums,
            **{name: total / self.sums["tokens"] for name, total in self.means.items()},
            "ratio_min": lowest,
            "ratio_max": highest,
            "max_ratio_error": max(highest - 1, 1 - lowest),
            **self.mismatch(),
        }
