"""A tiny model made on the spot, so that nothing is downloaded. It writes about the sea in half of its answers."""

import random

from agentlightning.learner.warm_start import Policy, make_policy

ROLES = ("writer", "rewriter")
SUBJECTS = ("sea", "sky")


def make(seed: int) -> Policy:
    """The model that training starts from; the same for the same seed."""
    generator = random.Random(seed)
    return make_policy([demonstrate(generator) for _ in range(500)], seed=seed)


def demonstrate(generator: random.Random) -> dict:
    asked = {"role": "user", "content": f"Write about the {generator.choice(SUBJECTS)}."}
    said = {"role": "assistant", "content": f"The {generator.choice(SUBJECTS)} is wide."}
    return {"messages": [{"role": "system", "content": f"You are the {generator.choice(ROLES)}."}, asked, said]}
