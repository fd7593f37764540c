"""Chooses the next task: epoch after epoch, each task once, in an order from the seed or a
curriculum."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec

from agentlightning.data.functions import call
from agentlightning.errors import ConfigError

Curriculum: TypeAlias = Callable[[Sequence[Any], int], Sequence[int]]
"""`(tasks, epoch) → indices`: the order of epoch 0, 1, 2 …; tasks may be left out or repeated."""


Picker: TypeAlias = Callable[[Sequence[Any], random.Random], int]
"""`(tasks, rng) → index` of the task to run next (`RLSettings.next_task`)."""


class SamplerState(msgspec.Struct):
    """The state of a sampler: the number of the next task, and, for tasks that were too hard or too
    easy, the epoch from which they are tried again, by index."""

    position: int = 0
    skipped: dict[int, int] = {}


class TaskSampler:
    """The endless sequence of tasks: position 0, 1, 2 … Without a `curriculum`, an epoch is a
    permutation of the tasks drawn from (seed, epoch). With a `difficulty` range, a task whose group
    had a mean reward outside it is left out of the next epoch."""

    def __init__(
        self,
        tasks: Sequence[Any],
        seed: int,
        curriculum: Curriculum | None = None,
        difficulty: tuple[float, float] | None = None,
        pick: Picker | None = None,
    ) -> None:
        self.tasks = tasks
        self.state = SamplerState()
        self._seed = seed
        self._curriculum = curriculum
        self._difficulty = difficulty
        self._pick = pick
        self._starts = [0]  # the position at which each epoch seen so far starts
        self._orders: list[list[int]] = []

    def task(self, position: int, index: int | None = None) -> Any:
        """The task at a position; `index` is given if the task was picked."""
        return self.tasks[self._at(position)[1] if index is None else index]

    def take(self) -> tuple[int, int | None]:
        """The next position, and the task's index if `pick` chose it. ConfigError for an index out
        of range."""
        if self._pick is None:
            return self._next_of_epoch(), None
        position = self.state.position
        index = self._pick(self.tasks, random.Random(f"{self._seed}/task/{position}"))
        if index not in range(len(self.tasks)):
            raise ConfigError(
                f"next_task returned {index!r}; give the index of one of {len(self.tasks)} tasks"
            )
        self.state.position += 1
        return position, int(index)

    def _next_of_epoch(self) -> int:
        """The next position whose task is not skipped."""
        while True:
            position = self.state.position
            self.state.position += 1
            epoch, index = self._at(position)
            if self.state.skipped.get(index, 0) <= epoch:  # two epochs later at the latest
                return position

    def report(self, position: int, reward: float) -> None:
        """Report the mean reward of the group for the task at `position`."""
        if self._difficulty is None:
            return
        epoch, index = self._at(position)
        low, high = self._difficulty
        if low <= reward <= high:
            self.state.skipped.pop(index, None)
        else:
            self.state.skipped[index] = epoch + 2

    def _at(self, position: int) -> tuple[int, int]:
        """(epoch, index of the task) at a position."""
        while self._starts[-1] <= position:
            self._orders.append(self._order(len(self._orders)))
            self._starts.append(self._starts[-1] + len(self._orders[-1]))
        epoch = next(
            epoch for epoch in reversed(range(len(self._orders))) if self._starts[epoch] <= position
        )
        return epoch, self._orders[epoch][position - self._starts[epoch]]

    def _order(self, epoch: int) -> list[int]:
        if self._curriculum is None:
            order = list(range(len(self.tasks)))
            random.Random(f"{self._seed}/epoch/{epoch}").shuffle(order)
            return order
        answer = call("curriculum", self._curriculum, tasks=self.tasks, epoch=epoch)
        order = [int(index) for index in answer]
        if not order or not all(0 <= index < len(self.tasks) for index in order):
            raise ConfigError(
                f"the curriculum returned {order!r:.200} for epoch {epoch}; give indices of "
                f"{len(self.tasks)} tasks"
            )
        return order
