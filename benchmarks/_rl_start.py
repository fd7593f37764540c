"""The policies that the runs of `benchmarks/rl.py` begin with: the quickstart's, and one of the
same kind with 5M parameters. Both have learned the form of the travel desk's conversations from
mediocre demonstrations."""

from __future__ import annotations

from pathlib import Path

import _rl_sums as sums
import torch
from _flight import demonstrations, recipe

from agentlightning.learner.policy import Policy
from agentlightning.learner.tiny import chat_text, make_model, make_tokenizer, warm_start

# Layers and width of the feed-forward nets; what lies between has the quickstart's 128 channels.
SIZES = {"0.5M": (2, 384), "5M": (6, 2048)}


def make(size: str, task: str, directory: Path, seed: int = 1) -> None:
    """Write the policy of that size for that task to `directory`; the same for the same seed."""
    torch.set_num_threads(1)
    if task == "sums":
        tools, shown, steps = [], sums.demonstrations(4000, seed), 4000
    else:
        tools, steps = demonstrations.TOOLS, 100
        shown = demonstrations.demonstrations(recipe.DEMONSTRATIONS, seed)
    tokenizer = make_tokenizer(
        (chat_text(one["messages"], tools) for one in shown), recipe.VOCABULARY_SIZE
    )
    layers, inner = SIZES[size]
    model = make_model(tokenizer, seed=seed, layers=layers, inner=inner)
    warm_start(model, tokenizer, shown, tools=tools, seed=seed, steps=steps)
    print(f"{model.num_parameters():,} parameters after a warm start", flush=True)
    Policy(model, tokenizer).save(directory)
