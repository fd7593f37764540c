"""A real vLLM samples for the trainer: `make engines`, which makes its environment.

The model's embeddings are not tied: on a CPU vLLM keeps the old output layer of one whose are, which a test says.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from agentlightning.algorithm.grpo import GRPO
from agentlightning.errors import ConfigError, TrainingError
from agentlightning.gateway.answer import Answer
from agentlightning.gateway.backend import Delta, ModelCall, Sampling
from agentlightning.gateway.backends.kinds import make_backend
from agentlightning.gateway.backends.vllm import VllmBackend
from agentlightning.gateway.updates import WeightUpdate, load_weights
from agentlightning.learner.base import AdamW, LoRA
from agentlightning.learner.policy import load_policy
from agentlightning.trainer import FitResult
from tests import agents
from tests.test_trainer import TASKS, policy, trainer

ROOT = Path(__file__).parents[2]
VLLM = ROOT / ".venv-vllm" / "bin" / "vllm"
READY_SECONDS = 300

pytestmark = pytest.mark.skipif("AGL_ENGINES" not in os.environ, reason="`make engines` runs these")


def save_model(directory: Path, *, tied: bool) -> Path:
    made = policy()
    model = cast(Any, made.model)
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.get_input_embeddings().weight.detach().clone())
    made.save(directory)
    return directory


@contextmanager
def vllm(model: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    flags = "--dtype float32 --enforce-eager --max-model-len 512 --max-num-seqs 64 --logprobs-mode processed_logprobs"
    command = [VLLM, "serve", model, "--port", str(port), *flags.split(), "--enable-lora", "--max-loras", "2"]
    command += ["--enable-scale-out"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | settings
    log = model.parent / "vllm.log"
    with log.open("wb") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        give_up = time.monotonic() + READY_SECONDS
        while not answers(f"{url}/health"):
            assert server.poll() is None and time.monotonic() < give_up, log.read_text()[-5000:]
            time.sleep(1)
        yield url, server
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, 9)
        server.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False


def fit(directory: Path, model: Path, url: str, *, resume: bool = False, **changes: Any) -> FitResult:
    lora, steps = changes.pop("lora", None), changes.pop("steps", 6)
    six = GRPO(steps=steps, tasks_per_step=6, group_size=8, max_tokens=6, checkpoint_every=1, **changes)
    settings: dict[str, Any] = {"algorithm": six, "lora": lora, "n_runners": 32, "optimizer": AdamW(learning_rate=3e-3)}
    return trainer(directory, model=model, sampler={"vllm": url}, **settings).fit(
        agents.vowels, TASKS, TASKS, resume=resume
    )


def check(result: FitResult) -> None:
    """It learned, from what it sampled."""
    mismatch = [one.values["inference_mismatch"] for one in result.metrics if "inference_mismatch" in one.values]
    before, after = result.evaluations[0].reward, result.evaluations[-1].reward
    print(f"held-out {before:.3f} → {after:.3f}, largest mismatch {max(mismatch):.1g}")
    assert mismatch and max(mismatch) < 1e-4
    assert after > before + 0.1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("vllm") / "model"
    directory.mkdir()
    return save_model(directory, tied=False)


@pytest.mark.timeout(900)
def test_an_adapter_and_all_weights_learn(tmp_path: Path, model: Path) -> None:
    """On one server: first what leaves its base as it is."""
    with vllm(model) as (url, _):
        check(fit(tmp_path / "adapter", model, url, lora=LoRA(rank=8), steps=8))
        check(fit(tmp_path / "whole", model, url))
        check(fit(tmp_path / "asynchronous", model, url, max_staleness=2))
        with pytest.raises(TrainingError, match=r"another run has given others"):  # the base is not the learner's now
            fit(tmp_path / "late", model, url, lora=LoRA(rank=8))


@pytest.mark.timeout(900)
def test_a_run_goes_on_with_another_server(tmp_path: Path, model: Path) -> None:
    with vllm(model) as (url, server):
        os.killpg(server.pid, 9)
        server.wait()
        with pytest.raises(ConfigError, match="cannot be asked for its models"):
            fit(tmp_path, model, url)
    with vllm(model) as (url, _):
        first = fit(tmp_path, model, url, steps=2)
    with vllm(model) as (url, _):
        resumed = fit(tmp_path, model, url, steps=4, resume=True)
    assert first.stopped_because == resumed.stopped_because == "all steps done"
    assert [one.step for one in resumed.metrics][-1] == 4


@pytest.mark.timeout(900)
def test_a_model_with_tied_embeddings_is_found_out(tmp_path: Path) -> None:
    directory = tmp_path / "tied"
    directory.mkdir()
    tied = save_model(directory, tied=True)
    with vllm(tied) as (url, _), pytest.raises(TrainingError, match=r"sampler and learner|tied embeddings"):
        fit(tmp_path, tied, url)


@pytest.mark.anyio
@pytest.mark.timeout(900)
async def test_each_token_is_of_the_weights_that_its_version_names(tmp_path: Path) -> None:
    """New weights are loaded in the middle of two answers, of which one is streamed."""
    weights = {1: tmp_path / "model", 2: tmp_path / "other"}
    for directory in weights.values():
        made = policy()
        unending = cast(Any, made.model)
        unending.config.tie_word_embeddings = False
        unending.lm_head.weight = torch.nn.Parameter(torch.randn_like(unending.lm_head.weight) * 0.3)
        unending.config.eos_token_id = unending.generation_config.eos_token_id = made.tokenizer.eos_token = None
        directory.mkdir()
        made.save(directory)
    with vllm(weights[1]) as (url, _):
        backend = make_backend(f"{url}/v1", tokenizer=str(weights[1]), model=str(weights[1]))
        assert isinstance(backend, VllmBackend) and await backend.takes_ids()
        await load_weights("m", [backend], WeightUpdate(policy_version=1, path=str(weights[1])))
        begun = asyncio.Event()
        answering = [asyncio.create_task(answered(backend, begun, stream=stream)) for stream in (False, True)]
        await begun.wait()
        await load_weights("m", [backend], WeightUpdate(policy_version=2, path=str(weights[2]), in_flight="pause"))
        for answer in await asyncio.gather(*answering):
            (choice,) = answer.choices
            print(f"versions {choice.versions}")
            assert [version for version, _ in choice.versions] == [1, 2]
            ids = torch.tensor([[*answer.prompt_token_ids, *choice.token_ids]])
            start, first = len(answer.prompt_token_ids) - 1, 0
            for version, count in choice.versions:
                with torch.no_grad():
                    told = cast(Any, load_policy(weights[version]).model)(ids).logits[0].log_softmax(-1)
                sampled = told[start:-1].gather(-1, ids[0, start + 1 :, None])[:, 0]
                part = slice(first, first + count)
                assert torch.allclose(sampled[part], torch.tensor(choice.logprobs)[part], atol=1e-3)
                first += count
        await backend.close()


async def answered(backend: VllmBackend, begun: asyncio.Event, *, stream: bool) -> Answer:
    """The answer to a chat; `begun` is set once something of it is there."""
    messages, answer = [{"role": "user", "content": "one two"}], Answer(1)
    call = ModelCall(model="m", messages=messages, sampling=Sampling(max_tokens=480, seed=1), stream=stream)
    async for event in backend.answer(call):
        answer.add(event)
        if isinstance(event, Delta):
            begun.set()
    return answer
