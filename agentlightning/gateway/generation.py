"""Tokens in, tokens out: what is asked of whatever samples tokens, and what it answers, one token at a time; and seeds,
pure functions of names, so that sampling noise never depends on timing.

Knows token ids; no text, no chats, no tensors and no servers.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

GrammarsAs: TypeAlias = Literal["masks", "structural_tag"] | None


class Masks(Protocol):
    """Which tokens may come next under a grammar: those whose bits in `allowed` are set, from the lowest on."""

    allowed: bytes

    def advance(self, token_id: int) -> None:
        """This one came. BackendError where the grammar becomes too large to follow."""
        ...


@dataclass(frozen=True)
class GenerationRequest:
    """One completion to sample. `max_tokens=None` means as many as fit; `temperature=0` is greedy, with logprobs of
    temperature 1; `top_p=1` and `top_k=0` mean no truncation. `seed` fixes the random numbers of the request whatever
    else is in the batch. `stop_token_ids` end the generation like the model's own end-of-sequence ids do.
    `top_logprobs` asks for that many of the likeliest tokens beside each sampled one. `model` is what the call asked
    for, for a server that has several. `masks` or `structural_tag` say what an answer must be, to a generator whose
    `grammars` they are; logprobs are then those of the tokens that may come."""

    prompt_token_ids: tuple[int, ...] | list[int]
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    top_logprobs: int = 0
    model: str | None = None
    masks: Masks | None = None
    structural_tag: dict[str, Any] | None = None


class Ending(NamedTuple):
    """What is known of a request at its end, as in `gateway.backend.Finished`: why its tokens must not be trained, the
    version in force, the versions of all its tokens by their number."""

    untrainable: str | None = None
    version: int | None = None
    versions: Sequence[list[int]] = ()


class SampledToken(NamedTuple):
    """One token as it was sampled: its id, its logprob under the distribution it was sampled from (after temperature,
    top_k and top_p), and the version of the weights. `finish_reason` is set on the last token of a request; that one
    is the end-of-sequence token itself where the reason is "stop". `top_logprobs` are (id, logprob) of the likeliest
    tokens, if they were asked for. `ending` is that of the last token."""

    token_id: int
    logprob: float
    version: int
    finish_reason: Literal["stop", "length"] | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    ending: Ending = Ending()


class TokenGenerator(Protocol):
    """Samples tokens: the embedded engine, or a server that takes and gives token ids. `grammars` is how it is told
    what an answer must be, if it can be."""

    grammars: GrammarsAs

    def generate(self, request: GenerationRequest) -> AsyncGenerator[SampledToken, None]:
        """Yield the tokens of a request as they are sampled. Closing the iterator cancels the generation.

        Raises BackendError(status=400), before the first token, for a request that cannot be served."""
        ...

    async def complete(self, request: GenerationRequest) -> list[SampledToken]:
        """All tokens of a request at once: like `generate`, but cheaper where nobody sees them one by one."""
        ...


def call_seed(run_seed: int, sample: str, call_index: int) -> int:
    """The seed of call `call_index` of the rollout known as `sample` in its run, a 63-bit integer."""
    return _hashed("call", run_seed, sample, call_index)


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of a call's `n` choices; the first samples with the call's own seed."""
    return seed if choice == 0 else _hashed("choice", seed, choice)


def _hashed(*parts: str | int) -> int:
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
