"""Aggregation: how much each token counts in the loss of a batch.

An aggregation is a function `(tokens, **options) → weights`, float[N], of the tokens of a whole batch (`Tokens`). The
loss of a batch is Σ weight · loss of each token: weights hold all denominators, so that micro-batches and processes add
up to the batch. A function of the same signature may stand in for any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from agentlightning.data.references import find_function, function_name
from agentlightning.data.sequences import Origin, TrainingSequence
from agentlightning.data.transitions import FloatArray
from agentlightning.errors import ConfigError

FloatArray64: TypeAlias = npt.NDArray[np.float64]
Aggregation: TypeAlias = "str | Callable[..., npt.ArrayLike]"


@dataclass(frozen=True)
class Tokens:
    """The tokens of a batch, or of a part of it, that have a loss: `calls` and `rollouts` int64[N] number the call and
    the rollout of each, from 0, and `origins` says where each rollout is from."""

    calls: npt.NDArray[np.int64]
    rollouts: npt.NDArray[np.int64]
    origins: Sequence[Origin]

    @classmethod
    def of(cls, sequences: Sequence[TrainingSequence], *, observed: bool = False) -> Tokens:
        """The sampled tokens of these sequences, in order; or those that are `observed`."""
        rows = [(one, one.observed if observed else one) for one in sequences]
        pairs = [(one, of) for one, of in rows if of is not None and len(of.positions)]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(one.rollout_id for one, _ in pairs))}
        starts = np.cumsum([0, *(int(of.transitions[-1]) + 1 for _, of in pairs)])
        calls = [of.transitions + start for (_, of), start in zip(pairs, starts, strict=False)]
        joined = np.concatenate([np.zeros(0, np.int64), *calls], dtype=np.int64)
        if observed:  # calls without any are not counted
            joined = np.unique(joined, return_inverse=True)[1]
        rollouts = np.array([numbers[one.rollout_id] for one, _ in pairs], np.int64)
        origins = {one.rollout_id: one.origin or Origin() for one, _ in pairs}
        return cls(joined, np.repeat(rollouts, [len(of.positions) for _, of in pairs]), list(origins.values()))

    @classmethod
    def trial(cls) -> Tokens:
        """Five tokens in two calls, each a rollout, to try a function on."""
        numbers = np.array([0, 0, 0, 1, 1], np.int64)
        return cls(numbers, numbers, [Origin(0, (0.0, 1.0), {}, {}, reward) for reward in (0.0, 1.0)])

    def __len__(self) -> int:
        return len(self.calls)

    def each(self, value: Callable[[Origin], float]) -> npt.NDArray[np.float64]:
        """The `value` of each token's rollout, float64[N]."""
        return np.array([value(one) for one in self.origins], np.float64)[self.rollouts]


def token_mean(tokens: Tokens) -> FloatArray64:
    """1 / (tokens of the batch) (DAPO, arXiv:2503.14476)."""
    return np.full(len(tokens), 1.0 / len(tokens))


def sequence_mean(tokens: Tokens) -> FloatArray64:
    """The mean over a call's tokens, then over calls (GRPO, arXiv:2402.03300)."""
    return _mean_of_means(tokens.calls)


def rollout_mean(tokens: Tokens) -> FloatArray64:
    """The mean over a rollout's tokens, then over rollouts."""
    return _mean_of_means(tokens.rollouts)


def constant(tokens: Tokens, *, length: int) -> FloatArray64:
    """1 / (calls · `length`), a length that favours no answer for being short (Dr. GRPO, arXiv:2503.20783)."""
    return np.full(len(tokens), 1.0 / ((int(tokens.calls.max()) + 1) * length))


def _mean_of_means(numbers: npt.NDArray[np.int64]) -> FloatArray64:
    counts = np.bincount(numbers)
    return 1.0 / (len(counts) * counts[numbers])


AGGREGATIONS: Final[dict[str, Callable[..., Any]]] = {
    "token-mean": token_mean,
    "sequence-mean": sequence_mean,
    "rollout-mean": rollout_mean,
    "constant": constant,
}


def aggregation_weights(
    sequences: Sequence[TrainingSequence],
    aggregation: Aggregation,
    length: int | None = None,
    *,
    observed: bool = False,
) -> list[FloatArray]:
    """The weight of each sampled token in the loss of this batch, one float32[N] per sequence; or of each that is
    `observed`. `length` is that of `constant`. ConfigError where a function gives no weights."""
    tokens = Tokens.of(sequences, observed=observed)
    lengths = [len(one.observed.positions) if one.observed else 0 for one in sequences]
    if not observed:
        lengths = [len(one.positions) for one in sequences]
    weights = weights_of(tokens, aggregation, length) if len(tokens) else np.zeros(0, np.float32)
    return np.split(weights, np.cumsum(lengths)[:-1])


def weights_of(tokens: Tokens, aggregation: Aggregation, length: int | None = None) -> FloatArray:
    """What the aggregation gives these tokens, float32[N]."""
    function = find_function("aggregation", aggregation, AGGREGATIONS)
    weights = np.asarray(function(tokens, length=length) if function is constant else function(tokens), np.float64)
    if weights.shape != (len(tokens),) or not np.isfinite(weights).all():
        raise ConfigError(
            f"aggregation {function_name(function, AGGREGATIONS)} must give a finite weight for each of {len(tokens)} "
            f"tokens, and gave {weights!r:.200}"
        )
    return weights.astype(np.float32)


def try_aggregation(aggregation: Aggregation, length: int | None) -> None:
    """ConfigError unless it gives five tokens weights."""
    try:
        weights_of(Tokens.trial(), aggregation, length)
    except (ConfigError, LookupError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise  # else it may look for what these made-up tasks do not have
    except Exception as error:
        raise ConfigError(
            f"aggregation {aggregation!r} fails on five tokens: {type(error).__name__}: {error}. It is given tokens "
            "(calls, rollouts, each), and gives the weight of each"
        ) from error


def observed_weights(
    sequences: Sequence[TrainingSequence], aggregation: Aggregation, length: int | None = None
) -> list[FloatArray] | None:
    """The weight of −log p of each observed token, one float32[M] per sequence: its own, aggregated over the observed
    tokens of the batch as the sampled ones are over theirs. None where none is observed."""
    if all(one.observed is None for one in sequences):
        return None
    aggregated = aggregation_weights(sequences, aggregation, length, observed=True)
    own = [np.zeros(0, np.float32) if one.observed is None else one.observed.weights for one in sequences]
    return [weights * of for weights, of in zip(aggregated, own, strict=True)]
