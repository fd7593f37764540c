"""What is asked of a server before a model behind it is trained."""

from __future__ import annotations

import math

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from agentlightning.errors import ConfigError
from agentlightning.gateway.backend import Sampling
from agentlightning.gateway.backends.factory import with_version
from agentlightning.gateway.backends.http import HttpBackend
from agentlightning.gateway.probe import probe
from tests.gateway.world import serving

pytestmark = pytest.mark.anyio

LOGITS = (2.0, 0.5)


def app(*, processed: bool | None) -> Starlette:
    """vLLM of two tokens, with `--logprobs-mode processed_logprobs` or without. None: no such
    model."""

    async def answer(request: Request) -> JSONResponse:
        if processed is None:
            return JSONResponse({"error": {"message": "The model `m` does not exist."}}, 404)
        asked = await request.json()
        scaled = [logit / (asked["temperature"] if processed else 1.0) for logit in LOGITS]
        logprob = scaled[0] - math.log(sum(map(math.exp, scaled)))
        entry = {"token": "a", "logprob": logprob, "bytes": [97]}
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "a"},
            "logprobs": {"content": [{**entry, "top_logprobs": [entry]}]},
            "token_ids": [0],
            "finish_reason": "length",
        }
        usage = {"prompt_tokens": 1, "completion_tokens": 1}
        return JSONResponse({"choices": [choice], "prompt_token_ids": [1], "usage": usage})

    return Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])


@pytest.mark.parametrize(
    ("processed", "train", "refusal"),
    [
        (True, Sampling(temperature=0.7), None),
        (False, Sampling(temperature=0.7), "--logprobs-mode processed_logprobs"),
        (False, Sampling(top_p=0.9), "--logprobs-mode processed_logprobs"),
        (False, Sampling(), None),
        (False, None, None),
        (None, Sampling(), r"asked for one token.*`m` does not exist"),
    ],
)
async def test_logprobs_must_be_of_what_is_sampled_from(
    processed: bool | None, train: Sampling | None, refusal: str | None
) -> None:
    async with serving(app(processed=processed)) as url:
        backend = HttpBackend(f"{url}/v1")
        try:
            if refusal is None:
                await probe(backend, "m", train)
            else:
                with pytest.raises(ConfigError, match=refusal):
                    await probe(backend, "m", train)
        finally:
            await backend.close()


@pytest.mark.parametrize(
    ("kind", "given", "added"),
    [
        ("vllm", "http://h:8000", "/v1"),
        ("vllm", "http://h:8000/v1/", ""),
        ("sglang", "http://h/engine", "/v1"),
        ("openai", "https://h/v1beta/openai", ""),
        ("azure", "https://x.openai.azure.com?api-version=1", ""),
    ],
)
def test_an_address_is_completed_where_nothing_says_otherwise(
    kind: str, given: str, added: str
) -> None:
    assert with_version(given, kind) == given + added
