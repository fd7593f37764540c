"""How fast and how large training is on this machine, by model size: sampling, a gradient step,
peak memory.

    python benchmarks/models.py [--sizes 0.5M,5M,50M]

Each size runs in a process of its own, with random weights in the shape of a Qwen3 model, float32
on CPU: 16 calls of 256 prompt and 64 sampled tokens, then one optimiser step (AdamW) on those 16
sequences. Speed does not depend on what the weights are. On a machine with a GPU the same script
uses it, and 0.6B fits too."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

SIZES: dict[str, dict[str, int]] = {
    "0.5M": {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 32,
        "vocab_size": 700,
    },
    "5M": {
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "head_dim": 32,
        "vocab_size": 2000,
    },
    "50M": {
        "hidden_size": 512,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "head_dim": 64,
        "vocab_size": 16000,
    },
    "0.6B": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
    },
}
CALLS, PROMPT, SAMPLED = 16, 256, 64


def measure(size: str) -> dict[str, Any]:
    """One size, in this process."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from agentlightning.data.sequences import TrainingSequence
    from agentlightning.engine.engine import Engine, GenerationRequest
    from agentlightning.learner.losses import Loss
    from agentlightning.learner.policy import Policy, choose_device
    from agentlightning.learner.policy_config import AdamW
    from agentlightning.learner.torch import TorchLearner

    shape = {"num_key_value_heads": 2, "intermediate_size": 3 * SIZES[size]["hidden_size"]} | SIZES[
        size
    ]
    device = choose_device()
    config = Qwen3Config(**shape, max_position_embeddings=1024, tie_word_embeddings=True)
    model = Qwen3ForCausalLM(config).to(device=device)
    if model.num_parameters() < 10_000_000:
        torch.set_num_threads(1)
    random = np.random.default_rng(0)
    prompts = random.integers(10, shape["vocab_size"], (CALLS, PROMPT)).tolist()
    engine = Engine(model, eos_token_ids=[], max_sequence_length=PROMPT + SAMPLED, slots=CALLS)
    sampled: list[list[Any]] = [[] for _ in prompts]
    started = time.perf_counter()
    for prompt, tokens in zip(prompts, sampled, strict=True):
        engine.submit(
            GenerationRequest(prompt_token_ids=prompt, max_tokens=SAMPLED), tokens.append, print
        )
    while engine.step():
        pass
    sampling = time.perf_counter() - started
    batch = [
        TrainingSequence(
            rollout_id=str(row),
            token_ids=np.array(prompt + [token.token_id for token in tokens], np.int32),
            positions=np.arange(PROMPT, PROMPT + SAMPLED, dtype=np.int32),
            transitions=np.zeros(SAMPLED, np.int32),
            logprobs=np.array([token.logprob for token in tokens], np.float32),
            advantages=np.full(SAMPLED, random.normal(), np.float32),
            versions=np.zeros(SAMPLED, np.int32),
        )
        for row, (prompt, tokens) in enumerate(zip(prompts, sampled, strict=True))
    ]
    learner = TorchLearner(Policy(model, None), AdamW(micro_batch_tokens=1024))  # type: ignore[arg-type]
    started = time.perf_counter()
    metrics = learner.step(batch, Loss())
    learning = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "size": size,
        "parameters": model.num_parameters(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "sampled_tokens_per_second": round(CALLS * SAMPLED / sampling, 1),
        "step_seconds": round(learning, 2),
        "peak_memory_gib": round(
            (torch.cuda.max_memory_allocated() if device == "cuda" else peak) / 2**30, 2
        ),
        "mismatch": metrics["max_ratio_error"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="0.5M,5M,50M")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one)))
        return
    rows = []
    for size in options.sizes.split(","):
        done = subprocess.run(
            [sys.executable, __file__, "--one", size], stdout=subprocess.PIPE, text=True, check=True
        )
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    names = ("model", "parameters", "sampled tokens/s", "step of 16", "peak memory", "mismatch")
    print("{:>6} {:>12} {:>17} {:>11} {:>12} {:>9}".format(*names))
    for row in rows:
        print(
            f"{row['size']:>6} {row['parameters']:>12,} "
            f"{row['sampled_tokens_per_second']:>17,.0f} {row['step_seconds']:>9.2f} s "
            f"{row['peak_memory_gib']:>8.2f} GiB {row['mismatch']:>9.1e}"
        )
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    (results / "models.json").write_text(
        json.dumps({"cores": os.cpu_count(), "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
