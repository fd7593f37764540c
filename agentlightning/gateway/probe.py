"""Asks a model that is to be trained for one token, to check that its answers can be trained on."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Final

import msgspec

from agentlightning.errors import BackendError, ConfigError
from agentlightning.gateway.answer import Answer
from agentlightning.gateway.backend import Backend, ModelCall, Sampling
from agentlightning.gateway.capture import untrainable_reason
from agentlightning.gateway.replicas import RemoteBackend

_SECONDS: Final = 60.0  # the first call of a server that has just started may take long


async def probe(backend: RemoteBackend, model: str, train: Sampling | None) -> None:
    """Check that the backend returns exact ids, and logprobs of the distribution that `train`
    samples from. ConfigError says what is wrong and how to fix it."""
    if (
        backend.kind == "sglang"
        and train is not None
        and (train.top_p not in (None, 1.0) or train.top_k)
    ):
        raise ConfigError(
            "SGLang returns logprobs from before top_p and top_k: leave those of `train` at 1 and 0"
        )
    try:
        async with asyncio.timeout(_SECONDS):
            answer = await one_answer(backend, model, Sampling(max_tokens=1, seed=0))
            reason = untrainable_reason(answer, backend.captures_tokens)
            # Every server returns logprobs of the model's own distribution.
            plain = train is None or (train.temperature, train.top_p, train.top_k) == (1.0, 1.0, 0)
            if reason is None and backend.kind == "vllm" and not plain:
                await _check_processed(backend, model)
    except TimeoutError:
        raise _untrainable_error(backend, f"did not answer within {_SECONDS:g} seconds") from None
    except BackendError as error:
        other = (
            "; is it vLLM rather than SGLang?"
            if backend.kind == "sglang" and error.status == 404
            else ""
        )
        raise _untrainable_error(backend, f"failed at it: {error}{other}") from None
    if reason is not None:
        raise _untrainable_error(
            backend,
            f"gave an answer that cannot be trained ({reason}): it must be vLLM 0.16 or newer, "
            "which returns token ids, SGLang with a tokenizer named here, or a gateway of this "
            "project",
        )


async def _check_processed(backend: RemoteBackend, model: str) -> None:
    """ConfigError if the likeliest token has the same logprob at any temperature."""
    logprobs: list[float] = []
    for temperature in (0.5, 2.0):
        sampling = Sampling(temperature=temperature, max_tokens=1, seed=0)
        try:
            # of one, vLLM tells what it sampled
            answer = await one_answer(backend, model, sampling, top_logprobs=2)
        except BackendError as error:
            # a gateway of this project before its engine, whose logprobs are as they should be
            if error.status == 400:
                return
            raise
        tops = [
            msgspec.json.decode(entry, type=_Entry).top_logprobs
            for entry in answer.choices[0].logprob_entries
        ]
        if not tops or not tops[0]:
            return  # it returns none, so there is nothing to compare
        logprobs.append(max(top.logprob for top in tops[0]))
    if abs(logprobs[0] - logprobs[1]) < 1e-6 and logprobs[0] < -1e-6:
        raise _untrainable_error(
            backend,
            "tells logprobs of another distribution than it samples from, unless temperature and "
            "top_p are 1 and top_k is 0: start it with --logprobs-mode processed_logprobs",
        )


async def one_answer(
    backend: Backend, model: str, sampling: Sampling, top_logprobs: int = 0
) -> Answer:
    """Its answer to "Hi". BackendError if there is none."""
    call = ModelCall(
        request_id="probe",
        model=model,
        messages=[{"role": "user", "content": "Hi"}],
        sampling=sampling,
        logprobs=top_logprobs > 0,
        top_logprobs=top_logprobs,
    )
    answer = Answer(1)
    async with aclosing(backend.answer(call)) as events:
        async for event in events:
            answer.add(event)
    return answer


class _Top(msgspec.Struct):
    logprob: float


class _Entry(msgspec.Struct):
    top_logprobs: list[_Top] = []


def _untrainable_error(backend: RemoteBackend, why: str) -> ConfigError:
    return ConfigError(f"the server at {backend.name} was asked for one token and {why}")
