"""`agl replay --explain`: the numbers of one token in a run that was trained, against the
formulas."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agentlightning as agl
from agentlightning.cli.main import run
from tests import agents
from tests.test_trainer import TASKS, policy, trainer

SMALL: dict[str, Any] = {
    "steps": 2,
    "tasks_per_step": 2,
    "group_size": 2,
    "max_tokens": 2,
    "temperature": 2.0,
}
PENALISED = agl.RewardSpec(length_penalty=10.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "chosen",
    [
        agl.GRPO(epochs=2, reward=PENALISED, **SMALL),
        agl.GRPO(old="proximal", epochs=2, minibatches=2, **SMALL),
        agl.PPO(minibatches=2, tasks_per_step=4, steps=2, max_tokens=2, temperature=2.0),
    ],
    ids=["grpo", "proximal", "ppo"],
)
def test_made_again_with_its_weights_a_step_has_the_loss_it_had(
    chosen: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Σ weight · loss over all tokens is the recorded loss of the policy, ratios are 1 in the first
    optimiser step alone, and there each number follows from those before it."""
    policy().save(tmp_path / "model")
    trainer(tmp_path, algorithm=chosen, model=tmp_path / "model").fit(
        agents.vowels, TASKS, TASKS[:2]
    )
    directory = tmp_path / "run"
    recorded = json.loads((directory / "batches.jsonl").read_text().splitlines()[-1])
    metrics = json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])
    losses: dict[int, float] = {}
    ratios: dict[int, list[float]] = {}
    for group in recorded["groups"]:
        rewards: dict[str, float] = {}
        advantages: dict[str, float] = {}
        for name, call, token in itertools.product(group, (0, 1), (0, 1)):
            capsys.readouterr()
            if run(["replay", str(directory), "--explain", name, f"{call}:{token}", "--json"]) != 0:
                assert "there is no" in capsys.readouterr().err
                continue
            stages = json.loads(capsys.readouterr().out)["stages"]
            first = {stage["name"]: stage["value"] for stage in reversed(stages)}
            rewards[name], advantages[name] = first["reward"], first["advantage"]
            # before any step with its sequence
            if "ratio" in first and first["ratio"] == pytest.approx(1.0, abs=1e-4):
                if chosen.old == "behaviour":
                    assert first["loss"] == pytest.approx(-first["advantage"], abs=1e-4)
                probability = float(
                    next(stage["how"] for stage in stages if stage["name"] == "logit").split()[-1]
                )
                assert first["gradient"] == pytest.approx(
                    first["weight"] * first["loss"], rel=1e-3, abs=1e-6
                )
                assert first["logit"] == pytest.approx(
                    first["gradient"] * (1 - probability), rel=1e-3, abs=1e-9
                )
            for ratio, weight, loss in zip(
                *_columns(stages, "ratio", "weight", "loss"), strict=True
            ):
                number = int(ratio["how"].rsplit(" ", 1)[1])
                losses[number] = losses.get(number, 0.0) + weight["value"] * loss["value"]
                ratios.setdefault(number, []).append(ratio["value"])
        if chosen.name == "grpo":
            values = [rewards[name] for name in group]
            for name in group:
                expected = (rewards[name] - np.mean(values)) / (np.std(values, ddof=1) + 1e-6)
                assert advantages[name] == pytest.approx(expected, abs=1e-5)
    for at, said in (
        ("0:0", "call 0, token 0:"),
        ("7", "has no call 7 that trains"),
        ("x", "write CALL or CALL:TOKEN"),
    ):
        assert (run(["replay", str(directory), "--explain", name, at]) == 0) is (at == "0:0")
        assert said in "".join(capsys.readouterr())
    of_critic = 0.5 * metrics.get("value_loss", 0.0)
    assert np.mean(list(losses.values())) == pytest.approx(metrics["loss"] - of_critic, abs=1e-6)
    assert ratios[1] == pytest.approx([1.0] * len(ratios[1]), abs=1e-4)
    assert max(abs(math.log(ratio)) for ratio in ratios[2]) > 1e-3


def _columns(stages: list[dict[str, Any]], *names: str) -> list[list[dict[str, Any]]]:
    return [[stage for stage in stages if stage["name"] == name] for name in names]
