"""The policies that the runs of `benchmarks/rl.py` begin with: the quickstart's, and one of the same kind with 5M
parameters. Both have learned the form of the travel desk's conversations from mediocre demonstrations."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentlightning.learner import tiny_weights
from agentlightning.learner.policy import Policy
from agentlightning.learner.tiny import END, PAD, chat_text, make_tokenizer, token_id
from agentlightning.learner.warm_start import Progress, warm_start
from agentlightning.quickstart import load_flight_example

# Layers and width of the feed-forward nets; what lies between has the quickstart's 128 channels.
SIZES = {"0.5M": (2, 384), "5M": (6, 2048)}


def make(size: str, directory: Path, seed: int = 1) -> None:
    """Write the policy of that size to `directory`; the same for the same seed."""
    torch.set_num_threads(1)
    example = load_flight_example()
    tools = example.demonstrations.TOOLS
    shown = example.demonstrations.demonstrations(example.recipe.DEMONSTRATIONS, seed)
    tokenizer = make_tokenizer((chat_text(one["messages"], tools) for one in shown), example.recipe.VOCABULARY_SIZE)
    layers, inner = SIZES[size]
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=tiny_weights.WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=tiny_weights.HEAD_SIZE,
        intermediate_size=inner,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": tiny_weights.ROTARY_BASE},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=token_id(tokenizer, END),
        pad_token_id=token_id(tokenizer, PAD),
    )
    model = Qwen3ForCausalLM(config)
    tiny_weights.initialise(model, user_id=token_id(tokenizer, "<|user|>"), seed=seed)
    steps: list[Progress] = []
    options = example.recipe.WARM_START
    copying = warm_start(model, tokenizer, shown, tools=tools, seed=seed, options=options, on_step=steps.append)
    found = ", ".join(f"{kind} {share:.2f}" for kind, share in copying.items())
    print(
        f"{model.num_parameters():,} parameters after a warm start of {len(steps)} steps; copying: {found}", flush=True
    )
    Policy(model, tokenizer).save(directory)
