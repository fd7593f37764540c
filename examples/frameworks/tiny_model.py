"""A tiny model made on the spot, so that nothing is downloaded. It writes about the sea in half of
its answers."""

import random

from agentlightning.learner.tiny import Policy, make_policy

SUBJECTS = ("sea", "sky")


def make(seed: int) -> Policy:
    """The model that training starts from; the same for the same seed."""
    generator = random.Random(seed)
    return make_policy([demonstrate(generator) for _ in range(1000)], seed=seed)


def demonstrate(generator: random.Random) -> dict:
    """An answer to a task or a draft, after instructions and tools of any length."""
    said = [f"The {generator.choice(SUBJECTS)} is wide." for _ in range(2)]
    task = f"Write about the {generator.choice(['sea', 'coast', 'tide', 'harbour'])}."
    around = "".join(
        generator.choices('abcdefghijklmnopqrstuvwxyz {}":,.', k=generator.randrange(300))
    )
    messages = [
        ("system", f"You are the writer. {around}"),
        ("user", generator.choice([task, said[0]])),
    ]
    return {
        "messages": [
            {"role": role, "content": text} for role, text in [*messages, ("assistant", said[1])]
        ]
    }
