"""How the travel desk is trained: every number in one place."""

from __future__ import annotations

from agentlightning.algorithm import GRPO
from agentlightning.learner.base import AdamW
from agentlightning.learner.warm_start import WarmStart

DEMONSTRATIONS = 2000
VOCABULARY_SIZE = 1024
WARM_START = WarmStart()
TRAIN_TASKS = 3000
HELDOUT_TASKS = 180
CONCURRENCY = 128
MAX_SEQUENCE_LENGTH = 512


def algorithm(steps: int | None = None) -> GRPO:
    return GRPO(
        steps=steps or 40,
        tasks_per_step=18,
        group_size=8,
        minibatches=2,
        clip_high=0.28,
        max_tokens=40,
        target_reward=0.97,
        evaluate_every=0,
    )


def optimizer() -> AdamW:
    return AdamW(learning_rate=1.5e-4, micro_batch_tokens=4096)
