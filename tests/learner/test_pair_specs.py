"""What a run says of its learner and sampler: what is none, and what does not go together, before
anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.algorithm.grpo import GRPO
from agentlightning.errors import ConfigError
from agentlightning.learner.pair_specs import (
    HOSTED,
    LearnerSpec,
    SamplerSpec,
    read_learner,
    read_sampler,
)
from agentlightning.learner.policy_config import LoRA
from tests import agents
from tests.test_trainer import TASKS, policy, trainer

NOWHERE = "http://127.0.0.1:9"
TINKER, VERL, VLLM = {"tinker": NOWHERE}, {"verl": NOWHERE}, {"vllm": NOWHERE}
ONE = GRPO(steps=1)


def own_loss(logprobs: Any, old_logprobs: Any, advantages: Any) -> Any:
    return -advantages * (logprobs - old_logprobs)


def test_words_stand_for_places() -> None:
    assert read_learner(None) == read_learner("torch") == LearnerSpec()
    assert read_learner("tinker") == LearnerSpec(tinker=HOSTED)
    assert read_learner({"fsdp": 2}).fsdp == 2
    assert read_sampler(None) is read_sampler("embedded") is None
    assert read_sampler("vllm") == SamplerSpec(vllm="start")
    assert read_sampler({"sglang": ["http://a", "http://b"]}) == SamplerSpec(
        sglang=["http://a", "http://b"]
    )


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("fsdp", r"write torch, \{fsdp: 2\}"),
        ({"fdsp": 2}, "unknown field `fdsp`"),
        ({"fsdp": 0}, "write torch"),
        ({"verl": NOWHERE, "reduction": "sum"}, "reduction"),
        ({"tinker": NOWHERE, "reduction": "max"}, "reduction"),
        (VERL | TINKER, "names tinker, verl"),
        ({"tinker": "gpu-1:8000"}, "not a Tinker server's URL"),
    ],
)
def test_what_is_no_learner_is_refused(given: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read_learner(given)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("tpu", "write embedded"),
        ({"vllm": "http://a/v1", "sglang": "http://b"}, "write embedded"),
        ({"vllm": "start", "flag": ["--x"]}, "unknown field `flag`"),
        ({"vllm": "http://a", "flags": ["--x"]}, "for a started server"),
        ({"sglang": "start"}, "not a server's URL"),
        ({"vllm": "start", "model": "m"}, "leave `model` out"),
        ({"vllm": "start", "api_key": "k"}, "api_key belongs to a server given by URL"),
        ({"sglang": "http://a", "model": "m"}, "has one model"),
    ],
)
def test_what_is_no_sampler_is_refused(given: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read_sampler(given)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"sampler": VLLM, "model": {"a": policy(), "b": policy()}}, "goes without several models"),
        ({"sampler": VLLM, "deterministic": True}, "goes without deterministic"),
        (
            {"sampler": {"sglang": NOWHERE}, "algorithm": GRPO(steps=1, max_staleness=1)},
            "as vLLM does",
        ),
        ({"learner": {"fsdp": 2}, "lora": LoRA()}, "goes without lora"),
        ({"learner": {"fsdp": 2}, "algorithm": agl.PPO(steps=1)}, "goes without a critic"),
        (
            {
                "learner": {"fsdp": 2},
                "algorithm": GRPO(loss=lambda logprobs, advantages: -advantages * logprobs),
            },
            "cannot be imported by",
        ),
        ({"learner": {"fsdp": 2}, "device": "mps"}, r"device 'mps'|device is 'mps'"),
        ({"learner": VERL}, "all weights and no adapter: leave lora out"),
        (
            {"learner": VERL, "lora": None, "sampler": VLLM},
            "goes without sampler: the server that learns samples too",
        ),
        # the model is one that was made here
        ({"learner": VERL, "lora": None}, "trains its own model"),
        ({"learner": "tinker"}, "TINKER_API_KEY"),
        ({"learner": TINKER, "dtype": "bfloat16"}, "goes without dtype"),
        (
            {"learner": TINKER, "algorithm": GRPO(steps=1, temperature=0.7)},
            "log-probabilities at temperature 1, not 0",
        ),
        ({"learner": TINKER, "lora": None}, r"give lora: \{rank: 16\}"),
        ({"learner": TINKER, "lora": LoRA(alpha=16)}, "alpha 32"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], why: str
) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    remote = changes.get("learner") in (TINKER, VERL, "tinker")
    settings: dict[str, Any] = {
        "algorithm": ONE,
        "lora": LoRA(8) if remote else None,
        "run_dir": tmp_path / "run",
    }
    with pytest.raises(ConfigError, match=why):
        trainer(tmp_path, **settings | changes).fit(agents.vowels, TASKS)
    assert not (tmp_path / "run").exists()
