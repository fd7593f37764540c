"""What a learner is: it takes a batch of training sequences and a loss, and makes one optimiser step.

A learner knows weights, optimiser and loss. It does not know groups, rewards, rollouts or which algorithm asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from agentlightning.data.sequences import Aggregation, TrainingSequence
from agentlightning.errors import ConfigError

KLEstimator: TypeAlias = Literal["k1", "k2", "k3"]


@dataclass(frozen=True)
class Loss:
    """The loss of one batch: PPO's clipped surrogate per token, aggregated, plus KL to a reference and entropy.

    `temperature` is that of the sampling: the learner's log-probabilities are of the same distribution.
    `dual_clip` bounds the loss of tokens with negative advantage (arXiv:1912.09729), None switches it off.
    `kl_coefficient` needs a learner that keeps a reference policy; 0 switches the term off."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    aggregation: Aggregation = "token-mean"
    constant_length: int | None = None
    kl_coefficient: float = 0.0
    kl_estimator: KLEstimator = "k3"
    entropy_coefficient: float = 0.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.clip_low < 1 or not self.clip_high > 0:
            raise ConfigError(f"clip range ({self.clip_low}, {self.clip_high}): low must lie in (0, 1), high above 0")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ConfigError(f"dual_clip is {self.dual_clip}; it must be above 1, or None")
        if not self.temperature > 0:
            raise ConfigError(f"temperature is {self.temperature}; training needs sampling at a positive temperature")
        if self.kl_coefficient < 0:
            raise ConfigError(f"kl_coefficient is {self.kl_coefficient}; it must be 0 or positive")


@dataclass(frozen=True)
class AdamW:
    """The optimiser. `micro_batch_tokens` bounds the padded tokens computed at once, and with them the memory; a
    learner takes fewer where the vocabulary is so large that their logits would fill the memory."""

    learning_rate: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    warmup_steps: int = 0
    micro_batch_tokens: int = 8192

    def __post_init__(self) -> None:
        if not self.learning_rate > 0:
            raise ConfigError(f"learning_rate is {self.learning_rate}; it must be positive")
        if self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps is {self.warmup_steps}; it must be 0 or positive")
        if self.micro_batch_tokens < 1:
            raise ConfigError(f"micro_batch_tokens is {self.micro_batch_tokens}; it must be at least 1")


class Learner(Protocol):
    """Makes gradient steps on the policy's weights.

    `mismatch_tolerance` bounds |exp(learner − engine logprob) − 1| of a token where both hold the same weights: above
    it, what is trained is no longer what was sampled."""

    @property
    def mismatch_tolerance(self) -> float: ...

    def step(self, batch: Sequence[TrainingSequence], loss: Loss) -> dict[str, float]:
        """One optimiser step; blocks. Returns metrics: loss, grad_norm, ratio and KL statistics, entropy, tokens.

        Raises TrainingError, with the weights unchanged, if the loss or the gradient is not finite."""
        ...

    def save(self, directory: Path) -> None:
        """Write weights (`transformers` layout, with the tokenizer) and the optimiser's state into `directory`."""
        ...

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote; ConfigError if it does not fit this policy."""
        ...
