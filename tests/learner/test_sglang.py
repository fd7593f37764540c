"""A real SGLang samples for the trainer: `make engines`, which makes its environment."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from agentlightning.gateway.answer import Answer
from agentlightning.gateway.backend import Sampling
from agentlightning.gateway.backends.factory import make_backend
from agentlightning.gateway.probe import one_answer
from agentlightning.gateway.updates import load_weights
from agentlightning.learner.policy import load_policy
from agentlightning.learner.policy_config import LoRA
from tests.learner.engines import (
    SGLANG,
    SGLANG_ENVIRONMENT,
    SGLANG_FLAGS,
    check,
    fit,
    save_model,
    server,
)

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
    command = [
        SGLANG,
        "-m",
        "sglang.launch_server",
        "--model-path",
        model,
        "--port",
        str(port),
        *flags,
    ]
    with server(command, port, SGLANG_ENVIRONMENT, model.parent / "sglang.log") as (url, _):
        yield url


def furthest(model: Path, answer: Answer) -> float:
    """How far any of its log-probabilities is from those of transformers."""
    (choice,) = answer.choices
    ids = torch.tensor([[*answer.prompt_token_ids, *choice.token_ids]])
    with torch.no_grad():
        logprobs = load_policy(model).model(ids).logits[0].log_softmax(-1)
    first = len(answer.prompt_token_ids)
    told = [float(logprobs[place - 1, ids[0, place]]) for place in range(first, ids.shape[1])]
    return max(abs(own - theirs) for own, theirs in zip(told, choice.logprobs, strict=True))


@pytest.mark.anyio
@pytest.mark.timeout(600)
async def test_tokens_are_exact_before_and_after_updates(
    tmp_path: Path, model: Path, url: str
) -> None:
    other = save_model(tmp_path / "other", tied=False, seed=1)
    backend = make_backend(f"{url}/v1", kind="sglang", tokenizer=str(model))
    for version, weights in enumerate((model, other, model), start=1):
        await load_weights([backend], version, str(weights))
        answer = await one_answer(backend, "policy", Sampling(max_tokens=8))
        assert {version for version, _ in answer.choices[0].versions} == {version}
        print(f"version {version}: off by {furthest(weights, answer):.1g}")
        assert furthest(weights, answer) <= 1e-4
        assert furthest(other if weights == model else model, answer) > 1e-3
    await backend.close()


@pytest.mark.timeout(600)
def test_all_weights_learn(tmp_path: Path, model: Path, url: str) -> None:
    check(fit(tmp_path, model, {"sglang": url}))


@pytest.mark.timeout(600)
def test_an_adapter_merged_into_its_weights_learns(tmp_path: Path, model: Path, url: str) -> None:
    check(fit(tmp_path, model, {"sglang": url}, lora=LoRA(rank=8), steps=8))
