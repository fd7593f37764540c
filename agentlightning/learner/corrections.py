"""Corrections for engines that compute differently from the learner, and for stale rollouts: which
sampled tokens weigh less, and which are left out.

A correction is a function of the log-probabilities of the sampled tokens, float[N] each: under the
weights that sampled them (`behaviour`), those at the start of the step (`proximal`) and the current
ones (`present`), and of the number of each token's transition, int64[N]. It returns the weight of
each token, float[N], and whether to keep it, bool[N]. A weight is a factor of the token's
advantage. A token that is not kept leaves the batch: no loss, mean or denominator counts it.
Imports no torch, because algorithms read corrections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar, cast, get_args

import numpy as np

from agentlightning.data.aggregation import Tokens
from agentlightning.data.references import function_name, mark_of, read_function, trial
from agentlightning.data.sequences import TrainingSequence
from agentlightning.data.transitions import FloatArray
from agentlightning.errors import ConfigError, TrainingError
from agentlightning.learner.losses import KLEstimator, Old, Totals, kl, over_transitions

if TYPE_CHECKING:
    from torch import Tensor

    from agentlightning.learner.base import Learner

CorrectionFunction: TypeAlias = "Callable[..., tuple[Tensor, Tensor]]"
Level: TypeAlias = Literal["token", "sequence", "geometric"]
Over: TypeAlias = Literal["token", "sum", "mean", "max"]

_OVER: Final[dict[Level, Over]] = {"token": "token", "sequence": "sum", "geometric": "mean"}

F = TypeVar("F", bound=Callable[..., Any])


def correction(*, weighs: bool = True, present: bool = True) -> Callable[[F], F]:
    """Declare whether a function's weights can differ from 1, and whether it uses the present
    log-probabilities, which cost a forward pass per optimiser step after the first. Without this
    decorator both are assumed."""

    def mark(function: F) -> F:
        vars(function).update(weighs=weighs, present=present)
        return function

    return mark


@correction(present=False)
def truncate(
    behaviour: Tensor,
    proximal: Tensor,
    present: Tensor,
    transitions: Tensor,
    *,
    level: Level = "token",
    cap: float = 2.0,
) -> tuple[Tensor, Tensor]:
    """min(ρ, `cap`), all kept: truncated importance sampling (arXiv:2110.00641; AReaL,
    arXiv:2505.24298). ρ is exp(proximal − behaviour) of the token, its product over the `sequence`
    (a transition), or its `geometric` mean there."""
    if not cap > 0:
        raise ConfigError(f"truncate: cap is {cap}; it must be above 0")
    weights = _ratio(behaviour, proximal, transitions, level).clamp(max=cap)
    return weights, weights >= 0


@correction(present=False)
def mask(
    behaviour: Tensor,
    proximal: Tensor,
    present: Tensor,
    transitions: Tensor,
    *,
    level: Level = "token",
    low: float = 0.5,
    high: float = 5.0,
) -> tuple[Tensor, Tensor]:
    """ρ, kept if between `low` and `high`: masked importance sampling, by default that of IcePop
    (arXiv:2510.18855). ρ and `level` are as in `truncate`."""
    if not 0 <= low <= 1 <= high:
        raise ConfigError(
            f"mask: low is {low} and high {high}; low must lie in [0, 1] and high be at least 1"
        )
    ratio = _ratio(behaviour, proximal, transitions, level)
    return ratio, (ratio >= low) & (ratio <= high)


@correction(weighs=False, present=False)
def bound(
    behaviour: Tensor,
    proximal: Tensor,
    present: Tensor,
    transitions: Tensor,
    *,
    statistic: KLEstimator = "k3",
    over: Over = "token",
    low: float | None = None,
    high: float | None = None,
) -> tuple[Tensor, Tensor]:
    """1, kept if an estimate of KL(behaviour ‖ proximal) is between `low` and `high`, in nats: of
    the token, or its sum, mean or max `over` the transition. With d = behaviour − proximal the
    `statistic` k1 is d, k2 d²/2 and k3 exp(−d) − 1 + d."""
    if low is None and high is None:
        raise ConfigError(
            "bound leaves nothing out without low or high: give high=0.1, for example"
        )
    if statistic not in get_args(KLEstimator):
        raise ConfigError(
            f"bound: statistic is {statistic!r}; known: {', '.join(get_args(KLEstimator))}"
        )
    if over not in get_args(Over):
        raise ConfigError(f"bound: over is {over!r}; known: {', '.join(get_args(Over))}")
    found = over_transitions(kl(behaviour, proximal, statistic), transitions, over)
    kept = found.isfinite()
    if low is not None:
        kept &= found >= low
    if high is not None:
        kept &= found <= high
    return kept.new_ones(len(kept), dtype=found.dtype), kept


def _ratio(behaviour: Tensor, proximal: Tensor, transitions: Tensor, level: Level) -> Tensor:
    if level not in _OVER:
        raise ConfigError(f"level is {level!r}; known: {', '.join(_OVER)}")
    return over_transitions(proximal - behaviour, transitions, _OVER[level]).exp()


CORRECTIONS: Final[dict[str, CorrectionFunction]] = {
    function.__name__: function for function in (truncate, mask, bound)
}


@dataclass(frozen=True)
class Corrections:
    """The corrections of a run, by name, with their options. Weights are multiplied; a token is
    kept if all corrections keep it. The default for `Old` proximal is `truncate`."""

    functions: Sequence[tuple[str, CorrectionFunction]]

    @classmethod
    def read(cls, given: Any, old: Old) -> Corrections:
        """The corrections in `given`: a name of `CORRECTIONS`, a reference (`file.py:function`) or
        a function, each also as {name: …, option: …}, or a list of these. ConfigError for unknown
        ones, or if they do not go with `old`."""
        if given is None:
            given = "truncate" if old == "proximal" else []
        several = cast("list[Any]", list(given) if isinstance(given, list | tuple) else [given])
        functions = [read_function("correction", item, CORRECTIONS) for item in several]
        found = [(function_name(function, CORRECTIONS), function) for function in functions]
        for name, function in found:
            if mark_of(function, "weighs", True) and old == "behaviour":
                raise ConfigError(
                    f"correction {name!r} weighs tokens, but with old='behaviour' the importance "
                    "ratio corrects for older weights already: give old='proximal', or one that "
                    "only drops tokens, such as bound"
                )
            if given != "truncate":  # the default is known to be right, and trying it imports torch
                _try(name, function)
        return cls(found)

    def __bool__(self) -> bool:
        return bool(self.functions)

    @property
    def ask_present(self) -> bool:
        return any(mark_of(function, "present", True) for _, function in self.functions)

    def of(self, *logprobs: Tensor, transitions: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
        """The weight of each token, whether it is kept, and how many tokens each correction leaves
        out."""
        weights = logprobs[0].new_ones(len(transitions))
        kept = transitions >= 0
        masked = dict[str, float]()
        for name, function in self.functions:
            own, keeps = function(*logprobs, transitions)
            if not bool(((own >= 0) & own.isfinite())[keeps].all()):
                raise TrainingError(
                    f"correction {name} gave a weight that is negative or not finite; leave it out"
                )
            weights = weights * own
            kept = kept & keeps
            label = name if f"masked/{name}" not in masked else f"{name}-{len(masked) + 1}"
            masked[f"masked/{label}"] = 1 - float(keeps.float().mean()) if len(keeps) else 0.0
        return weights, kept, masked


def _try(name: str, function: CorrectionFunction) -> None:
    """ConfigError unless it returns, for five tokens in two transitions, finite weights and
    bools."""
    import torch

    behaviour = torch.tensor([-0.5, -1.0, -2.0, -0.1, -0.7])
    with trial(
        f"correction {name}", "behaviour, proximal and present log-probabilities and transitions"
    ):
        weights, kept = function(
            behaviour, behaviour - 0.1, behaviour - 0.1, torch.tensor([0, 0, 0, 1, 1])
        )
        fits = tuple(weights.shape) == (5,) == tuple(kept.shape) and kept.dtype == torch.bool
        fits = fits and bool(((weights >= 0) & weights.isfinite()).all())
        if not fits:
            raise ConfigError(
                f"correction {name} must return, for five tokens, a finite weight of each that is "
                "not negative, and a bool that says whether it is kept; it returned "
                f"{weights!r:.100}, {kept!r:.100}"
            )


# A sequence, and the log-probabilities of its sampled tokens before the step, float32[N].
Prepared: TypeAlias = tuple[TrainingSequence, FloatArray]


def prepare(
    learner: Learner, batch: Sequence[TrainingSequence], temperature: float, version: int | None
) -> tuple[list[Prepared], dict[str, float]]:
    """Before the first optimiser step of a batch: the proximal log-probabilities, and how much
    engine and learner differ on the tokens that `version` sampled."""
    from torch import from_numpy

    totals = Totals(version)
    made = list[Prepared]()
    for sequence, logprobs in zip(batch, learner.logprobs(batch, temperature), strict=True):
        totals.compare(logprobs - from_numpy(sequence.logprobs), from_numpy(sequence.versions))
        made.append((sequence, logprobs.numpy()))
    return made, totals.mismatch()


def corrected(
    part: Sequence[Prepared],
    corrections: Corrections,
    old: Old,
    present: Sequence[FloatArray] | None = None,
) -> tuple[list[TrainingSequence], dict[str, float]]:
    """The sequences of one optimiser step without the tokens that corrections leave out, with
    weighted advantages and the log-probabilities of `old`; and metrics. `present` are the current
    log-probabilities; default: the proximal ones.

    A weight can be a factor of the advantage because every loss allowed with `Old` proximal is
    proportional to it."""
    from torch import from_numpy

    sequences = [sequence for sequence, _ in part]
    proximal = [proximal for _, proximal in part]
    transitions = Tokens(sequences).calls
    logprobs = ([sequence.logprobs for sequence in sequences], proximal, present or proximal)
    behaviour_to_present = (from_numpy(np.concatenate(logprob)) for logprob in logprobs)
    weights, kept, masked = corrections.of(
        *behaviour_to_present, transitions=from_numpy(transitions)
    )
    calls = len(np.unique(transitions))
    left = len(np.unique(transitions[kept.numpy()]))
    metrics: dict[str, float] = {}
    if calls:  # not only observed tokens
        metrics = {"masked": 1 - float(kept.float().mean()), "masked_calls": 1 - left / calls}
    if len(masked) > 1:
        metrics |= masked
    if old == "proximal" and bool(kept.any()):
        own = weights[kept]
        metrics |= {
            "weight_mean": float(own.mean()),
            "weight_min": float(own.min()),
            "weight_max": float(own.max()),
        }
    ends = np.cumsum([len(sequence.positions) for sequence in sequences])[:-1]
    made: list[TrainingSequence] = []
    split = (np.split(weights.numpy(), ends), np.split(kept.numpy(), ends))
    for (sequence, before), of, keeps in zip(part, *split, strict=True):
        if old == "proximal":
            advantages = (sequence.advantages * of).astype(sequence.advantages.dtype)
            sequence = replace(sequence, logprobs=before, advantages=advantages)
        if keeps.any() or sequence.observed is not None:
            made.append(sequence if keeps.all() else sequence.only(keeps))
    return made, metrics
