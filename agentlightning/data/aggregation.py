"""Aggregation: how much each token counts in the loss of a batch.

An aggregation is a function `(tokens, **options) → weights`, float[N], of all tokens of a batch
(`Tokens`). The loss of a batch is Σ weight · loss over its tokens: weights contain all
denominators, so micro-batches and processes add up to the batch. You can pass your own function
with this signature."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from agentlightning.data.functions import call, find_function, function_name
from agentlightning.data.sequences import Origin, TrainingSequence
from agentlightning.data.transitions import FloatArray
from agentlightning.errors import ConfigError

FloatArray64: TypeAlias = npt.NDArray[np.float64]
Aggregation: TypeAlias = "str | Callable[..., npt.ArrayLike]"


class Tokens:
    """The tokens of these sequences that have a loss, in order: the sampled ones, or the `observed`
    ones."""

    def __init__(self, sequences: Sequence[TrainingSequence], *, observed: bool = False) -> None:
        rows = ((sequence, sequence.observed if observed else sequence) for sequence in sequences)
        self._rows = [(sequence, of) for sequence, of in rows if of is not None]
        self._observed = observed
        self.lengths = [len(of.positions) for _, of in self._rows]
        self._count = sum(self.lengths)

    def __len__(self) -> int:
        return self._count

    @cached_property
    def calls(self) -> npt.NDArray[np.int64]:
        """The number of each token's call, from 0, int64[N]."""
        if not self._count:
            return np.zeros(0, np.int64)
        counts = [int(of.transitions[-1]) + 1 if len(of.transitions) else 0 for _, of in self._rows]
        found = np.concatenate([of.transitions for _, of in self._rows], dtype=np.int64)
        found += np.repeat(np.cumsum([0, *counts[:-1]]), self.lengths)
        # Calls without tokens are not counted.
        return np.unique(found, return_inverse=True)[1] if self._observed else found

    @cached_property
    def rollouts(self) -> npt.NDArray[np.int64]:
        """The number of each token's rollout, from 0, int64[N]."""
        numbers = [self._numbers.get(sequence.rollout_id, 0) for sequence, _ in self._rows]
        return np.repeat(np.array(numbers, np.int64), self.lengths)

    @cached_property
    def origins(self) -> Sequence[Origin]:
        """The origin of each rollout, by its number."""
        found = {sequence.rollout_id: sequence.origin or Origin() for sequence, _ in self._rows}
        return [found[name] for name in self._numbers]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        names = dict.fromkeys(
            sequence.rollout_id
            for (sequence, _), count in zip(self._rows, self.lengths, strict=True)
            if count
        )
        return {name: number for number, name in enumerate(names)}

    def each(self, value: Callable[[Origin], float]) -> npt.NDArray[np.float64]:
        """The `value` of each token's rollout, float64[N]."""
        return np.array([value(origin) for origin in self.origins], np.float64)[self.rollouts]


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
    """1 / (rollouts · `length`), a rollout and its forks as one: nothing that is sampled changes
    it, so neither short answers nor short rollouts are favoured (Dr. GRPO, arXiv:2503.20783)."""
    rollouts = sum(origin.share for origin in tokens.origins)
    return np.full(len(tokens), 1.0 / (rollouts * length))


def _mean_of_means(numbers: npt.NDArray[np.int64]) -> FloatArray64:
    counts = np.bincount(numbers)
    return (1.0 / (len(counts) * counts))[numbers]


AGGREGATIONS: Final[dict[str, Callable[..., Any]]] = {
    "token-mean": token_mean,
    "sequence-mean": sequence_mean,
    "rollout-mean": rollout_mean,
    "constant": constant,
}


def aggregation_weights(
    sequences: Sequence[TrainingSequence], aggregation: Aggregation, length: int | None = None
) -> list[FloatArray]:
    """The loss weight of each sampled token, then of each observed one: float32[N + M] per
    sequence. `length` is for `constant`. ConfigError if a function returns invalid weights.

    Observed tokens are aggregated separately, and the result is multiplied by their own weights."""
    tokens = Tokens(sequences)
    made = _split(weights_of(tokens, aggregation, length), tokens.lengths)
    if all(sequence.observed is None for sequence in sequences):
        return made
    tokens = Tokens(sequences, observed=True)
    observed = iter(_split(weights_of(tokens, aggregation, length), tokens.lengths))
    return [
        own
        if sequence.observed is None
        else np.concatenate([own, next(observed) * sequence.observed.weights])
        for own, sequence in zip(made, sequences, strict=True)
    ]


def _split(values: FloatArray, lengths: Sequence[int]) -> list[FloatArray]:
    return [
        values[start:stop]
        for start, stop in itertools.pairwise(itertools.accumulate(lengths, initial=0))
    ]


def weights_of(tokens: Tokens, aggregation: Aggregation, length: int | None = None) -> FloatArray:
    """The weight of each token, float32[N]."""
    function = find_function("aggregation", aggregation, AGGREGATIONS)
    if not len(tokens):
        return np.zeros(0, np.float32)
    name = function_name(function, AGGREGATIONS)
    weights = np.asarray(
        call(f"aggregation {name}", function, tokens=tokens, length=length), np.float64
    )
    if weights.shape != (len(tokens),) or not np.isfinite(weights).all():
        raise ConfigError(
            f"aggregation {name} must return a finite weight for each of {len(tokens)} tokens, "
            f"but returned {weights!r:.200}"
        )
    return weights.astype(np.float32)
