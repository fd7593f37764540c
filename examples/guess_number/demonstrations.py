"""A tiny model for this example, so that nothing is downloaded. It begins with games that are played badly.

Six guesses in ten are any of the numbers that are left; the others are any number at all.
"""

from __future__ import annotations

import random

from agent import HIGHEST, QUESTION, TRIES, narrowed

from agentlightning.learner.warm_start import Policy, WarmStart, make_policy

GAMES = 6000
HEEDS = 0.6
WARM_START = WarmStart(min_steps=240, max_steps=240)


def make(seed: int) -> Policy:
    """The model that training starts from; the same for the same seed."""
    generator = random.Random(seed)
    return make_policy([play(generator) for _ in range(GAMES)], seed=seed, options=WARM_START)


def play(generator: random.Random) -> dict:
    """One game, as a conversation."""
    secret, low, high = generator.randint(1, HIGHEST), 1, HIGHEST
    messages: list[dict] = [{"role": "user", "content": QUESTION}]
    for _ in range(TRIES):
        heeds = generator.random() < HEEDS
        said = generator.randint(low, high) if heeds else generator.randint(1, HIGHEST)
        messages.append({"role": "assistant", "content": str(said)})
        if said == secret:
            break
        low, high = narrowed(low, high, said, secret)
        messages.append({"role": "user", "content": f"{low} to {high}"})
    return {"messages": messages if messages[-1]["role"] == "assistant" else messages[:-1]}
