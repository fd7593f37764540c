"""The puzzles: towers of reasoning-gym that somebody has begun to move, 12 moves or more from their
goal. Every fourth position and goal is held out."""

from __future__ import annotations

import random
import zlib
from contextlib import suppress
from itertools import islice

from tower import PEGS, WAYS, Tower, distance

from agentlightning.rewards import reasoning_gym_score
from agentlightning.rewards.reasoning_gym import reasoning_gym_tasks

DISKS = 4
LEAST = 12  # moves of the shortest way
SOURCE = {
    "reasoning_gym": "tower_of_hanoi",
    "min_disks": DISKS,
    "max_disks": DISKS,
    "min_pegs": 3,
    "max_pegs": 3,
}


def train() -> list[dict]:
    return puzzles(64, seed=1, held_out=False)


def held_out() -> list[dict]:
    return puzzles(24, seed=2, held_out=True)


def puzzles(size: int, *, seed: int, held_out: bool) -> list[dict]:
    """Different puzzles: `position`, `goal`, and what the scorer needs, with the moves that were
    made before as `opening`."""
    generator = random.Random(seed)
    found: dict[tuple[str, str], dict] = {}
    for made in reasoning_gym_tasks(SOURCE | {"seed": seed, "size": 100 * size}):
        start, goal = (PEGS[made["metadata"][key] - 1] for key in ("start_peg", "target_peg"))
        tower = wander(Tower(start * DISKS, goal), generator)
        key = tower.position, goal
        if is_held_out(*key) == held_out and distance(*key) >= LEAST:
            task = {key: made[key] for key in ("answer", "source")}
            task |= {"position": tower.position, "goal": goal, "opening": tower.moves}
            found.setdefault(key, task)
    return list(islice(found.values(), size))


def is_held_out(position: str, goal: str) -> bool:
    return zlib.crc32(f"{position} {goal}".encode()) % 4 == 0


def wander(tower: Tower, generator: random.Random) -> Tower:
    """A tower after up to 30 moves at random."""
    for _ in range(generator.randrange(30)):
        with suppress(ValueError):
            tower.move(generator.choice(WAYS))
    return tower


def solved(task: dict, moves: list[str]) -> float:
    """1 for a solved puzzle, whatever it took, and 0 otherwise. The scorer gives 0.05 for one that
    is not."""
    return float(reasoning_gym_score(task, "\n".join(task["opening"] + moves)) > 0.05)
