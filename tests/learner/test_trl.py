"""A step here has the gradient of a step of TRL's GRPOTrainer: same model, rollouts, rewards and
old log-probabilities.

`tests/oracles/trl_gradients.json` is what TRL 1.16 recorded of itself: see
scripts/record_trl_gradients.py, which says what of. Where TRL is installed
(`make .venv-trl/.setup`) it records them anew."""

from __future__ import annotations

import base64
import functools
import itertools
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentlightning.algorithm import GRPO
from agentlightning.algorithm.grpo import CISPO, DAPO, DrGRPO
from agentlightning.data.credit import RewardedGroup
from agentlightning.data.sequences import Level, TrainingSequence, build_sequences
from agentlightning.data.transitions import Transition
from agentlightning.learner.policy import Policy
from agentlightning.learner.policy_config import AdamW
from agentlightning.learner.torch import TorchLearner
from tests.learner.test_torch import Still
from tests.transitions import transition

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "oracles" / "trl_gradients.json"

# TRL's loss types, as settings of this package. A row of TRL is a rollout, whatever calls it holds.
EPSILON: dict[str, Any] = {"baseline_options": {"epsilon": 1e-4}}
SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": EPSILON,
    "dr_grpo": {"constant_length": 16},
    "bnpo": {**EPSILON, "aggregation": "token-mean"},
    "dapo": {**EPSILON, "overlong": False},
    "cispo": {**EPSILON, "clip_low": 1.0, "clip_high": 0.05},
    "kl": {**EPSILON, "reference": True, "kl_coefficient": 0.3},
}
ALGORITHMS: dict[str, type[GRPO]] = {
    "dr_grpo": DrGRPO,
    "dapo": DAPO,
    "cispo": CISPO,
}


@pytest.fixture(scope="module", params=["golden", "live"])
def recorded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    if request.param == "golden":
        return json.loads(GOLDEN.read_text())
    if not (ROOT / ".venv-trl" / ".setup").is_file():
        reason = "there is no .venv-trl; `make .venv-trl/.setup` makes it"
        if os.environ.get("AGL_REQUIRE_TRL"):
            pytest.fail(f"AGL_REQUIRE_TRL is set, and {reason}")
        pytest.skip(reason)
    path = tmp_path_factory.mktemp("trl") / "gradients.json"
    command = [
        ROOT / ".venv-trl" / "bin" / "python",
        ROOT / "scripts" / "record_trl_gradients.py",
        path,
    ]
    subprocess.run(command, check=True, timeout=240, capture_output=True)
    return json.loads(path.read_text())


def unpacked(text: str, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), "<f4").copy()).view_as(like)


def make_learner(recorded: dict[str, Any], *, reference: bool) -> TorchLearner:
    model = Qwen3ForCausalLM(Qwen3Config(**recorded["model"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(unpacked(recorded["weights"][name], parameter))
    learner = TorchLearner(Policy(model, None), AdamW(max_grad_norm=1e9), reference=reference)  # type: ignore[arg-type]
    learner.optimizer = Still(model.parameters(), lr=0.0)
    return learner


def calls(number: int, rollout: dict[str, list[int]]) -> Iterator[Transition]:
    """A call for every run of sampled tokens; its prompt is all that came before."""
    ids = rollout["prompt"] + rollout["completion"]
    start = len(rollout["prompt"])
    index = itertools.count()
    for sampled, run in itertools.groupby(rollout["sampled"]):
        end = start + len(list(run))
        if sampled:
            yield transition(
                ids[:start], ids[start:end], rollout_id=str(number), call_index=next(index)
            )
        start = end


def make_batch(
    recorded: dict[str, Any], algorithm: GRPO, learner: TorchLearner
) -> list[TrainingSequence]:
    """The rollouts with the algorithm's advantages, sampled by the learner's present weights."""
    rollouts = [list(calls(number, rollout)) for number, rollout in enumerate(recorded["rollouts"])]
    size = recorded["group_size"]
    groups = [
        RewardedGroup(rollouts[start : start + size], recorded["rewards"][start : start + size])
        for start in range(0, len(rollouts), size)
    ]
    credited = [one for group in algorithm.advantages(groups) for one in group]
    sequences = [
        one for transitions in credited for one in build_sequences(transitions, algorithm.level)
    ]
    logprobs = learner.logprobs(sequences, recorded["temperature"])
    return [
        replace(one, logprobs=old.numpy()) for one, old in zip(sequences, logprobs, strict=True)
    ]


@pytest.mark.parametrize("level", ["trajectory", "tree"])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_gradients_of_two_steps_are_those_of_trl(
    recorded: dict[str, Any], name: str, level: Level
) -> None:
    size, temperature = recorded["group_size"], recorded["temperature"]
    make = functools.partial(
        ALGORITHMS.get(name, GRPO), group_size=size, temperature=temperature, level=level
    )
    algorithm = make(**SETTINGS[name])
    learner = make_learner(recorded, reference=algorithm.reference)
    batch = make_batch(recorded, algorithm, learner)
    clipped = 0.0
    for theirs in recorded["gradients"][name]:
        clipped = learner.step(batch, algorithm.make_loss())["clip_fraction"]
        parameters = dict(learner.model.named_parameters())
        ours = torch.cat(
            [one.grad.flatten() for one in parameters.values() if one.grad is not None]
        )
        gradient = {one: unpacked(theirs[one], parameter) for one, parameter in parameters.items()}
        expected = torch.cat([part.flatten() for part in gradient.values()])
        assert float((ours - expected).norm() / expected.norm()) < 1e-4
        with torch.no_grad():  # as TRL's optimiser did
            for one, parameter in parameters.items():
                parameter -= recorded["learning_rate"] * gradient[one]
    assert clipped > 0.1
