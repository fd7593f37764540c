"""How a learner and the vLLM beside it share the GPUs of a machine, by numbers: no GPU is needed for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentlightning.errors import ConfigError
from agentlightning.learner.memory import GIB, MemoryEstimate
from agentlightning.learner.sharing import Share, other_gpus, part_of_gpu, usual_sampler

ESTIMATE = MemoryEstimate(
    weights=8 * GIB,
    gradients=4 * GIB,
    optimizer=24 * GIB,
    reference=0,
    critic=0,
    engine=0,
    cache=0,
    activations=10 * GIB,
    logits=2 * GIB,
)
GPU: dict[str, Any] = {"weights": 8 * GIB, "free": 70 * GIB, "total": 80 * GIB}


def test_what_a_step_takes_is_the_servers_while_it_samples() -> None:
    assert part_of_gpu(ESTIMATE, False, **GPU) == Share(
        ("--gpu-memory-utilization", "0.550", "--enable-sleep-mode"), sleeps=True
    )
    assert part_of_gpu(ESTIMATE, True, **GPU).flags == ("--gpu-memory-utilization", "0.350")
    assert part_of_gpu(None, False, **GPU).flags[1] == "0.850"


def test_gpus_that_the_learner_leaves_are_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert other_gpus(None, devices=1) is None
    assert other_gpus(None, devices=2) == Share(environment={"CUDA_VISIBLE_DEVICES": "1"})
    assert other_gpus(None, devices=3, first=1) == Share(environment={"CUDA_VISIBLE_DEVICES": "0,2"})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert other_gpus(2, devices=4) == Share(environment={"CUDA_VISIBLE_DEVICES": "6,7"})


def test_where_nothing_is_left_it_is_said() -> None:
    with pytest.raises(ConfigError, match=r"4 processes leave none of the 4 GPUs"):
        other_gpus(4, devices=4)
    with pytest.raises(ConfigError, match=r"34.0 GiB free, training keeps 24.0 .* 8.0 for the weights.*lora: \{\}"):
        part_of_gpu(ESTIMATE, False, weights=8 * GIB, free=34 * GIB, total=80 * GIB)


def test_vllm_samples_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual: dict[str, Any] = {"deterministic": False, "models": 1, "processes": None, "devices": 1}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert usual_sampler(**usual) is None
    (tmp_path / "vllm").touch(0o755)
    assert usual_sampler(**usual) == "vllm"
    for change in ({"deterministic": True}, {"models": 2}, {"processes": 1}):
        assert usual_sampler(**usual | change) is None
