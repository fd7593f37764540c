"""Part `step`: what a training step on multi-turn rollouts costs at each level: transition,
trajectory, tree.

One group of rollouts shares a prompt of 1,024 tokens; each has six calls, whose history grows to
4,096 tokens. The policy is a Qwen3 model of 10M random parameters, in float32, on one core. Each
level runs in a process of its own, after a small step that warms it up; seconds are CPU seconds of
the fastest of the rounds (other work on the machine slows a step), memory is the peak above what
there was before. *Predicted* is the arithmetic of the step: a matrix product per token, and one per
pair of tokens of which one attends to the other, forward and backward, padding included. All levels
give the same gradient."""

from __future__ import annotations

import resource
import time
from typing import Any

import numpy as np

PROMPT, TURNS, HISTORY, ANSWER = 1024, 6, 4096, 192
VOCABULARY, WIDTH, LAYERS = 2000, 384, 6
LEVELS = "transition,trajectory,tree"


def rollout(number: int, prompt: np.ndarray, answer: int) -> list[Any]:
    """Six calls, each prompt the whole history: answer after answer, with what the tools said
    between them."""
    from agentlightning.data.sequences import CreditedTransition
    from agentlightning.data.transitions import Transition

    random = np.random.default_rng(number)
    grown = (HISTORY - PROMPT) // TURNS
    calls: list[CreditedTransition] = []
    history = prompt
    for turn in range(TURNS):
        new = random.integers(10, VOCABULARY, grown).astype(np.int32)
        transition = Transition(
            rollout_id=str(number),
            attempt_id="a",
            span_id=str(turn),
            continues=str(turn - 1),
            call_index=turn,
            choice=0,
            model="policy",
            prompt_ids=history,
            response_ids=new[:answer],
            logprobs=np.full(answer, -7.6, np.float32),
            versions=np.zeros(answer, np.int32),
            finish_reason="stop",
        )
        calls.append(CreditedTransition(transition, np.full(answer, random.normal(), np.float32)))
        history = np.concatenate([history, new])
    return calls


def measure(level: Any, rollouts: int, micro_batch_tokens: int, rounds: int) -> dict[str, Any]:
    """One level, in this process."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from agentlightning.data.aggregation import aggregation_weights
    from agentlightning.data.sequences import build_sequences, micro_batches
    from agentlightning.learner.losses import Loss
    from agentlightning.learner.policy import Policy
    from agentlightning.learner.policy_config import AdamW
    from agentlightning.learner.torch import TorchLearner

    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCABULARY,
        "intermediate_size": 1024,
    }
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": WIDTH // 6}
    model = Qwen3ForCausalLM(
        Qwen3Config(
            **shape,
            **heads,
            max_position_embeddings=HISTORY,
            tie_word_embeddings=True,
            initializer_range=0.05,
        )
    )
    learner = TorchLearner(
        Policy(model, None),  # type: ignore[arg-type]
        AdamW(learning_rate=1e-12, max_grad_norm=1e9, micro_batch_tokens=micro_batch_tokens),
    )
    prompt = np.random.default_rng(0).integers(10, VOCABULARY, PROMPT).astype(np.int32)
    small = [rollout(number, prompt[:64], 4)[:1] for number in range(2)]
    learner.step(
        [sequence for calls in small for sequence in build_sequences(calls, level)], Loss()
    )
    batch = [
        s
        for number in range(rollouts)
        for s in build_sequences(rollout(number, prompt, ANSWER), level)
    ]
    micro = list(micro_batches(batch, aggregation_weights(batch, "token-mean"), micro_batch_tokens))
    tokens = sum(one.token_ids.size for one in micro)
    rows = sum(
        len(one.token_ids) * one.token_ids.shape[1] * (one.token_ids.shape[1] + 1) // 2
        for one in micro
    )
    pairs = sum(one.forest.pairs for one in micro if one.forest) or rows
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds: list[float] = []
    metrics: dict[str, float] = {}
    for _ in range(rounds):
        started = time.process_time()
        metrics = learner.step(batch, Loss())
        seconds.append(time.process_time() - started)
    sampled = int(metrics["tokens"])
    weights = model.num_parameters() - VOCABULARY * WIDTH
    return {
        "level": level,
        "parameters": model.num_parameters(),
        "rollouts": rollouts,
        "micro_batches": len(micro),
        "tokens": tokens,
        "pairs": pairs,
        "teraflop": (
            6 * (weights * tokens + VOCABULARY * WIDTH * sampled) + 12 * LAYERS * WIDTH * pairs
        )
        / 1e12,
        "cpu_seconds": min(seconds),
        "peak_mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
        "grad_norm": metrics["grad_norm"],
        "tokens_saved": metrics["tokens_saved"],
    }


def run(levels: str, alone: Any) -> list[dict[str, Any]]:
    """Measure, print and return the part. `alone` measures a level in a process of its own."""
    rows: list[dict[str, Any]] = []
    names = (
        "level",
        "tokens",
        "pairs",
        "forwards",
        "CPU s",
        "speed",
        "predicted",
        "peak MiB",
        "gradient",
    )
    print("{:>11} {:>9} {:>13} {:>8} {:>8} {:>7} {:>9} {:>9} {:>9}".format(*names))
    for level in levels.split(","):
        rows.append(row := alone(level))
        speed, predicted = (rows[0][key] / row[key] for key in ("cpu_seconds", "teraflop"))
        print(
            f"{level:>11} {row['tokens']:>9,} {row['pairs']:>13,} {row['micro_batches']:>8} "
            f"{row['cpu_seconds']:>8.1f} {speed:>6.2f}x {predicted:>8.2f}x "
            f"{row['peak_mib']:>9,.0f} {row['grad_norm']:>9.6f}",
            flush=True,
        )
    return rows
