"""The statistics of an evaluation: pass@k, intervals and a paired test. Knows numbers; knows no rollouts.

What is drawn at random is tasks, never attempts: attempts at one task are alike, and drawing them one by one would make
few tasks look like many (a cluster bootstrap). So each task counts once, with the mean over its attempts, and every
statistic here is of float64[T], one value per task. The random numbers are the same at every call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from agentlightning.errors import ConfigError

RESAMPLES: Final = 10_000
_BLOCK: Final = 2_000_000  # random numbers at a time
_EXACT: Final = 13  # tasks up to which every pattern of signs is tried: 2 to the power of it is below RESAMPLES

Values = npt.NDArray[np.float64]


def pass_at_k(attempts: int, passed: int, k: int) -> float:
    """The chance that at least one of `k` attempts passes, by n = `attempts` of which c = `passed` did.

    It is 1 − C(n−c, k) / C(n, k), the unbiased estimate of Chen et al. (2021, arXiv:2107.03374): `pass_at_k(4, 1, 2)`
    is 1 − 3/6.

    ConfigError unless 1 ≤ k ≤ attempts and 0 ≤ passed ≤ attempts."""
    if not 1 <= k <= attempts or not 0 <= passed <= attempts:
        raise ConfigError(
            f"pass@{k} of {attempts} attempts, {passed} passed: k must be from 1 to the number of attempts"
        )
    return 1.0 - math.comb(attempts - passed, k) / math.comb(attempts, k)


def mean_interval(values: Values, confidence: float) -> tuple[float, float] | None:
    """Where the mean over all tasks there could be probably lies: percentiles of the means of T − 1 tasks drawn with
    replacement, which vary as the mean of T new ones would (Rao and Wu 1988; T drawn of T vary less, and few tasks
    would seem surer than they are). None of fewer than two tasks, which say nothing of it.

    ConfigError unless 0 < confidence < 1."""
    if not 0 < confidence < 1:
        raise ConfigError(f"the confidence is {confidence}; it must be above 0 and below 1, such as 0.95")
    if len(values) < 2:
        return None
    chance = np.random.default_rng(0)
    means = _many(RESAMPLES, len(values) - 1, lambda shape: values[chance.integers(len(values), size=shape)])
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def paired_p_value(differences: Values) -> float:
    """How probable a mean difference at least as far from 0 is, if which of the two a task did better with is chance:
    the share of patterns of signs that give one (two-sided, Fisher 1935). All patterns of up to 13 tasks, else 10,000
    random ones, of which the one seen is counted as one more, so that it is never 0. Of one task it is 1."""
    count = len(differences)
    seen = abs(differences.mean()) * (1 - 1e-9)  # sums in another order differ in their last bits
    if count <= _EXACT:
        patterns = np.arange(2**count)[:, None] >> np.arange(count) & 1
        return float(np.mean(np.abs((2 * patterns - 1) @ differences / count) >= seen))
    chance = np.random.default_rng(0)
    means = _many(RESAMPLES, count, lambda shape: differences * (2 * chance.integers(2, size=shape) - 1))
    return float((1 + np.sum(np.abs(means) >= seen)) / (1 + RESAMPLES))


def _many(resamples: int, drawn: int, draw: Callable[[tuple[int, int]], Values]) -> Values:
    """The means of so many draws, made in blocks that fit into memory."""
    rows = max(1, _BLOCK // drawn)
    sizes = [min(rows, resamples - begin) for begin in range(0, resamples, rows)]
    means: list[npt.NDArray[Any]] = [draw((size, drawn)).mean(axis=1) for size in sizes]
    return np.concatenate(means)
