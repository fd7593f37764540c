"""Serves a policy with the embedded engine."""

from __future__ import annotations

import asyncio
import copy
import logging
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from agentlightning.data.sequences import TrainingSequence
from agentlightning.engine.engine import Engine
from agentlightning.engine.forward import cache_bytes
from agentlightning.engine.service import EngineService
from agentlightning.errors import ConfigError
from agentlightning.gateway.backend import Sampling
from agentlightning.gateway.chat.template import ChatTemplate
from agentlightning.gateway.chat.token_backend import TokenBackend
from agentlightning.learner.base import Weights, WeightsForm
from agentlightning.learner.policy import Policy, saved_weights
from agentlightning.learner.remote import short_answer

CACHE_LIMIT_BYTES = 8 * 1024**3
SMALL_MODEL = 10_000_000  # parameters; below, one torch thread is faster than several

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EmbeddedSampler:
    """A running engine over the policy's `model`: the policy's own, read in place, a copy, or the
    model with the adapter merged in. If it `takes` whole models, a learner elsewhere writes them.
    Its creator calls `service.close()`. A `Sampler`."""

    service: EngineService
    backend: TokenBackend
    model: PreTrainedModel
    takes: WeightsForm = "live"

    @property
    def generated_tokens(self) -> int:
        return self.service.generated_tokens

    @property
    def idle_seconds(self) -> float:
        return self.service.idle_seconds

    async def check(self, train: Sampling) -> None:
        """Its answers always have exact ids and the logprobs of their distribution."""

    def exclusive(self) -> AbstractAsyncContextManager[Any]:
        return self.service.exclusive()

    async def publish(self, weights: Weights) -> None:
        def load(place: Path) -> None:
            # tied weights are saved once
            self.model.load_state_dict(saved_weights(place), strict=False)

        await self.service.update_weights(
            weights.version, weights.place and partial(load, weights.place)
        )

    async def watch(self, calls_held: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        await asyncio.Event().wait()

    async def sample(self) -> list[TrainingSequence]:
        return [] if self.takes == "live" else [await short_answer(self.backend)]


def serve_policy(
    policy: Policy,
    *,
    concurrency: int = 64,
    max_sequence_length: int | None = None,
    threads: int | None = None,
    seed: int = 0,
    own_weights: bool = False,
    deterministic: bool = False,
) -> EmbeddedSampler:
    """Start an engine for about `concurrency` simultaneous calls. With `own_weights` it samples
    from a copy, so the policy can be trained meanwhile. `deterministic` is the engine's.

    It has fewer slots if the key-value cache would exceed 8 GiB; further calls wait.
    `max_sequence_length` defaults to the model's, at most 4096 tokens."""
    if policy.adapter is not None:
        model = policy.adapter.publish()
    else:
        model = copy.deepcopy(policy.model) if own_weights else policy.model
    model.eval()  # no dropout when sampling
    slots, length = engine_size(model, concurrency, max_sequence_length)
    choose_threads(model, threads)
    # The engine's thread and the event loop share the interpreter; its default switch interval, 5
    # ms, is too long.
    sys.setswitchinterval(0.0005)
    if slots < concurrency:
        logger.warning(
            "the key-value cache has room for %d calls at once, not %d", slots, concurrency
        )
    engine = Engine(
        model,
        eos_token_ids=_end_ids(policy),
        max_sequence_length=length,
        slots=slots,
        deterministic=deterministic,
        seed=seed,
    )
    service = EngineService(engine, partial(_bring_up_to_date, model, policy))
    service.start()
    chat = ChatTemplate.from_pretrained(policy.tokenizer)
    return EmbeddedSampler(
        service, TokenBackend(chat, service, name="embedded", max_sequence_length=length), model
    )


def _bring_up_to_date(model: PreTrainedModel, policy: Policy) -> None:
    if policy.adapter is not None:
        policy.adapter.publish()
    elif model is not policy.model:
        with torch.no_grad():
            for own, trained in zip(model.parameters(), policy.model.parameters(), strict=True):
                own.copy_(trained)


def engine_size(
    model: PreTrainedModel, concurrency: int, max_sequence_length: int | None
) -> tuple[int, int]:
    """Slots and sequence length of the engine of `serve_policy`; ConfigError if longer than the
    model allows."""
    own = int(getattr(model.config.get_text_config(), "max_position_embeddings", 4096))
    length = max_sequence_length or min(own, 4096)
    if length > own:
        raise ConfigError(
            f"max_sequence_length is {length}, but the model was made for at most {own} tokens"
        )
    return max(1, min(concurrency, CACHE_LIMIT_BYTES // cache_bytes(model, 1, length))), length


def choose_threads(model: PreTrainedModel, threads: int | None) -> None:
    """Set the torch threads for serving and training `model`: the given number, or 1 if more would
    slow it down."""
    if threads is not None or model.num_parameters() < SMALL_MODEL:
        torch.set_num_threads(threads or 1)


def _end_ids(policy: Policy) -> list[int]:
    """Ids that end an answer: those of the generation config (chat models may have several) and of
    the tokenizer."""
    configured: Any = getattr(policy.model.generation_config, "eos_token_id", None)
    ids: list[Any] = [
        *(configured if isinstance(configured, list) else [configured]),
        policy.tokenizer.eos_token_id,
    ]
    found = {int(token_id) for token_id in ids if token_id is not None}
    if not found:
        raise ConfigError(
            "neither the model nor its tokenizer names an end-of-sequence token; set "
            "tokenizer.eos_token"
        )
    return sorted(found)
