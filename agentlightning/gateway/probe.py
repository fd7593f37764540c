"""One token asked of a model that is to be trained: whether its answers bring what training needs.

Knows backends and what makes an answer trainable. Knows no table of models and no HTTP.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Final

from agentlightning.errors import BackendError, ConfigError
from agentlightning.gateway.answer import Answer
from agentlightning.gateway.backend import Backend, ModelCall, Sampling
from agentlightning.gateway.capture import untrainable_reason

_SECONDS: Final = 60.0  # the first call of a server that has just started may take long


async def probe(backend: Backend, model: str) -> None:
    """Return if the backend answers with exact ids and logprobs. ConfigError says what is wrong and what to do."""
    call = ModelCall(
        request_id="probe",
        model=model,
        messages=[{"role": "user", "content": "Hi"}],
        sampling=Sampling(max_tokens=1, seed=0),
    )
    answer = Answer(1)
    try:
        async with asyncio.timeout(_SECONDS), aclosing(backend.answer(call)) as events:
            async for event in events:
                answer.add(event)
    except TimeoutError:
        raise _unfit(backend, f"did not answer within {_SECONDS:g} seconds") from None
    except BackendError as error:
        raise _unfit(backend, f"failed at it: {error}") from None
    reason = untrainable_reason(answer, backend.captures_tokens)
    if reason is not None:
        raise _unfit(
            backend,
            f"gave an answer that cannot be trained ({reason}): it must be vLLM 0.10.2 or newer, which returns token "
            "ids, SGLang with a tokenizer named here, or a gateway of this project",
        )


def _unfit(backend: Backend, why: str) -> ConfigError:
    return ConfigError(
        f"the server at {backend.name} was asked for one token and {why}. Mend that, register the model with "
        '"trainable": false to only evaluate it, or with "check": false to have it taken unseen'
    )
