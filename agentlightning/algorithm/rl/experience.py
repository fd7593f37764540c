"""Recent groups, trained again: those whose rewards differ most are the likeliest to be drawn.

Knows groups and their rewards. How old a group may be is for `Groups` to say.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from agentlightning.algorithm.rl.groups import CompleteGroup

# A group without spread may still be drawn: with a baseline over the batch it teaches, too.
LEAST_PRIORITY = 0.05


class Experience:
    """The groups that were trained lately. Draws depend on the seed, the step and the groups alone."""

    def __init__(self, seed: int) -> None:
        self.groups: list[CompleteGroup] = []
        self._seed = seed

    def add(self, groups: list[CompleteGroup]) -> None:
        self.groups += groups

    def forget(self, too_old: Callable[[CompleteGroup], bool]) -> None:
        self.groups = [group for group in self.groups if not too_old(group)]

    def draw(self, count: int, step: int) -> list[CompleteGroup]:
        """Up to `count` different groups, each as likely as the standard deviation of its rewards is large (prioritised
        replay, arXiv:1511.05952)."""
        drawn: list[CompleteGroup] = []
        left = list(self.groups)
        chance = random.Random(f"{self._seed}/replay/{step}")
        while left and len(drawn) < count:
            drawn.append(left.pop(chance.choices(range(len(left)), [_priority(group) for group in left])[0]))
        return drawn


def _priority(group: CompleteGroup) -> float:
    rewards = [traced.reward for traced in group.rollouts if traced.reward is not None]
    return max(LEAST_PRIORITY, float(np.std(rewards))) if rewards else LEAST_PRIORITY
