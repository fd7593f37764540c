"""Which tasks a step trains on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any


def tasks_of_step(tasks: Sequence[Any], step: int, count: int, seed: int) -> list[Any]:
    """The tasks of step 1, 2, …: each epoch is a permutation of the dataset drawn from (seed, epoch)."""
    orders: dict[int, list[int]] = {}
    chosen: list[Any] = []
    for position in range((step - 1) * count, step * count):
        epoch, index = divmod(position, len(tasks))
        if epoch not in orders:
            orders[epoch] = list(range(len(tasks)))
            random.Random(f"{seed}/epoch/{epoch}").shuffle(orders[epoch])
        chosen.append(tasks[orders[epoch][index]])
    return chosen
