"""A real vLLM samples for the trainer: `make engines`, which makes its environment.

The model's embeddings are not tied: on a CPU vLLM keeps the old output layer of one whose are, which a test says.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from agentlightning.errors import BackendError, ConfigError, TrainingError
from agentlightning.gateway.app import Gateway
from agentlightning.gateway.backends.http import HttpBackend
from agentlightning.gateway.models import ModelEntry, ModelTable
from agentlightning.gateway.updates import WeightUpdate, update_weights
from agentlightning.learner.base import LoRA
from tests.learner.engines import ROOT, check, fit, save_model, server
from tests.models import tiny_model

VLLM = ROOT / ".venv-vllm" / "bin" / "vllm"

pytestmark = pytest.mark.skipif("AGL_ENGINES" not in os.environ, reason="`make engines` runs these")


@contextmanager
def vllm(model: Path) -> Generator[tuple[str, subprocess.Popen[bytes]]]:
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
    with server(command, port, settings, model.parent / "vllm.log") as started:
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
        with pytest.raises(TrainingError, match=r"another run has given others"):  # the base is not the learner's now
            fit(tmp_path / "late", model, {"vllm": url}, lora=LoRA(rank=8))


@pytest.mark.timeout(900)
def test_a_run_goes_on_with_another_server(tmp_path: Path, model: Path) -> None:
    with vllm(model) as (url, process):
        os.killpg(process.pid, 9)
        process.wait()
        with pytest.raises(ConfigError, match="cannot be asked for its models"):
            fit(tmp_path, model, {"vllm": url})
    with vllm(model) as (url, _):
        first = fit(tmp_path, model, {"vllm": url}, steps=2)
    with vllm(model) as (url, _):
        resumed = fit(tmp_path, model, {"vllm": url}, steps=4, resume=True)
    assert first.stopped_because == resumed.stopped_because == "all steps done"
    assert [one.step for one in resumed.metrics][-1] == 4


@pytest.mark.timeout(900)
def test_a_model_with_tied_embeddings_is_found_out(tmp_path: Path) -> None:
    tied = save_model(tmp_path / "tied", tied=True)
    with vllm(tied) as (url, _), pytest.raises(TrainingError, match=r"sampler and learner|tied embeddings"):
        fit(tmp_path, tied, {"vllm": url})


@pytest.mark.anyio
@pytest.mark.timeout(600)
async def test_a_checkpoint_of_other_shapes_costs_the_server(tmp_path: Path, model: Path) -> None:
    """It refuses that one, and then those that fit."""
    other = tmp_path / "other"
    tiny_model().save_pretrained(other)
    with vllm(model) as (url, _):
        gateway = Gateway(ModelTable([ModelEntry("policy", HttpBackend(f"{url}/v1"))]))
        for path, why in ((model, None), (other, "restart vLLM"), (model, "answered 5")):
            update = WeightUpdate(policy_version=1, path=str(path))
            with pytest.raises(BackendError, match=why) if why else nullcontext():
                await update_weights(gateway, "policy", update)
        await gateway.close()
