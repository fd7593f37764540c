"""A real SGLang samples for the trainer: `make engines`, which makes its environment."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from openai import AsyncOpenAI

from agentlightning.gateway.app import Gateway
from agentlightning.gateway.backends.factory import make_backend
from agentlightning.gateway.models import ModelEntry, ModelTable
from agentlightning.gateway.updates import load_weights
from agentlightning.learner.base import LoRA
from agentlightning.learner.policy import load_policy
from agentlightning.server.app import create_app
from agentlightning.store.sql import SqlStore
from agentlightning.types import EnqueueRolloutRequest, TokenCapture
from tests.gateway.world import serving
from tests.learner.engines import SGLANG, SGLANG_ENVIRONMENT, SGLANG_FLAGS, check, fit, save_model, server

pytestmark = pytest.mark.skipif("AGL_ENGINES" not in os.environ, reason="`make engines` runs these")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("sglang") / "model", tied=False)


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    """Of one server for all tests, which give it weights before they ask it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = [*SGLANG_FLAGS, "--dtype", "float32", "--context-length", "128"]
    command = [SGLANG, "-m", "sglang.launch_server", "--model-path", model, "--port", str(port), *flags]
    with server(command, port, SGLANG_ENVIRONMENT, model.parent / "sglang.log") as (url, _):
        yield url


def furthest(model: Path, tokens: TokenCapture) -> float:
    """How far any of its log-probabilities is from those of transformers."""
    (choice,) = tokens.choices
    ids = torch.tensor([[*tokens.prompt_token_ids, *choice.token_ids]])
    with torch.no_grad():
        logprobs = load_policy(model).model(ids).logits[0].log_softmax(-1)
    first = len(tokens.prompt_token_ids)
    told = [float(logprobs[place - 1, ids[0, place]]) for place in range(first, ids.shape[1])]
    return max(abs(own - theirs) for own, theirs in zip(told, choice.logprobs, strict=True))


@asynccontextmanager
async def recording(gateway: Gateway, store: SqlStore) -> AsyncGenerator[tuple[AsyncOpenAI, str]]:
    """A client of the gateway, whose calls are those of an attempt, and the id of its rollout."""
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input="task", mode="train")])
    leased = await store.dequeue_rollout()
    assert leased is not None
    async with serving(create_app(store, gateway=gateway)) as url:
        attempt = f"{url}/rollout/{leased.rollout_id}/attempt/{leased.attempt.attempt_id}/v1"
        async with AsyncOpenAI(base_url=attempt, api_key=leased.api_key or "any", max_retries=0) as client:
            yield client, leased.rollout_id


@pytest.mark.anyio
@pytest.mark.timeout(600)
async def test_a_chat_is_captured_exactly_before_and_after_updates(tmp_path: Path, model: Path, url: str) -> None:
    other = save_model(tmp_path / "other", tied=False, seed=1)
    backend = make_backend(f"{url}/v1", kind="sglang", tokenizer=str(model))
    store = await SqlStore.open(tmp_path / "store.sqlite")
    gateway = Gateway(ModelTable([ModelEntry("policy", backend)]), store)
    try:
        async with recording(gateway, store) as (client, rollout_id):
            for version, weights in enumerate((model, other, model), start=1):
                await load_weights([backend], version, str(weights))
                said = {"role": "user", "content": "How are you?"}
                asked = {"model": "policy", "messages": [said], "max_tokens": 8}
                await client.chat.completions.create(**asked)  # type: ignore[call-overload]
                async for _ in await client.chat.completions.create(**asked, stream=True):  # type: ignore[call-overload]
                    pass
                spans = (await store.query_spans(rollout_id))[-2:]
                for span in spans:
                    assert span.tokens is not None and len(span.tokens.choices[0].token_ids) > 0
                    assert span.tokens.choices[0].versions == ((version, len(span.tokens.choices[0].token_ids)),)
                    assert "agentlightning.call.untrainable" not in span.attributes
                    apart = furthest(weights, span.tokens)
                    print(f"version {version}: off by {apart:.1g}")
                    assert apart <= 1e-4
                assert furthest(other if weights == model else model, spans[0].tokens or pytest.fail()) > 1e-3
    finally:
        await gateway.close()
        await store.close()


@pytest.mark.timeout(600)
def test_all_weights_learn(tmp_path: Path, model: Path, url: str) -> None:
    check(fit(tmp_path, model, {"sglang": url}))


@pytest.mark.timeout(600)
def test_an_adapter_merged_into_its_weights_learns(tmp_path: Path, model: Path, url: str) -> None:
    check(fit(tmp_path, model, {"sglang": url}, lora=LoRA(rank=8), steps=8))
