"""Generation on token ids: requests, tokens one at a time, and seeds that depend on names alone, so
that sampling never depends on timing."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol


@dataclass(frozen=True)
class GenerationRequest:
    """One completion to sample. `max_tokens=None` means as many as fit; `temperature=0` is greedy,
    with logprobs of temperature 1; `top_p=1` and `top_k=0` do not truncate. `seed` fixes the
    request's random numbers, whatever else is in the batch. `stop_token_ids` end it like the
    model's end-of-sequence ids. `top_logprobs` asks for so many of the likeliest tokens beside each
    sampled one. `model` is the name in the call, for servers with several models. A
    `structural_tag` constrains the answer, for a generator that `enforces` forms; logprobs are then
    over the allowed tokens. A `whole` answer, which nobody sees before its end, comes at once."""

    prompt_token_ids: Sequence[int]
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    top_logprobs: int = 0
    model: str | None = None
    structural_tag: dict[str, Any] | None = None
    whole: bool = False


class Ending(NamedTuple):
    """The facts known at a request's end, as in `gateway.backend.Finished`: why its tokens must not
    be trained, the current version, and the version of each token."""

    untrainable: str | None = None
    version: int | None = None
    versions: Sequence[list[int]] = ()


class SampledToken(NamedTuple):
    """One sampled token: its id, its logprob under the distribution it was sampled from (after
    temperature, top_k and top_p), and the weights' version. The last token has a `finish_reason`
    and the `ending`; for "stop" it is the end-of-sequence token itself. `top_logprobs` are (id,
    logprob) of the likeliest tokens, if requested."""

    token_id: int
    logprob: float
    version: int
    finish_reason: Literal["stop", "length"] | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    ending: Ending = Ending()


class TokenGenerator(Protocol):
    """Samples tokens: the embedded engine, or a server that takes and returns token ids. `enforces`
    says whether it constrains answers to a form."""

    enforces: bool

    def generate(self, request: GenerationRequest) -> AsyncGenerator[list[SampledToken], None]:
        """Yield a request's tokens as they are sampled, or all at once. Closing the iterator
        cancels it.

        BackendError(status=400), before the first token, for a request that cannot be served."""
        ...


def call_seed(run_seed: int, sample: str, call_index: int) -> int:
    """The seed, a 63-bit integer, of call `call_index` of the rollout `sample` in its run."""
    return _hashed("call", run_seed, sample, call_index)


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of a call's `n` choices; the first has the call's own."""
    return seed if choice == 0 else _hashed("choice", seed, choice)


def _hashed(*parts: str | int) -> int:
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
