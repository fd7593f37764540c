"""Continuous batching: which sequences run, in which slot, and what each step computes.

Synchronous and single-threaded: `step()` admits waiting requests, computes their prompts up to a
budget, and samples one token for every running sequence. The model's weights are read in place:
change them between steps, then call `update_weights`."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentlightning.engine.forward import (
    DecoderForward,
    ModelForward,
    Piece,
    shape_of,
    why_unsupported,
)
from agentlightning.engine.sampler import Sampler
from agentlightning.engine.slots import SlotTable, TokenArray
from agentlightning.errors import BackendError, ConfigError
from agentlightning.gateway.backend import unsupported
from agentlightning.gateway.generation import GenerationRequest, SampledToken

logger = logging.getLogger(__name__)

# of prompts in one step at most: bounds how long running sequences wait for a newcomer's
PREFILL_TOKENS = 2048
EXCHANGE_ROWS = 4  # exchanging two slots costs about as much as computing this many idle rows

OnToken = Callable[[SampledToken], None]
OnError = Callable[[BackendError], None]


@dataclass
class Statistics:
    """Counts since the engine was created. `prompt_tokens` were computed, `reused_tokens` found in
    the cache."""

    steps: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0


@dataclass(eq=False)
class Generation:
    """A running request. `tokens[:length]` are the prompt and the sampled tokens; `slot` has the
    keys and values of `tokens[:cached]`."""

    request: GenerationRequest
    on_token: OnToken
    on_error: OnError
    tokens: TokenArray = field(repr=False)
    length: int
    limit: int
    stop_ids: frozenset[int]
    slot: int = -1
    cached: int = 0
    sampled: int = 0
    placed: bool = False


class Engine:
    """Samples from `model`, up to `slots` sequences at once, each of at most `max_sequence_length`
    tokens.

    With `deterministic`, a request's samples depend only on itself, its seed and the weights, to
    the last bit: sequences are computed one by one from their first token, because floating-point
    sums differ with the shape of a batch. ConfigError if the lengths do not suit the model."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_token_ids: Iterable[int],
        max_sequence_length: int,
        slots: int = 128,
        deterministic: bool = False,
        seed: int = 0,
    ) -> None:
        self._model = model
        self._deterministic = deterministic
        self._eos_token_ids = frozenset(eos_token_ids)
        self.max_sequence_length = max_sequence_length
        self.version = 0
        self.statistics = Statistics()
        self._vocabulary_size: int = model.get_output_embeddings().weight.shape[0]  # type: ignore[union-attr]
        self._check_sizes(slots)
        reason = why_unsupported(model)
        if reason is None:
            self._forward: DecoderForward | ModelForward = DecoderForward(
                model, slots, max_sequence_length
            )
        else:
            logger.warning(
                "The engine runs this model through its own forward, sequence by sequence: %s.",
                reason,
            )
            self._forward = ModelForward(model, slots)
        reuse = not deterministic
        self._slots = SlotTable(
            slots, max_sequence_length, reuse=reuse, share=reuse and self._forward.shares_prefixes
        )
        self._sampler = Sampler(slots, seed)
        self._waiting: deque[Generation] = deque()
        self._running: dict[int, Generation] = {}
        self._idle_rows = 0

    # --- the outside ---

    def check(self, request: GenerationRequest) -> TokenArray:
        """The prompt `[n]` of a request that can be served; otherwise BackendError(status=400).
        Changes nothing."""
        for name, ids in (
            ("prompt_token_ids", request.prompt_token_ids),
            ("stop_token_ids", request.stop_token_ids),
        ):
            if ids and not 0 <= min(ids) <= max(ids) < self._vocabulary_size:
                raise _invalid(
                    f"{name}: the model knows the token ids 0 to {self._vocabulary_size - 1}"
                )
        length = len(request.prompt_token_ids)
        if not length:
            raise _invalid("prompt_token_ids is empty; give at least one token id")
        if not (
            0 <= request.temperature < math.inf and 0 < request.top_p <= 1 and request.top_k >= 0
        ):
            raise _invalid(
                "temperature must be finite and at least 0, top_p above 0 and at most 1, top_k at "
                "least 0"
            )
        if request.max_tokens is not None and request.max_tokens < 1:
            raise _invalid(
                f"max_tokens is {request.max_tokens}; it must be at least 1, or None for as many "
                "as fit"
            )
        if request.top_logprobs:
            raise unsupported(
                "top_logprobs",
                "only the sampled token's logprob is known; leave it out or set it to 0",
            )
        if length >= self.max_sequence_length:
            raise BackendError(
                f"the prompt has {length} tokens, and the engine holds sequences of "
                f"{self.max_sequence_length} tokens: shorten the prompt, or start the engine with "
                "a larger max_sequence_length",
                status=400,
                code="context_length_exceeded",
            )
        return np.array(request.prompt_token_ids, dtype=np.int64)

    def submit(
        self, request: GenerationRequest, on_token: OnToken, on_error: OnError
    ) -> Generation:
        """Queue a request. `step` calls `on_token` with each token, and `on_error` for each request
        in a step that fails. BackendError(status=400) for a request that cannot be served."""
        prompt = self.check(request)
        room = self.max_sequence_length - prompt.size
        limit = prompt.size + min(room, request.max_tokens or room)
        tokens = np.zeros(limit, dtype=np.int64)
        tokens[: prompt.size] = prompt
        stop_ids = self._eos_token_ids | request.stop_token_ids
        generation = Generation(request, on_token, on_error, tokens, prompt.size, limit, stop_ids)
        self._waiting.append(generation)
        return generation

    def cancel(self, generation: Generation) -> None:
        """Stop a request; no more tokens are delivered. Does nothing if it has ended."""
        if generation in self._waiting:
            self._waiting.remove(generation)
        elif self._running.get(generation.slot) is generation:
            self._end(generation)

    @property
    def waiting(self) -> int:
        """Requests that have not started."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests in a slot."""
        return len(self._running)

    @torch.inference_mode()
    def update_weights(self, version: int) -> None:
        """Sample with the model's current weights from now on, as `version`. Cached prefixes are
        dropped; running sequences are recomputed and continue."""
        self._forward.reload()
        self._slots.flush()
        for generation in self._running.values():
            generation.cached = 0
            generation.placed = False
        self.version = version

    @torch.inference_mode()
    def step(self) -> bool:
        """Advance every running sequence by one token, new ones by up to two. True while there is
        work left."""
        try:
            pieces = self._plan()
            if pieces:
                self._prefill(pieces)
            self._decode()
        except Exception as error:
            logger.exception("An engine step failed; %d requests are given up.", len(self._running))
            self._fail(error)
        self.statistics.steps += 1
        return bool(self._waiting or self._running)

    # --- one step ---

    def _plan(self) -> list[tuple[Generation, Piece]]:
        """The pieces of prompts to compute now: unfinished sequences first, then new ones in
        order."""
        pieces: list[tuple[Generation, Piece]] = []
        if self._deterministic:  # one at a time
            unfinished = next(
                (
                    generation
                    for generation in self._running.values()
                    if not self._decodable(generation)
                ),
                None,
            )
            if unfinished is None and self._waiting and self._slots.free:
                unfinished = self._waiting.popleft()
            if unfinished is not None:
                self._plan_piece(unfinished, PREFILL_TOKENS, pieces)
            return pieces
        budget = PREFILL_TOKENS
        for generation in self._running.values():
            if budget > 0 and not self._decodable(generation):
                budget -= self._plan_piece(generation, budget, pieces)
        newcomers: list[Generation] = []
        while (
            self._waiting
            and len(newcomers) < self._slots.free
            and budget > sum(g.length for g in newcomers)
        ):
            newcomers.append(self._waiting.popleft())
        # Neighbours of similar length are cheaper to compute together. All but the longest fit into
        # the budget.
        for generation in sorted(newcomers, key=lambda newcomer: newcomer.length):
            budget -= self._plan_piece(generation, budget, pieces)
        return pieces

    def _plan_piece(
        self, generation: Generation, budget: int, pieces: list[tuple[Generation, Piece]]
    ) -> int:
        """Plan as much of a sequence as the budget allows; returns the number of tokens."""
        tokens = generation.tokens[: generation.length]
        placement = None
        if not generation.placed:
            if generation.slot < 0:
                placement = self._slots.acquire(tokens)
                generation.slot = placement.slot
                self._running[placement.slot] = generation
                self._sampler.assign(placement.slot, generation.request)
            else:
                placement = self._slots.reassign(generation.slot, tokens)
            generation.placed = True
            generation.cached = placement.reused
            self.statistics.reused_tokens += placement.reused
        start = generation.cached
        piece = Piece(generation.slot, start, tokens[start : start + budget], placement)
        self._slots.extend(piece.slot, piece.token_ids, start)
        generation.cached = piece.stop
        pieces.append((generation, piece))
        return len(piece.token_ids)

    def _prefill(self, planned: list[tuple[Generation, Piece]]) -> None:
        logits = self._forward.prefill([piece for _, piece in planned])
        self.statistics.prompt_tokens += sum(len(piece.token_ids) for _, piece in planned)
        finished = [
            row
            for row, (generation, _) in enumerate(planned)
            if generation.cached == generation.length
        ]
        if finished:
            rows = (
                logits
                if len(finished) == len(planned)
                else logits[torch.tensor(finished, device=logits.device)]
            )
            self._sample(rows, [planned[row][0] for row in finished])

    def _decode(self) -> None:
        ready = sorted(
            slot for slot, generation in self._running.items() if self._decodable(generation)
        )
        if self._deterministic:
            for slot in ready:
                self._decode_slots([slot])
        elif ready:
            self._decode_slots(self._compact(ready))

    def _decode_slots(self, ready: list[int]) -> None:
        generations = [self._running[slot] for slot in ready]
        positions = np.array([generation.cached for generation in generations], dtype=np.int64)
        slots = np.array(ready, dtype=np.int64)
        token_ids = np.array(
            [generation.tokens[generation.cached] for generation in generations], dtype=np.int64
        )
        self._slots.token_ids[slots, positions] = token_ids
        self._slots.length[slots] = positions + 1
        for generation in generations:
            generation.cached += 1
        self._sample(self._forward.decode(slots, token_ids, positions), generations)

    def _compact(self, ready: list[int]) -> list[int]:
        """Move the sequences to the lowest slots once computing the idle rows between them has cost
        as much; returns their slots."""
        count = len(ready)
        self._idle_rows += ready[-1] + 1 - count
        beyond = [slot for slot in ready if slot >= count]
        if self._idle_rows < EXCHANGE_ROWS * max(len(beyond), 1):
            return ready
        self._idle_rows = 0
        below = set(ready)
        for slot, hole in zip(
            beyond, (slot for slot in range(count) if slot not in below), strict=True
        ):
            self._exchange(hole, slot)
        return list(range(count))

    def _exchange(self, first: int, second: int) -> None:
        lengths = self._slots.length
        self._forward.exchange(first, second, int(lengths[first]), int(lengths[second]))
        self._slots.exchange(first, second)
        self._sampler.exchange(first, second)
        moved = [(slot, self._running.pop(slot, None)) for slot in (first, second)]
        for (_, generation), slot in zip(moved, (second, first), strict=True):
            if generation is not None:
                generation.slot = slot
                self._running[slot] = generation

    def _sample(self, logits: Tensor, generations: list[Generation]) -> None:
        """Draw and deliver the next token of each sequence from logits `[n, vocabulary]`."""
        slots = np.array([generation.slot for generation in generations], dtype=np.int64)
        indices = np.array([generation.sampled for generation in generations], dtype=np.int64)
        token_ids, logprobs = self._sampler.sample(logits, slots, indices)
        version = self.version
        for generation, token_id, logprob in zip(generations, token_ids, logprobs, strict=True):
            generation.tokens[generation.length] = token_id
            generation.length += 1
            generation.sampled += 1
            if token_id in generation.stop_ids:
                reason = "stop"
            elif generation.length == generation.limit:
                reason = "length"
            else:
                generation.on_token(SampledToken(token_id, logprob, version))
                continue
            self._end(generation)
            generation.on_token(SampledToken(token_id, logprob, version, reason))
        self.statistics.generated_tokens += len(generations)

    def _end(self, generation: Generation) -> None:
        del self._running[generation.slot]
        self._slots.release(generation.slot)

    def _fail(self, error: Exception) -> None:
        """End all running requests, whose caches are undefined after a failed step, and be ready
        for new ones."""
        failed = list(self._running.values())
        for generation in failed:
            self._end(generation)
        self._slots.flush()
        self._forward.clear()
        if not isinstance(error, BackendError):
            why = (
                f"the engine failed while computing this request: {type(error).__name__}: "
                f"{error}; it may be repeated"
            )
            error = BackendError(why, status=500, code="engine_error")
        if not failed:
            raise error
        for generation in failed:
            generation.on_error(error)

    @staticmethod
    def _decodable(generation: Generation) -> bool:
        """Whether only the last sampled token remains to be computed."""
        return (
            generation.placed
            and generation.sampled > 0
            and generation.length - generation.cached == 1
        )

    def _check_sizes(self, slots: int) -> None:
        shape_of(self._model)  # refuses a model without attention
        if slots < 1 or self.max_sequence_length < 2:
            raise ConfigError(
                f"slots is {slots}, max_sequence_length {self.max_sequence_length}; at least 1 "
                "and 2"
            )
        known = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        if known is not None and self.max_sequence_length > known:
            raise ConfigError(
                f"max_sequence_length is {self.max_sequence_length}; the model was made for {known}"
            )


def _invalid(message: str) -> BackendError:
    return BackendError(message, status=400, code="invalid_request")
