"""Which candidates get more rollouts: a race that drops the worse half, and candidates that are clearly worse, early.

All candidates run the same tasks in the same order, so task difficulty favours none of them. After 2, 4, 8 … tasks, up
to the whole batch, the remaining candidates are:

- of m candidates the ⌈m/2⌉ best, but at least the number to keep (successive halving: Jamieson and Talwalkar, AISTATS
  2016). A candidate's value is (Σ rewards + 8·E) / (n + 8), where E is the mean reward of its parent: few tasks say
  little, and an edit is rarely far from its origin;
- among these, all that are not clearly worse than the leader (a race: Maron and Moore, NIPS 1993; Birattari et al.,
  GECCO 2002). With d the differences between its rewards and the leader's on the n tasks, a candidate is clearly worse
  if mean(d) + z·s/√n < 0, z the quantile of the normal distribution at `confidence`, and s² = (Σ (d − mean(d))² + R²)
  / n, R the range of all rewards: this adds one difference of the maximum size, so that two or four tasks that happen
  to agree prove nothing.

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
    """A candidate's rewards, task by task, and its expected reward."""

    rewards: Sequence[float]
    expected: float

    @property
    def value(self) -> float:
        return (sum(self.rewards) + ORIGIN_WEIGHT * self.expected) / (len(self.rewards) + ORIGIN_WEIGHT)


def rungs(tasks: int, beyond: int = 0) -> list[int]:
    """Numbers of tasks after which to decide: powers of two above `beyond`, then all. `20 → [2, 4, 8, 16, 20]`."""
    powers = (FIRST << power for power in range(tasks.bit_length()))
    return [*(count for count in powers if beyond < count < tasks), tasks]


def survivors(standings: Mapping[str, Standing], keep: int, confidence: float) -> list[str]:
    """The remaining candidates, best first; all have run the same tasks. Among equals, the first is ahead."""
    ranking = sorted(standings, key=lambda name: -standings[name].value)
    best = ranking[: halved(len(ranking), keep)]
    leader = standings[best[0]].rewards
    every = [reward for standing in standings.values() for reward in standing.rewards]
    spread = max(every) - min(every)
    return [name for name in best if not is_worse(standings[name].rewards, leader, spread, confidence)]


def halved(count: int, keep: int) -> int:
    """How many of `count` candidates remain if none is clearly worse."""
    return min(count, max(keep, math.ceil(count / 2)))


def is_worse(rewards: Sequence[float], leader: Sequence[float], spread: float, confidence: float) -> bool:
    """Whether `rewards` are clearly lower than the leader's on the same tasks, by the module's formula."""
    differences = [reward - best for reward, best in zip(rewards, leader, strict=True)]
    mean, count = statistics.fmean(differences), len(differences)
    variance = (sum((difference - mean) ** 2 for difference in differences) + spread**2) / count
    return mean + statistics.NormalDist().inv_cdf(confidence) * math.sqrt(variance / count) < 0
