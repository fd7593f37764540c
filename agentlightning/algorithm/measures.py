"""Measures an evaluation: mean reward, pass@k, intervals, the same by tag, and a comparison of two.

Rollouts of one task are attempts at it. Tasks are the same if their inputs are.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, Final, Literal, TypeAlias, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt

from agentlightning.data.rewards import NOT_FINITE
from agentlightning.data.transitions import TracedRollout
from agentlightning.errors import ConfigError

Ended: TypeAlias = Literal["rewarded", "failed", "no reward", "not a number", "left out"]

EVALUATED_STEP: Final = "step"
"""Key of a rollout's metadata: the training step after which it was measured."""
TAG_FIELDS = ("tags", "kind")
_LEFT_OUT: Ended = "left out"
_CLOSE = 1e-9  # a sum of tenths is a little less than 1


@dataclass(frozen=True)
class Measured:
    """One rollout. Without a reward it counts 0 and passes nothing, so failing cannot help.
    Cancelled and running rollouts are left out. `problem` is the reason why it failed."""

    rollout_id: str
    task: str
    tags: frozenset[str]
    reward: float | None
    ended: Ended
    problem: str = ""


@dataclass(frozen=True)
class Measures:
    """The measures to take. An attempt passes with a reward of at least `threshold`. By default
    `ks` are 1 and the number of attempts of every task."""

    ks: tuple[int, ...] | None = None
    threshold: float = 1.0
    confidence: float = 0.95


class Estimate(msgspec.Struct, frozen=True):
    """A mean over `tasks`, and its interval; None for one task."""

    value: float
    tasks: int
    interval: tuple[float, float] | None


class Difference(Estimate, frozen=True):
    """The second minus the first, a mean over the `tasks` of both, and its p-value."""

    p: float


class Summary(msgspec.Struct, frozen=True):
    """`ended` counts rollouts; `attempts` are the fewest and the most per task; `estimates` are
    `reward` and `pass@k`, `tags` the same for the tasks with each tag. `problem` is the first
    reason of a failure, with its rollout."""

    tasks: int
    attempts: tuple[int, int]
    ended: dict[str, int]
    problem: str
    estimates: dict[str, Estimate]
    tags: dict[str, dict[str, Estimate]]

    def __str__(self) -> str:
        low, high = self.attempts
        ended = ", ".join(f"{count} {how}" for how, count in self.ended.items())
        return (
            f"tasks {self.tasks}, attempts {low if low == high else f'{low} to {high}'} each: "
            f"{ended}"
        )


class Comparison(msgspec.Struct, frozen=True):
    """Two summaries and their differences over the tasks of both; `unpaired` tasks are in one
    only."""

    first: Summary
    second: Summary
    unpaired: int
    differences: dict[str, Difference]
    tags: dict[str, dict[str, Difference]]


def measured(traced: TracedRollout, tag_fields: Sequence[str] = TAG_FIELDS) -> Measured:
    """A rollout's measures. Its tags are the words in `tags`, and `field=value` for the other
    `tag_fields`, in its input and metadata."""
    rollout = traced.rollout
    ended = "rewarded"
    if rollout.status not in ("succeeded", "failed"):
        ended = _LEFT_OUT
    elif rollout.status == "failed":
        ended = "failed"
    elif traced.reward is None:
        ended = "not a number" if NOT_FINITE in traced.rewards_lost else "no reward"
    tags = {tag for place in (rollout.input, rollout.metadata) for tag in _tags(place, tag_fields)}
    problem = (rollout.error or "") if ended == "failed" else ""
    return Measured(
        rollout.rollout_id, task_of(rollout.input), frozenset(tags), traced.reward, ended, problem
    )


def task_of(given: Any) -> str:
    """A rollout's input as JSON by which the same task is recognised."""
    return msgspec.json.encode(given, order="sorted", enc_hook=str).decode()


def _tags(place: Any, fields: Sequence[str]) -> Iterable[str]:
    values = cast(Mapping[str, Any], place) if isinstance(place, Mapping) else {}
    for field in fields:
        value = values.get(field)
        for tag in cast(list[Any], value) if isinstance(value, list | tuple) else [value]:
            if isinstance(tag, str | int | float):
                yield str(tag) if field == "tags" else f"{field}={tag}"


Values: TypeAlias = npt.NDArray[np.float64]
T = TypeVar("T")
_Attempts: TypeAlias = dict[str, list[Measured]]  # by task
_Values: TypeAlias = dict[str, dict[str, float]]  # what is measured → task → its value


def summarise(rollouts: Sequence[Measured], measures: Measures) -> Summary:
    """Measure these rollouts. ConfigError if none is over, or no task has k attempts."""
    attempts = _attempts(rollouts)
    counts = [len(of_task) for of_task in attempts.values()]
    estimates, by_tag = _by_tag(
        _values(attempts, measures), attempts, partial(_estimate, measures.confidence)
    )
    return Summary(
        tasks=len(attempts),
        attempts=(min(counts), max(counts)),
        ended=dict(Counter(rollout.ended for rollout in rollouts)),
        problem=next(
            (f"{rollout.rollout_id}: {rollout.problem}" for rollout in rollouts if rollout.problem),
            "",
        ),
        estimates=estimates,
        tags=by_tag,
    )


def compare(
    first: Sequence[Measured], second: Sequence[Measured], measures: Measures
) -> Comparison:
    """Compare two evaluations. ConfigError as for `summarise`, and if they share no task."""
    tried, tried_too = (_attempts(side).keys() for side in (first, second))
    both = tried & tried_too
    if not both:
        raise ConfigError(
            "they have no task in common, the same input in both; evaluate both on the same dataset"
        )
    first, second = (
        [rollout for rollout in side if rollout.task in both] for side in (first, second)
    )
    first_attempts = _attempts(first)
    second_attempts = _attempts(second)
    measures = replace(
        measures, ks=measures.ks or _usual_ks([*first_attempts.values(), *second_attempts.values()])
    )
    before = _values(first_attempts, measures)
    after = _values(second_attempts, measures)
    differences = {
        name: {
            task: after[name][task] - value
            for task, value in of_tasks.items()
            if task in after[name]
        }
        for name, of_tasks in before.items()
    }
    found, by_tag = _by_tag(differences, first_attempts, partial(_difference, measures.confidence))
    return Comparison(
        summarise(first, measures),
        summarise(second, measures),
        len(tried ^ tried_too),
        found,
        by_tag,
    )


def _attempts(rollouts: Sequence[Measured]) -> _Attempts:
    attempts: _Attempts = {}
    for rollout in rollouts:
        if rollout.ended != _LEFT_OUT:
            attempts.setdefault(rollout.task, []).append(rollout)
    if not attempts:
        raise ConfigError(
            f"there is nothing to measure: of {len(rollouts)} rollouts none succeeded or failed"
        )
    return attempts


def _usual_ks(attempts: Iterable[list[Measured]]) -> tuple[int, ...]:
    return tuple(sorted({1, min(map(len, attempts))}))


def _values(attempts: _Attempts, measures: Measures) -> _Values:
    """The mean reward of each task, and pass@k of tasks with at least k attempts."""
    most = max(map(len, attempts.values()))
    passed = {
        task: sum(m.reward is not None and m.reward >= measures.threshold - _CLOSE for m in of_task)
        for task, of_task in attempts.items()
    }
    values = {
        "reward": {
            task: fmean(rollout.reward or 0.0 for rollout in of_task)
            for task, of_task in attempts.items()
        }
    }
    for k in measures.ks or _usual_ks(attempts.values()):
        if not 1 <= k <= most:
            raise ConfigError(
                f"pass@{k} needs {k} attempts at a task, and the most that one has is {most}"
            )
        enough = {task: len(of_task) for task, of_task in attempts.items() if len(of_task) >= k}
        values[f"pass@{k}"] = {
            task: pass_at_k(count, passed[task], k) for task, count in enough.items()
        }
    return values


def _by_tag(
    values: _Values, attempts: _Attempts, make: Callable[[Values], T]
) -> tuple[dict[str, T], dict[str, dict[str, T]]]:
    """Apply `make` to each measure over all tasks, and over those of each tag; leave out what no
    task has."""
    tagged: defaultdict[str, set[str]] = defaultdict(set)
    for task, of_task in attempts.items():
        for tag in frozenset[str]().union(*(rollout.tags for rollout in of_task)):
            tagged[tag].add(task)

    def made(tasks: Container[str]) -> dict[str, T]:
        arrays = {
            name: [value for task, value in own.items() if task in tasks]
            for name, own in values.items()
        }
        return {name: make(np.array(array)) for name, array in arrays.items() if array}

    return made(attempts), {tag: made(own) for tag, own in sorted(tagged.items())}


def _estimate(confidence: float, values: Values) -> Estimate:
    return Estimate(float(values.mean()), len(values), mean_interval(values, confidence))


def _difference(confidence: float, values: Values) -> Difference:
    mean = _estimate(confidence, values)
    return Difference(mean.value, mean.tasks, mean.interval, paired_p_value(values))


# What is drawn at random is tasks, never attempts: attempts at one task are alike, and drawing them
# one by one would make few tasks look like many (a cluster bootstrap). So each task counts once,
# with the mean over its attempts, and every statistic is of float64[T], one value per task. The
# random numbers are the same at every call.

RESAMPLES: Final = 10_000
_BLOCK: Final = 2_000_000  # random numbers at a time
# tasks up to which every pattern of signs is tried: 2 to the power of it is below RESAMPLES
_EXACT: Final = 13


def pass_at_k(attempts: int, passed: int, k: int) -> float:
    """The chance that at least one of `k` attempts passes, by n = `attempts` of which c = `passed`
    did.

    It is 1 − C(n−c, k) / C(n, k), the unbiased estimate of Chen et al. (2021, arXiv:2107.03374):
    `pass_at_k(4, 1, 2)` is 1 − 3/6."""
    return 1.0 - math.comb(attempts - passed, k) / math.comb(attempts, k)


def mean_interval(values: Values, confidence: float) -> tuple[float, float] | None:
    """An interval for the mean over all possible tasks: percentiles of the means of T − 1 tasks
    drawn with replacement, which vary like the mean of T new tasks (Rao and Wu 1988; means of T
    drawn of T vary less). None for fewer than two tasks.

    ConfigError unless 0 < confidence < 1."""
    if not 0 < confidence < 1:
        raise ConfigError(
            f"the confidence is {confidence}; it must be above 0 and below 1, such as 0.95"
        )
    if len(values) < 2:
        return None
    chance = np.random.default_rng(0)
    means = _many(
        RESAMPLES, len(values) - 1, lambda shape: values[chance.integers(len(values), size=shape)]
    )
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def paired_p_value(differences: Values) -> float:
    """The probability of a mean difference at least this far from 0, if chance decides which of the
    two did better on each task: the share of sign patterns with one (two-sided, Fisher 1935). All
    patterns for up to 13 tasks, or else 10,000 random ones plus the observed one, so that it is
    never 0. 1 for one task."""
    count = len(differences)
    seen = abs(differences.mean()) * (1 - 1e-9)  # sums in another order differ in their last bits
    if count <= _EXACT:
        patterns = np.arange(2**count)[:, None] >> np.arange(count) & 1
        return float(np.mean(np.abs((2 * patterns - 1) @ differences / count) >= seen))
    chance = np.random.default_rng(0)
    means = _many(
        RESAMPLES, count, lambda shape: differences * (2 * chance.integers(2, size=shape) - 1)
    )
    return float((1 + np.sum(np.abs(means) >= seen)) / (1 + RESAMPLES))


def _many(resamples: int, drawn: int, draw: Callable[[tuple[int, int]], Values]) -> Values:
    """The means of so many draws, made in blocks that fit into memory."""
    rows = max(1, _BLOCK // drawn)
    sizes = [min(rows, resamples - begin) for begin in range(0, resamples, rows)]
    means: list[npt.NDArray[Any]] = [draw((size, drawn)).mean(axis=1) for size in sizes]
    return np.concatenate(means)
