"""The interface of learners and samplers: a learner makes one optimiser step from a batch of
sequences and a loss.

A learner knows weights, optimiser and loss. It does not know groups, rewards, rollouts or
algorithms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias, get_args

from agentlightning.data.sequences import TrainingSequence
from agentlightning.data.transitions import FloatArray
from agentlightning.errors import check_settings
from agentlightning.learner.losses import Loss

if TYPE_CHECKING:
    from torch import Tensor

    from agentlightning.data.token_bytes import TokenBytes
    from agentlightning.gateway.backend import Backend, Sampling

CriticTrunk: TypeAlias = Literal["shared", "separate"]
WeightsForm: TypeAlias = Literal["live", "whole", "adapter", "handle"]

# a critic starts untrained, a policy does not; verl's defaults have a similar ratio
CRITIC_RATE: Final = 10.0


@dataclass(frozen=True)
class Critic:
    """Estimates the value of a sampled token: a linear layer, 0 at first, on the last hidden state
    before it. The `trunk` gives that state: the policy (`shared`: the critic's gradient also
    changes the policy), or a `separate` model that starts as a copy of the policy and shares its
    frozen weights.

    `learning_rate` is for the weights that only the critic has, before the optimiser's schedule;
    default: `CRITIC_RATE` times the policy's."""

    trunk: CriticTrunk = "shared"
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        check_settings(self, above={"learning_rate": 0}, choices={"trunk": get_args(CriticTrunk)})


@dataclass(frozen=True)
class Weights:
    """A publication: the weights of policy `version`, in the directory `place` written by
    `Learner.export`, or, if None, in the learner's live model."""

    version: int
    place: Path | None = None


class Sampler(Protocol):
    """Samples from a policy. `takes` is the form in which it receives weights: it reads the
    learner's `live` model, or loads a directory with the `whole` model, with an `adapter` in
    `peft`'s format, or with a `handle` of weights stored elsewhere. The gateway routes calls to
    `backend`. `generated_tokens` counts sampled tokens since the start, and `idle_seconds` the time
    without work or without permission to work."""

    @property
    def takes(self) -> WeightsForm: ...

    @property
    def backend(self) -> Backend: ...

    @property
    def generated_tokens(self) -> int: ...

    @property
    def idle_seconds(self) -> float: ...

    async def check(self, train: Sampling) -> None:
        """ConfigError if answers sampled with these parameters cannot be trained."""
        ...

    def exclusive(self) -> AbstractAsyncContextManager[Any]:
        """In the block, it reads no learner weights and uses no learner cores; calls wait."""
        ...

    async def publish(self, weights: Weights) -> None:
        """Sample with these weights from now on, under their version. BackendError if they cannot
        be loaded."""
        ...

    async def watch(self, calls_held: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        """Runs beside the job and monitors its servers; never returns. Calls are held while no
        server can sample. BackendError if none will recover."""
        ...

    async def sample(self) -> list[TrainingSequence]:
        """A short answer from each server with the current weights, to compare with the learner;
        empty if it reads the learner's own weights."""
        ...


class Learner(Protocol):
    """Makes gradient steps on the policy's weights; every method blocks.

    `mismatch_tolerance` is the highest |exp(learner − engine logprob) − 1| of a token that rounding
    explains when both have the same weights. `token_bytes` are the texts of the policy's tokens;
    None if its tokenizer does not provide them."""

    @property
    def mismatch_tolerance(self) -> float: ...

    @property
    def token_bytes(self) -> TokenBytes | None: ...

    def values(self, batch: Sequence[TrainingSequence]) -> list[FloatArray]:
        """The critic's value of each sampled token, float32[N] per sequence. ConfigError without a
        critic."""
        ...

    def step(
        self, batch: Sequence[TrainingSequence], loss: Loss, version: int | None = None
    ) -> dict[str, float]:
        """One optimiser step. Returns metrics: loss, grad_norm, learning_rate, ratio and KL
        statistics, entropy, tokens (sampled), tokens_computed, and tokens_saved (compared with
        training each transition separately, without padding); with a critic also value_loss,
        value_clip_fraction and critic_grad_norm.

        `version` is the engine's name for the weights before the step; None if they have none. On
        tokens that this version sampled, engine and learner are compared: inference_kl (k3 of
        KL(engine ‖ learner)) and inference_mismatch (the highest; see `mismatch_tolerance`).

        TrainingError, with the weights unchanged, if the loss or the gradient is not finite."""
        ...

    def logprobs(
        self, batch: Sequence[TrainingSequence], temperature: float = 1.0
    ) -> Sequence[Tensor]:
        """The current log-probability of every sampled token, float32[N] per sequence, on the
        CPU."""
        ...

    def export(self, directory: Path, form: WeightsForm) -> None:
        """Write what a sampler loads into the new `directory`: the `whole` model (with an adapter
        merged), the `adapter` only, or a `handle`. ConfigError for a form that this learner does
        not have."""
        ...

    def save(self, directory: Path, resumable: bool = True) -> None:
        """Write the weights (`transformers` layout, with the tokenizer) into `directory` and, if
        `resumable`, the optimiser's state."""
        ...

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote; ConfigError if it does not fit this policy."""
        ...
