"""Corrections for engines that compute differently from the learner, and for stale rollouts: which
sampled tokens weigh less, and which are left out.

A correction is a function of the log-probabilities of the sampled tokens, float[N] each: under the
weights that sampled them (`behaviour`), those at the start of the step (`proximal`) and the current
ones (`present`, which cost a forward pass per optimiser step after the first), and of the number of
each token's transition, int64[N] (`transitions`). It takes them by name, and returns whether to
keep each token, bool[N], or a weight of each, float[N], and that. A weight is a factor of the
token's advantage. A token that is not kept leaves the batch: no loss, mean or denominator counts
it. Imports no torch, because algorithms read corrections."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias, cast

import numpy as np

from agentlightning.data.aggregation import Tokens
from agentlightning.data.functions import call, function_name, read_function, takes, unwrapped
from agentlightning.data.sequences import TrainingSequence
from agentlightning.data.transitions import FloatArray
from agentlightning.errors import ConfigError, TrainingError
from agentlightning.learner.losses import KLEstimator, Old, Totals, kl, over_transitions

if TYPE_CHECKING:
    from torch import Tensor

    from agentlightning.learner.base import Learner

CorrectionFunction: TypeAlias = "Callable[..., Tensor | tuple[Tensor, Tensor]]"
Level: TypeAlias = Literal["token", "sequence", "geometric"]
Over: TypeAlias = Literal["token", "sum", "mean", "max"]

_OVER: Final[dict[Level, Over]] = {"token": "token", "sequence": "sum", "geometric": "mean"}


def truncate(
    behaviour: Tensor,
    proximal: Tensor,
    transitions: Tensor,
    *,
    level: Level = "token",
    cap: Annotated[float, (1e-6, math.inf)] = 2.0,
) -> tuple[Tensor, Tensor]:
    """min(ρ, `cap`), all kept: truncated importance sampling (arXiv:2110.00641; AReaL,
    arXiv:2505.24298). ρ is exp(proximal − behaviour) of the token, its product over the `sequence`
    (a transition), or its `geometric` mean there."""
    weights = _ratio(behaviour, proximal, transitions, level).clamp(max=cap)
    return weights, weights >= 0


def mask(
    behaviour: Tensor,
    proximal: Tensor,
    transitions: Tensor,
    *,
    level: Level = "token",
    low: Annotated[float, (0, 1)] = 0.5,
    high: Annotated[float, (1, math.inf)] = 5.0,
) -> tuple[Tensor, Tensor]:
    """ρ, kept if between `low` and `high`: masked importance sampling, by default that of IcePop
    (arXiv:2510.18855). ρ and `level` are as in `truncate`."""
    ratio = _ratio(behaviour, proximal, transitions, level)
    return ratio, (ratio >= low) & (ratio <= high)


def bound(
    behaviour: Tensor,
    proximal: Tensor,
    transitions: Tensor,
    *,
    statistic: KLEstimator = "k3",
    over: Over = "token",
    low: float | None = None,
    high: float | None,
) -> Tensor:
    """Kept if an estimate of KL(behaviour ‖ proximal) is between `low` and `high`, in nats: of
    the token, or its sum, mean or max `over` the transition. With d = behaviour − proximal the
    `statistic` k1 is d, k2 d²/2 and k3 exp(−d) − 1 + d."""
    found = over_transitions(kl(behaviour, proximal, statistic), transitions, over)
    kept = found.isfinite()
    if low is not None:
        kept &= found >= low
    if high is not None:
        kept &= found <= high
    return kept


def _ratio(behaviour: Tensor, proximal: Tensor, transitions: Tensor, level: Level) -> Tensor:
    return over_transitions(proximal - behaviour, transitions, _OVER[level]).exp()


CORRECTIONS: Final[dict[str, CorrectionFunction]] = {
    function.__name__: function for function in (truncate, mask, bound)
}


@dataclass(frozen=True)
class Corrections:
    """The corrections of a run, by name, with their options. Weights are multiplied; a token is
    kept if all corrections keep it. The default for `Old` proximal is `truncate`."""

    functions: Sequence[tuple[str, CorrectionFunction]]
    old: Old

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
            if unwrapped(function) in (truncate, mask) and old == "behaviour":
                raise _counts_twice(name)
        return cls(found, old)

    def __bool__(self) -> bool:
        return bool(self.functions)

    @property
    def ask_present(self) -> bool:
        return any(takes(function, "present") for _, function in self.functions)

    def of(
        self, behaviour: Tensor, proximal: Tensor, present: Tensor, *, transitions: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, float]]:
        """The weight of each token, whether it is kept, and how many tokens each correction leaves
        out. ConfigError if a correction returns something else, or weights with `Old` behaviour."""
        given = {"behaviour": behaviour, "proximal": proximal, "present": present}
        weights = behaviour.new_ones(len(transitions))
        kept = transitions >= 0
        masked = dict[str, float]()
        for name, function in self.functions:
            answer = call(f"correction {name}", function, **given, transitions=transitions)
            own, keeps = answer if isinstance(answer, tuple) else (None, answer)
            shapes = {getattr(part, "shape", None) for part in (own, keeps) if part is not None}
            if shapes != {transitions.shape} or keeps.dtype != kept.dtype:
                raise ConfigError(
                    f"correction {name} must return, for each of {len(kept)} tokens, a bool that "
                    "says whether it is kept, alone or after a weight of each; it returned "
                    f"{answer!r:.200}"
                )
            if own is not None:
                if self.old == "behaviour":
                    raise _counts_twice(name)
                if not bool(((own >= 0) & own.isfinite())[keeps].all()):
                    raise TrainingError(
                        f"correction {name} gave a weight that is negative or not finite; leave it "
                        "out"
                    )
                weights = weights * own
            kept = kept & keeps
            label = name if f"masked/{name}" not in masked else f"{name}-{len(masked) + 1}"
            masked[f"masked/{label}"] = 1 - float(keeps.float().mean()) if len(keeps) else 0.0
        return weights, kept, masked


def _counts_twice(name: str) -> ConfigError:
    return ConfigError(
        f"correction {name!r} weighs tokens, but with old='behaviour' the importance ratio "
        "corrects for older weights already: give old='proximal', or one that only drops tokens, "
        "such as bound"
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
