"""The tower of Hanoi with three pegs: its moves, and the shortest way from any position.

A position has a letter for each disk, the smallest first: in `ABB` the smallest disk is on peg A.
Knows neither models nor agents."""

from __future__ import annotations

PEGS = "ABC"
# from one peg to another
WAYS = tuple(one + other for one in PEGS for other in PEGS if one != other)


class Tower:
    """A tower at a position, and the moves that were made."""

    def __init__(self, position: str, goal: str) -> None:
        self.position = position
        self.goal = goal
        self.moves: list[str] = []  # as the scorer of reasoning-gym reads them

    @property
    def state(self) -> str:
        """The goal and the position: `to C: ABB`."""
        return f"to {self.goal}: {self.position}"

    def move(self, way: str) -> None:
        """Move the upper disk from one peg to another, such as `AC`. ValueError if that is not
        allowed."""
        if way not in WAYS:
            raise ValueError("no way")
        source, target = way
        disk = self.position.find(source)
        if disk < 0:
            raise ValueError("no disk")
        if target in self.position[:disk]:
            raise ValueError("too large")
        self.position = self.position[:disk] + target + self.position[disk + 1 :]
        pegs = [PEGS.index(peg) + 1 for peg in way]
        self.moves.append(f"Move disk {disk + 1} from Peg {pegs[0]} to Peg {pegs[1]}")


def best_way(position: str, goal: str) -> str | None:
    """The first move of the shortest way on which all disks come to the peg `goal`; None if they
    are there."""
    if not position:
        return None
    smaller, largest = position[:-1], position[-1]
    if largest == goal:
        return best_way(smaller, goal)
    return best_way(smaller, third(largest, goal)) or largest + goal


def distance(position: str, goal: str) -> int:
    """How many moves the shortest way has."""
    if not position:
        return 0
    smaller, largest = position[:-1], position[-1]
    if largest == goal:
        return distance(smaller, goal)
    return distance(smaller, third(largest, goal)) + 2 ** len(smaller)


def third(one: str, other: str) -> str:
    """The peg that is neither."""
    return next(peg for peg in PEGS if peg not in (one, other))
