"""Which candidates are worth more rollouts: a race in which the worse half, and who is clearly beaten, stop early.

All candidates run the same tasks in the same order, so that what makes a task hard counts neither for nor against any
of them. After 2, 4, 8 … tasks, up to the whole batch, these go on:

- of m candidates the ⌈m/2⌉ best, but not fewer than are to be kept (successive halving: Jamieson and Talwalkar, AISTATS
  2016). A candidate's value is (Σ rewards + 8·E) / (n + 8), where E is the mean reward of the candidate that it was
  made from: few tasks say little, and an edit is rarely far from its origin;
- and of those whoever is not clearly worse than the leader (a race: Maron and Moore, NIPS 1993; Birattari et al., GECCO
  2002). With d the differences of its rewards and the leader's on the n tasks, it is where mean(d) + z·s/√n < 0, z the
  quantile of the normal distribution at `confidence`, and s² = (Σ (d − mean(d))² + R²) / n, R the range of all rewards:
  one more difference, as large as there can be, so that two or four tasks that happen to agree prove nothing.

Pure functions: this module knows no rollouts and no prompts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

FIRST: Final = 2  # tasks before the first decision
ORIGIN_WEIGHT: Final = 8  # how many tasks the mean of a candidate's origin is worth


class Standing(NamedTuple):
    """Rewards of a candidate, task by task, and what was to be expected of it."""

    rewards: Sequence[float]
    expected: float

    @property
    def value(self) -> float:
        return (sum(self.rewards) + ORIGIN_WEIGHT * self.expected) / (len(self.rewards) + ORIGIN_WEIGHT)


def rungs(tasks: int, beyond: int = 0) -> list[int]:
    """After how many tasks to decide: powers of two above `beyond`, then all of them. `20 → [2, 4, 8, 16, 20]`."""
    powers = (FIRST << power for power in range(tasks.bit_length()))
    return [*(count for count in powers if beyond < count < tasks), tasks]


def survivors(standings: Mapping[str, Standing], keep: int, confidence: float) -> list[str]:
    """Who goes on, best first, where all have run the same tasks. Of equals the one named first is ahead."""
    ranking = sorted(standings, key=lambda name: -standings[name].value)
    best = ranking[: halved(len(ranking), keep)]
    leader = standings[best[0]].rewards
    every = [reward for standing in standings.values() for reward in standing.rewards]
    spread = max(every) - min(every)
    return [name for name in best if not is_worse(standings[name].rewards, leader, spread, confidence)]


def halved(count: int, keep: int) -> int:
    """How many of `count` candidates go on if none is clearly worse."""
    return min(count, max(keep, math.ceil(count / 2)))


def is_worse(rewards: Sequence[float], leader: Sequence[float], spread: float, confidence: float) -> bool:
    """Whether `rewards` are clearly lower than the leader's on the same tasks, as the module's formula has it."""
    differences = [one - other for one, other in zip(rewards, leader, strict=True)]
    mean, count = statistics.fmean(differences), len(differences)
    variance = (sum((one - mean) ** 2 for one in differences) + spread**2) / count
    return mean + statistics.NormalDist().inv_cdf(confidence) * math.sqrt(variance / count) < 0
