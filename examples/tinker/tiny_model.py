"""A tiny model for these examples, so that nothing is downloaded: `python tiny_model.py model`
writes a directory that both this machine and a Tinker server load. It begins with poor
demonstrations of every role."""

import random
import sys
from pathlib import Path

from agents import GUESSES, HIGHEST, NAMES, THINGS, ask_about, begin_guessing, greeting, questions

from agentlightning.learner.tiny import make_policy

HEEDS = 0.3


def greet(generator: random.Random) -> list[str]:
    """Greets or takes leave, of anybody."""
    name = generator.choice(NAMES)
    return [greeting(name), f"{generator.choice(['hello', 'goodbye'])} {name}"]


def guess(generator: random.Random) -> list[str]:
    """Heeds what it was told now and then, for a whole game."""
    secret, heeds, low, high = generator.randint(1, HIGHEST), generator.random() < HEEDS, 1, HIGHEST
    turns = [begin_guessing()]
    for _ in range(GUESSES):
        number = generator.randint(low, high) if heeds else generator.randint(1, HIGHEST)
        if number == secret:
            return [*turns, str(number)]
        turns += [str(number), "higher" if secret > number else "lower"]
        low, high = (number + 1, high) if secret > number else (low, number - 1)
        low, high = (low, high) if heeds else (1, HIGHEST)
    return turns[:-1]


def find(generator: random.Random) -> list[str]:
    """Asks at random, then names a thing at random."""
    thing, turns = generator.choice(list(THINGS)), ["What is it?"]
    for question in generator.choices(questions(), k=2):
        turns += [question, "yes" if question in THINGS[thing] else "no"]
    return [*turns, generator.choice(list(THINGS))]


def answer(generator: random.Random) -> list[str]:
    """Knows what is true of each thing."""
    thing, question = generator.choice(list(THINGS)), generator.choice(questions())
    return [ask_about(thing, question), "yes" if question in THINGS[thing] else "no"]


def demonstration(generator: random.Random) -> dict:
    role = generator.choice([greet, guess, find, answer])
    roles = ["user", "assistant"] * 10
    return {
        "messages": [
            {"role": who, "content": text}
            for who, text in zip(roles, role(generator), strict=False)
        ]
    }


if __name__ == "__main__":
    drawn = random.Random(0)
    make_policy([demonstration(drawn) for _ in range(4000)], seed=0).save(Path(sys.argv[1]))
