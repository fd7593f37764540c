"""A real vLLM samples for the trainer: `make engines`, which makes its environment.

The model's embeddings are not tied: on a CPU vLLM keeps the old output layer of one whose are,
which a test says."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from agentlightning.errors import TrainingError
from agentlightning.gateway.answer import Answer
from agentlightning.gateway.backend import Delta, ModelCall, Sampling
from agentlightning.gateway.backends.factory import make_backend
from agentlightning.gateway.backends.tokens import VllmBackend
from agentlightning.gateway.updates import load_weights
from agentlightning.learner.policy import load_policy
from agentlightning.learner.policy_config import LoRA
from tests.learner.engines import ROOT, check, fit, save_model, server
from tests.test_trainer import policy

VLLM = ROOT / ".venv-vllm" / "bin" / "vllm"
FLAGS = ["--enforce-eager", "--max-num-seqs", "64"]
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
DEVELOPMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}

pytestmark = pytest.mark.skipif("AGL_ENGINES" not in os.environ, reason="`make engines` runs these")


@contextmanager
def vllm(model: Path) -> Generator[tuple[str, subprocess.Popen[bytes]]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        VLLM,
        "serve",
        model,
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--max-model-len",
        "512",
        *FLAGS,
    ]
    command += [
        "--logprobs-mode",
        "processed_logprobs",
        "--enable-scale-out",
        "--enable-lora",
        "--max-loras",
        "2",
    ]
    with server(command, port, DEVELOPMENT | ENVIRONMENT, model.parent / "vllm.log") as started:
        yield started


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("vllm") / "model", tied=False)


@pytest.mark.timeout(900)
def test_an_adapter_and_all_weights_learn(tmp_path: Path, model: Path) -> None:
    """On one server: first what leaves its base as it is."""
    with vllm(model) as (url, _):
        check(fit(tmp_path / "adapter", model, {"vllm": url}, lora=LoRA(rank=8), steps=8))
        check(fit(tmp_path / "whole", model, {"vllm": url}))
        check(fit(tmp_path / "asynchronous", model, {"vllm": url}, max_staleness=2))
        # the base is not the learner's now
        with pytest.raises(TrainingError, match=r"another run has given others"):
            fit(tmp_path / "late", model, {"vllm": url}, lora=LoRA(rank=8))


@pytest.mark.timeout(600)
def test_one_that_the_run_starts(tmp_path: Path, model: Path) -> None:
    check(
        fit(
            tmp_path,
            model,
            {"vllm": "start", "program": str(VLLM), "flags": FLAGS, "environment": ENVIRONMENT},
        )
    )


@pytest.mark.timeout(900)
def test_a_model_with_tied_embeddings_is_found_out(tmp_path: Path) -> None:
    tied = save_model(tmp_path / "tied", tied=True)
    with (
        vllm(tied) as (url, _),
        pytest.raises(TrainingError, match=r"sampler and learner|tied embeddings"),
    ):
        fit(tmp_path, tied, {"vllm": url})


@pytest.mark.anyio
@pytest.mark.timeout(900)
async def test_each_token_is_of_the_weights_that_its_version_names(tmp_path: Path) -> None:
    """New weights are loaded in the middle of two answers, of which one is streamed."""
    weights = {1: tmp_path / "model", 2: tmp_path / "other"}
    for directory in weights.values():
        made = policy()
        unending = cast(Any, made.model)
        unending.config.tie_word_embeddings = False
        unending.lm_head.weight = torch.nn.Parameter(
            torch.randn_like(unending.lm_head.weight) * 0.3
        )
        unending.config.eos_token_id = unending.generation_config.eos_token_id = (
            made.tokenizer.eos_token
        ) = None
        directory.mkdir()
        made.save(directory)
    with vllm(weights[1]) as (url, _):
        backend = make_backend(f"{url}/v1", tokenizer=str(weights[1]), model=str(weights[1]))
        assert isinstance(backend, VllmBackend) and await backend.takes_ids()
        await load_weights([backend], 1, str(weights[1]))
        begun = asyncio.Event()
        answering = [
            asyncio.create_task(answered(backend, begun, stream=stream)) for stream in (False, True)
        ]
        await begun.wait()
        await load_weights([backend], 2, str(weights[2]))
        for answer in await asyncio.gather(*answering):
            (choice,) = answer.choices
            print(f"versions {choice.versions}")
            assert [version for version, _ in choice.versions] == [1, 2]
            ids = torch.tensor([[*answer.prompt_token_ids, *choice.token_ids]])
            start, first = len(answer.prompt_token_ids) - 1, 0
            for version, count in choice.versions:
                with torch.no_grad():
                    told = (
                        cast(Any, load_policy(weights[version]).model)(ids)
                        .logits[0]
                        .log_softmax(-1)
                    )
                sampled = told[start:-1].gather(-1, ids[0, start + 1 :, None])[:, 0]
                part = slice(first, first + count)
                assert torch.allclose(sampled[part], torch.tensor(choice.logprobs)[part], atol=1e-3)
                first += count
        await backend.close()


async def answered(backend: VllmBackend, begun: asyncio.Event, *, stream: bool) -> Answer:
    """The answer to a chat; `begun` is set once something of it is there."""
    messages, answer = [{"role": "user", "content": "one two"}], Answer(1)
    call = ModelCall(
        model="m", messages=messages, sampling=Sampling(max_tokens=480, seed=1), stream=stream
    )
    async for event in backend.answer(call):
        answer.add(event)
        if isinstance(event, Delta):
            begun.set()
    return answer
