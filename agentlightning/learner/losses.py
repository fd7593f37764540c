"""The loss of a batch: its settings, and what each kind gives per sampled token.

Every loss is a pure function of tensors of shape [N], through whose `logprobs` alone gradients flow; aggregation is the
batch's weights. References are checked in tests against values of verl. Imports no torch: algorithms make losses.

GRPO's: a sampled token with advantage A and r = exp(log p now − log p when it was sampled) costs max(−r·A, −clip(r)·A)
(`ppo_clip`), plus `kl_coefficient` times its divergence from the reference where one is kept. Each token's cost times
its weight (`data/aggregation.py`), summed, is the loss. `objective.py` puts it together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, TypeVar, cast, get_args

from agentlightning.data.aggregation import Aggregation, Tokens, try_aggregation
from agentlightning.data.references import find_function, function_name, mark_of
from agentlightning.errors import ConfigError, check_settings

if TYPE_CHECKING:
    from torch import Tensor

KLEstimator: TypeAlias = Literal["k1", "k2", "k3"]
LossKind: TypeAlias = Literal["ppo_clip", "policy_gradient", "importance_sampling", "gspo", "cispo"]
LossFunction: TypeAlias = "Callable[..., Tensor]"
Old: TypeAlias = Literal["behaviour", "proximal"]

F = TypeVar("F", bound=Callable[..., Any])


def loss(*, clips: tuple[float, float] | None = None, dual: bool = False, tokens: bool = False) -> Callable[[F], F]:
    """Says what else a loss function takes. With `clips` it clips the importance ratio and takes `low` and `high`, how
    far below and above 1 the ratio counts, by default `clips`; with `dual` also `dual`, or None (`Loss.dual_clip`).
    With `tokens` it takes `tokens`, which tell the task, group and reward of each (`data/aggregation.py`)."""

    def mark(function: F) -> F:
        vars(function).update(clips=clips, dual=dual, tokens=tokens)
        return function

    return mark


def policy_gradient(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, transitions: Tensor) -> Tensor:
    """−A·log p: right only for tokens that were sampled from the weights being changed (REINFORCE, Williams 1992)."""
    return -advantages * logprobs


def importance_sampling(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, transitions: Tensor) -> Tensor:
    """−r·A with r = exp(logprob − old), unclipped: at r = 1 its gradient is that of `policy_gradient`."""
    return -(logprobs - old_logprobs).exp() * advantages


@loss(clips=(0.2, 0.2), dual=True)
def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    transitions: Tensor,
    low: float,
    high: float,
    dual: float | None = None,
) -> Tensor:
    """max(−r·A, −clip(r, 1−low, 1+high)·A) with r = exp(logprob − old) (PPO, arXiv:1707.06347).

    With `dual` c, tokens of negative advantage lose at most −c·A (dual-clip PPO, arXiv:1912.09729)."""
    value = _clipped((logprobs - old_logprobs).exp(), advantages, low, high)
    return value if dual is None else value.minimum(-dual * advantages).where(advantages < 0, value)


@loss(clips=(3e-4, 4e-4))  # as its authors have it
def gspo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, transitions: Tensor, low: float, high: float
) -> Tensor:
    """PPO's clipped surrogate with the ratio of the whole transition (GSPO, arXiv:2507.18071).

    As its token variant: each token has the transition's ratio as value and its own gradient, so that advantages may
    differ within a transition; where they do not, and under `sequence-mean`, it is GSPO to the letter."""
    means = over_transitions((logprobs - old_logprobs).detach(), transitions, "mean")
    return _clipped((means + logprobs - logprobs.detach()).exp(), advantages, low, high)


@loss(clips=(0.2, 0.2))
def cispo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, transitions: Tensor, low: float, high: float
) -> Tensor:
    """−clip(r, 1−low, 1+high)·A·log p, no gradient through r (CISPO, arXiv:2506.13585): a clipped token still learns,
    with a bounded weight."""
    ratio = (logprobs - old_logprobs).detach().exp()
    return -ratio.clamp(1 - low, 1 + high) * advantages * logprobs


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return (-ratio * advantages).maximum(-ratio.clamp(1 - low, 1 + high) * advantages)


def over_transitions(values: Tensor, transitions: Tensor, over: Literal["token", "sum", "mean", "max"]) -> Tensor:
    """Of each token, float[N]: its own value, or the sum, mean or max of those of its transition."""
    if over == "token":
        return values
    count = int(transitions.max()) + 1 if len(transitions) else 0
    how = "amax" if over == "max" else over
    return values.new_zeros(count).scatter_reduce(0, transitions, values, how, include_self=False)[transitions]


LOSSES: Final[dict[str, LossFunction]] = {
    one.__name__: one for one in (ppo_clip, policy_gradient, importance_sampling, gspo, cispo)
}


@dataclass(frozen=True)
class Loss:
    """The loss of one batch: that of its sampled tokens, aggregated, plus KL to a reference and entropy.

    `kind` names a function of this module, or is one: of (logprobs, old_logprobs, advantages, transitions), each [N],
    of which the last numbers the transition of each token, to the loss of each token, float[N]; or to that and a
    mapping of metrics, float[N] each, whose means are shown as `loss/<name>`.
    `aggregation` names a function of `data/aggregation.py`, or is one; `constant_length` is for `constant`.
    `clip_low` and `clip_high` are for functions that clip the importance ratio (`@loss(clips=…)`); `dual_clip` bounds
    the loss of tokens with negative advantage (arXiv:1912.09729).
    `temperature` is that of the sampling: the learner's log-probabilities are of the same distribution.
    `kl_coefficient` needs a learner that keeps a reference policy; 0 switches the term off.

    `old` says what the importance ratio is against. `behaviour`: the recorded log-probabilities, so that the ratio
    corrects for the weights that sampled. `proximal`: the weights at the start of the step; what sampled is then
    corrected for by a weight per token (`learner/corrections.py`). Never both: the same difference would count twice.

    With a critic, `value_coefficient` times the loss of its values is added, which `value_clip` bounds (`value_loss`);
    with `critic_alone` the policy is not trained."""

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
                f"clip_low and clip_high are set, but {self.name} clips no ratio by them; ppo_clip, gspo, cispo do"
            )
        low, high = self.clip_range or (1.0, math.inf)
        if not 0 < low <= 1 or not high > 0:
            raise ConfigError(f"clip range ({low}, {high}): low must lie in (0, 1], high above 0")
        if self.dual_clip is not None and not mark_of(self.function, "dual"):
            raise ConfigError(f"dual_clip is set, but the loss is {self.name}: it bounds ppo_clip alone")
        check_settings(
            self,
            least={"kl_coefficient": 0},
            above={"dual_clip": 1, "temperature": 0, "value_coefficient": 0, "value_clip": 0},
            choices={"old": get_args(Old), "kl_estimator": get_args(KLEstimator)},
        )
        if self.aggregation == "constant" and not (self.constant_length and self.constant_length >= 1):
            raise ConfigError("aggregation 'constant' needs constant_length, the length to divide by (at least 1)")
        try_aggregation(self.aggregation, self.constant_length)
        if callable(self.kind):
            _try(self)

    @property
    def function(self) -> LossFunction:
        return self.kind if callable(self.kind) else LOSSES[self.kind]

    @property
    def name(self) -> str:
        """What messages call the kind."""
        return function_name(self.function, LOSSES)

    @property
    def clip_range(self) -> tuple[float, float] | None:
        """How far below and above 1 the ratio counts; None for a function that does not clip it."""
        if (own := mark_of(self.function, "clips")) is None:
            return None
        low, high = own
        return self.clip_low if self.clip_low is not None else low, (
            self.clip_high if self.clip_high is not None else high
        )


class TokenLoss(NamedTuple):
    """The loss of each sampled token, float[N]; where a clip changed it, bool[N]; and what else the function measured
    of each, by name."""

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
    """The loss of each sampled token as `loss.kind` has it.

    `transitions` int64[N] numbers the transition of each token, from 0; all tokens of one must be there. `tokens` are
    the same, for a function that asks where they are from."""
    given = (old_logprobs, advantages, transitions)
    more: dict[str, Any] = {"tokens": tokens} if mark_of(loss.function, "tokens") else {}
    if loss.clip_range is None:
        found, metrics = _with_metrics(loss, loss.function(logprobs, *given, **more))
        return TokenLoss(found, logprobs.new_zeros(len(logprobs)).bool(), metrics)
    low, high = loss.clip_range
    if loss.dual_clip is not None:
        more["dual"] = loss.dual_clip
    found, metrics = _with_metrics(loss, loss.function(logprobs, *given, low=low, high=high, **more))
    free, _ = _with_metrics(loss, loss.function(logprobs.detach(), *given, low=1.0, high=math.inf, **more))
    return TokenLoss(found, found.detach() != free, metrics)


def _with_metrics(loss: Loss, answer: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
    """What a function gave as (the loss of each token, metrics of each token)."""
    values, metrics = cast("tuple[Any, Any]", answer) if isinstance(answer, tuple) else (answer, {})
    for name, one in metrics.items():
        if getattr(one, "shape", None) != values.shape:
            raise ConfigError(
                f"loss {loss.name} must give a number for each of {len(values)} tokens as its metric {name!r}, whose "
                f"mean is shown; it gave {one!r:.200}"
            )
    return values, metrics


def _try(loss: Loss) -> None:
    """ConfigError unless the function in `loss` gives, for a batch of five tokens in two transitions, a finite loss of
    each that depends on its log-probability."""
    from torch import allclose, tensor

    logprobs = tensor([-0.5, -1.0, -2.0, -0.1, -0.7], requires_grad=True)
    old = tensor([-0.6, -1.0, -1.5, -0.2, -0.7])
    advantages, transitions = tensor([1.0, -1.0, 0.5, -0.5, 2.0]), tensor([0, 0, 0, 1, 1])
    tokens = Tokens.trial()
    try:
        value = policy_loss(logprobs, old, advantages, transitions, loss, tokens).values
        twice = policy_loss(logprobs, old, 2 * advantages, transitions, loss, tokens).values
        given = tuple(value.shape), bool(value.isfinite().all()), value.requires_grad
    except ConfigError:
        raise
    except Exception as error:
        if mark_of(loss.function, "tokens") and isinstance(error, LookupError | AttributeError):
            return  # it may look for what these made-up tasks do not have
        raise ConfigError(
            f"loss {loss.name} fails on five tokens: {type(error).__name__}: {error}. It is given logprobs, "
            "old_logprobs, advantages and transitions, and gives the loss of each token"
        ) from error
    if given != ((5,), True, True):
        raise ConfigError(
            f"loss {loss.name} must give, for five tokens, a finite loss of each with a gradient through logprobs; it "
            f"gave {value!r:.200}"
        )
    if loss.old == "proximal" and not allclose(twice, 2 * value):
        raise ConfigError(
            f"old='proximal' corrects for what sampled by scaling the advantages, and loss {loss.name} is not "
            "proportional to them; give old='behaviour'"
        )


def value_loss(values: Tensor, old_values: Tensor, targets: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """½·max((V − target)², (V' − target)²), V' being V kept within `clip` of what it was, and where that is the larger:
    float[N], bool[N] (PPO as its authors implemented it, github.com/openai/baselines). Gradients flow through `values`.
    """
    free = (values - targets).square() / 2
    kept = values if clip is None else values.clamp(old_values - clip, old_values + clip)
    bounded = (kept - targets).square() / 2
    return free.maximum(bounded), bounded > free


def kl(logprobs: Tensor, reference: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate of KL(policy ‖ reference) per token (Schulman, "Approximating KL divergence"), with d = log p − log q:

    k1 = d; k2 = d²/2; k3 = exp(−d) − 1 + d. For k3, −d is limited to ±20 and the value to 10, as verl does."""
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
