"""Means and spreads of float64 values by key, where equal within rounding means equal."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Float64Array: TypeAlias = NDArray[np.float64]
IndexArray: TypeAlias = NDArray[np.int64]

# smaller spreads, relative to the values compared, are rounding errors
ROUNDING = 64 * np.finfo(np.float64).eps


def standard(
    values: Float64Array, keys: IndexArray, epsilon: float, std: bool = True
) -> Float64Array:
    """(v − mean) / (std + ε) over the values with the same key, with Bessel's correction; 0 if all
    are equal. Without `std` it is not divided."""
    if not len(values):
        return values
    first = np.zeros(keys.max() + 1)
    first[keys[::-1]] = values[::-1]
    differences = values - first[keys]
    differences -= mean_by(keys, differences)[keys]
    counts = np.bincount(keys)
    spread = np.sqrt(np.bincount(keys, differences**2) / (counts - 1).clip(min=1))[keys]
    largest = np.zeros(len(first))
    np.maximum.at(largest, keys, np.abs(values))
    differs = spread > ROUNDING * largest[keys]
    return np.where(differs, differences / (spread + epsilon) if std else differences, 0.0)


def mean_by(keys: IndexArray, values: Float64Array, count: int = 0) -> Float64Array:
    """The mean of the values of each key from 0 on; 0 for a key without values."""
    return np.bincount(keys, values, count) / np.bincount(keys, minlength=count).clip(min=1)


def spread_of(means: Float64Array, within: Float64Array | float = 0.0, ddof: int = 1) -> float:
    """The standard deviation of values with these means and mean variances within; 0 for mere
    rounding or too few values."""
    if len(means) <= ddof:
        return 0.0
    spread = math.hypot((means - means[0]).std(ddof=ddof), math.sqrt(np.mean(within)))
    return spread if spread > ROUNDING * float(np.abs(means).max()) else 0.0
