"""Whether the engine can serve a request: checked once, before it is queued.

This module knows no tensors and no model: it checks a request against the two numbers that bound every request, the
size of the vocabulary and the longest sequence that fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from agentlightning.errors import BackendError
from agentlightning.gateway.backend import unsupported
from agentlightning.gateway.generation import GenerationRequest

TokenArray = npt.NDArray[np.int64]


def check_request(request: GenerationRequest, *, vocabulary_size: int, max_sequence_length: int) -> TokenArray:
    """The prompt as an array `[n]`, once everything in the request is usable.

    Raises BackendError(status=400) that names the field; its code is `context_length_exceeded` where the prompt and one
    token do not fit into `max_sequence_length`. A larger `max_tokens` means as many as fit."""
    prompt = token_ids("prompt_token_ids", request.prompt_token_ids, vocabulary_size)
    if prompt.size == 0:
        raise _invalid("prompt_token_ids is empty; give at least one token id")
    token_ids("stop_token_ids", request.stop_token_ids, vocabulary_size)
    for name in ("max_tokens", "seed"):
        value = getattr(request, name)
        if value is not None and type(value) is not int:
            raise _invalid(f"{name} is {value!r}; it must be an integer or None")
    if not (_is_number(request.temperature) and 0 <= request.temperature < math.inf):
        raise _invalid(f"temperature is {request.temperature!r}; it must be a finite number of at least 0")
    if not (_is_number(request.top_p) and 0 < request.top_p <= 1):
        raise _invalid(f"top_p is {request.top_p!r}; it must be above 0 and at most 1 (1 means no truncation)")
    if type(request.top_k) is not int or request.top_k < 0:
        raise _invalid(f"top_k is {request.top_k!r}; it must be an integer of at least 0 (0 means no truncation)")
    if request.top_logprobs:
        raise unsupported("top_logprobs", "only the sampled token's logprob is known; leave it out or set it to 0")
    if request.max_tokens is not None and request.max_tokens < 1:
        raise _invalid(f"max_tokens is {request.max_tokens}; it must be at least 1, or None for as many as fit")
    if prompt.size >= max_sequence_length:
        raise BackendError(
            f"the prompt has {prompt.size} tokens, and the engine holds sequences of {max_sequence_length} tokens: "
            "shorten the prompt, or start the engine with a larger max_sequence_length",
            status=400,
            code="context_length_exceeded",
        )
    return prompt


def token_ids(name: str, ids: Iterable[int], vocabulary_size: int) -> TokenArray:
    """`ids` as an array `[n]`; BackendError(status=400) with their `name` where the model does not know one."""
    try:
        array = np.array(list(ids))
    except (TypeError, ValueError, OverflowError) as error:
        raise _invalid(f"{name} is not a sequence of token ids: {error}") from None
    if array.size == 0:
        return array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise _invalid(f"{name} must be a flat sequence of integers; it holds {array.dtype} of shape {array.shape}")
    if array.min() < 0 or array.max() >= vocabulary_size:
        wrong = int(array.min()) if array.min() < 0 else int(array.max())
        raise _invalid(f"{name} holds {wrong}; the model knows the token ids 0 to {vocabulary_size - 1}")
    return array.astype(np.int64)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _invalid(message: str) -> BackendError:
    return BackendError(message, status=400, code="invalid_request")
