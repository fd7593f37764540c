"""What a correction, and learning what was observed, add to the optimiser steps of one batch.

    python benchmarks/corrections.py [--rounds 7]

Rollouts of six calls, as in `_training_step.py` but shorter, at level trajectory, with a Qwen3 of
3M random parameters in float32 on one core. A batch makes 2 minibatches in 2 epochs: four optimiser
steps. Settings take turns within each round; seconds are CPU seconds, medians over the rounds, and
ratios are to the first setting in the same round."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import agentlightning as agl
from agentlightning.algorithm.rl.policies import optimiser_steps
from agentlightning.data.sequences import TrainingSequence, build_sequences, weighed
from agentlightning.learner.policy import Policy
from agentlightning.learner.policy_config import AdamW
from agentlightning.learner.torch import TorchLearner

ROOT: Final = Path(__file__).parents[1]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "examples" / "gallery")]
RESULTS: Final = ROOT / "benchmarks" / "results" / "corrections.json"

VOCABULARY: Final = 2000
SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "none": {},
    "`old: proximal`, `truncate`": {"old": "proximal"},
    "`bound`": {"correction": {"name": "bound", "statistic": "k3", "over": "max", "high": 10.0}},
    "a function that reads `present`": {
        "correction": str(ROOT / "examples/gallery/corrections.py:double_sided")
    },
    "`token_weights`: `echo`": {},
}


def batch(*, observing: bool) -> list[TrainingSequence]:
    import _training_step
    import weights

    _training_step.HISTORY = 1536  # grows from 1,024 tokens
    prompt = np.random.default_rng(0).integers(10, VOCABULARY, 1024).astype(np.int32)
    rollouts = [_training_step.rollout(number, prompt, 40) for number in range(2)]
    if observing:
        rollouts = [weighed(calls, weights.echo) for calls in rollouts]
    return [sequence for calls in rollouts for sequence in build_sequences(calls, "trajectory")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = {
        "hidden_size": 192,
        "num_hidden_layers": 3,
        "vocab_size": VOCABULARY,
        "intermediate_size": 1024,
    }
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64}
    model = Qwen3ForCausalLM(Qwen3Config(**shape, **heads, tie_word_embeddings=True))
    learner = TorchLearner(Policy(model, None), AdamW(learning_rate=1e-12))  # type: ignore[arg-type]
    plain, observing = batch(observing=False), batch(observing=True)
    near = [
        replace(one, logprobs=logprobs.numpy())
        for one, logprobs in zip(plain, learner.logprobs(plain), strict=True)
    ]
    seen = [replace(one, logprobs=of.logprobs) for one, of in zip(observing, near, strict=True)]
    seconds: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for number in range(rounds + 1):  # the first warms up
        for name, settings in SETTINGS.items():
            algorithm = agl.GRPO(minibatches=2, epochs=2, **settings)
            given = seen if "token_weights" in name else near
            started = time.process_time()
            list(optimiser_steps(learner, given, algorithm, seed=0, step=1, version=0))
            if number:
                seconds[name].append(time.process_time() - started)
    sampled = sum(len(one.positions) for one in near)
    observed = sum(len(one.observed.positions) for one in seen if one.observed)
    print(f"{sum(map(len, near)):,} tokens, {sampled:,} sampled, {observed:,} observed\n")
    print("| correction | CPU s | ratio |\n|---|---|---|")
    rows: list[dict[str, Any]] = []
    for name, own in seconds.items():
        ratio = statistics.median(
            one / first for one, first in zip(own, seconds["none"], strict=True)
        )
        rows.append(
            {
                "setting": name,
                "cpu_seconds": round(statistics.median(own), 2),
                "ratio": round(ratio, 2),
            }
        )
        print(f"| {name} | {rows[-1]['cpu_seconds']} | {rows[-1]['ratio']} |")
    RESULTS.write_text(json.dumps({"rounds": rounds, "settings": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
