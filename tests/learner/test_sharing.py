"""How a learner and the vLLM beside it share the GPUs of a machine, by numbers: no GPU is needed for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentlightning.errors import ConfigError
from agentlightning.learner.memory import GIB, MemoryEstimate
from agentlightning.learner.sharing import Share, share_gpus, usual_sampler

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
GPU: dict[str, Any] = {"free": 70 * GIB, "total": 80 * GIB}


def test_what_a_step_takes_is_the_servers_while_it_samples() -> None:
    assert share_gpus(ESTIMATE, None, False, devices=1, **GPU) == Share(
        ("--gpu-memory-utilization", "0.550", "--enable-sleep-mode"), sleeps=True
    )
    assert share_gpus(ESTIMATE, None, True, devices=1, **GPU).flags == ("--gpu-memory-utilization", "0.350")
    assert share_gpus(None, None, False, devices=1, **GPU).flags[1] == "0.850"


def test_gpus_that_the_learner_leaves_are_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert share_gpus(ESTIMATE, None, False, devices=2, **GPU) == Share(environment={"CUDA_VISIBLE_DEVICES": "1"})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert share_gpus(ESTIMATE, 2, True, devices=4, **GPU).environment == {"CUDA_VISIBLE_DEVICES": "6,7"}


def test_where_nothing_is_left_it_is_said() -> None:
    with pytest.raises(ConfigError, match=r"4 processes leave none of the 4 GPUs"):
        share_gpus(ESTIMATE, 4, False, devices=4, **GPU)
    with pytest.raises(ConfigError, match=r"keeps 24.0 GiB beside its weights.*30.0 to the sampler.*lora: \{\}"):
        share_gpus(ESTIMATE, None, False, devices=1, free=30 * GIB, total=80 * GIB)


def test_vllm_samples_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual: dict[str, Any] = {"deterministic": False, "models": 1, "processes": None, "devices": 1}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert usual_sampler(**usual) is None
    (tmp_path / "vllm").touch(0o755)
    assert usual_sampler(**usual) == "vllm"
    for change in ({"deterministic": True}, {"models": 2}, {"processes": 1}):
        assert usual_sampler(**usual | change) is None
