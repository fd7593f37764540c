"""A tiny model with room for the tens of thousands of tokens that a harness's instructions have.

It knows the words of Python's own documentation, and from a few demonstrations that an answer is
short. A real model needs no such file."""

import argparse
import inspect
import logging
import random
import subprocess
import typing

from agentlightning.learner.tiny import Policy, make_model, make_tokenizer, warm_start

WORDS = inspect.getdoc(typing).split() + inspect.getdoc(subprocess).split()


def make(seed: int) -> Policy:
    """The model that training starts from; the same for the same seed."""
    text = [inspect.getsource(module) for module in (argparse, logging, subprocess, typing)]
    tokenizer = make_tokenizer(text, 2048)
    model = make_model(tokenizer, seed=seed, max_positions=65536)
    generator = random.Random(seed)
    shown = [demonstrate(generator) for _ in range(1000)]
    warm_start(model, tokenizer, shown, seed=seed)
    return Policy(model, tokenizer)


def demonstrate(generator: random.Random) -> dict:
    asked, answer = (
        " ".join(generator.choices(WORDS, k=generator.randint(1, 6))) for _ in range(2)
    )
    return {
        "messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    }
