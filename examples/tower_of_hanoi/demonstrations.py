"""A tiny model for this example, so that nothing is downloaded. It has seen games of a poor player,
who knows the form of a move and the best one only at times, and often stops too early.

`python demonstrations.py --seed 1 --out start` saves it, for several trainings from one start."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from agent import MOST_CALLS, MOVE, asked, use
from tasks import DISKS, is_held_out
from tower import PEGS, WAYS, Tower, best_way

from agentlightning.learner.tiny import Policy, make_policy

GAMES = 4000
STEPS = 700
SHORT = 8  # calls of most games, which is where most is learned for the time it takes
LONG = 0.15  # the share of games of all calls
KNOWS = 0.55  # how often it makes the best move, beyond chance
STOPS = 0.01  # how often it says too early that it is done


def make(seed: int) -> Policy:
    """The model that training starts from; the same for the same seed."""
    generator = random.Random(seed)
    shown = [demonstrate(generator)[0] for _ in range(GAMES)]
    return make_policy(shown, tools=[MOVE], seed=seed, steps=STEPS)


def demonstrate(generator: random.Random) -> tuple[dict, bool]:
    """One game, as a conversation, and whether it was won."""
    goal = generator.choice(PEGS)
    position = ""
    while not position or is_held_out(position, goal):
        position = "".join(generator.choice(PEGS) for _ in range(DISKS))
    tower = Tower(position, goal)
    messages = [asked(tower)]
    calls = MOST_CALLS if generator.random() < LONG else SHORT
    for number in range(calls):
        best = best_way(tower.position, goal)
        if best is None or generator.random() < STOPS:
            messages.append({"role": "assistant", "content": "done"})
            return {"messages": messages}, best is None
        way = best if generator.random() < KNOWS else generator.choice(WAYS)
        call = {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": "move", "arguments": json.dumps({"way": way})},
        }
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        result = use(tower, call["function"]["arguments"])
        messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": result})
    return {"messages": messages}, best_way(tower.position, goal) is None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("start"))
    options = parser.parse_args()
    make(options.seed).save(options.out)
