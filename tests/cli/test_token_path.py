"""`agl rollouts show --explain`: the numbers of one token in a run that was trained, against the formulas."""

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
from scripts.replay import main as replay
from tests import agents
from tests.test_trainer import TASKS, algorithm, policy, trainer

SMALL: dict[str, Any] = {"steps": 2, "tasks_per_step": 2, "group_size": 2, "max_tokens": 2, "temperature": 2.0}


def trained(tmp_path: Path, **changes: Any) -> tuple[Path, list[str]]:
    settings = algorithm(steps=1, reward=agl.RewardSpec(length_penalty=10.0), **changes)
    result = trainer(tmp_path, algorithm=settings).fit(agents.vowels, TASKS, TASKS[:2])
    assert result.stopped_because == "all steps done"
    store = tmp_path / "run" / "store.sqlite"
    line = json.loads((tmp_path / "run" / "batches.jsonl").read_text().splitlines()[0])
    return store, [name for group in line["groups"] for name in group]


def explained(store: Path, rollout: str, at: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert run(["rollouts", "show", rollout, "--store", str(store), "--json", "--explain", at]) == 0
    found = json.loads(capsys.readouterr().out)
    return found | {"stages": {one["name"]: one["value"] for one in found["stages"]}}


@pytest.mark.slow
def test_each_number_is_that_of_the_formulas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """GRPO's A of R with a length penalty; 1 / (rollouts · tokens of the rollout); and −w·A at r = 1."""
    store, names = trained(tmp_path, minibatches=2)
    rewards, whole = [], []
    for name in names[:4]:  # one group
        paths = [explained(store, name, f"{call}:0", capsys) for call in (0, 1)]
        rewards.append(paths[0]["stages"]["reward"])
        whole.append(paths)
    for reward, paths in zip(rewards, whole, strict=True):
        expected = (reward - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-6)
        for path in paths:
            stages = path["stages"]
            assert stages["return"] == pytest.approx(reward)
            assert stages["advantage"] == pytest.approx(expected, abs=1e-5)
            assert stages["mask"] == 1.0
            assert stages["loss"] == pytest.approx(-stages["advantage"])
            assert stages["gradient"] == pytest.approx(-stages["weight"] * stages["advantage"])
            assert stages["logit"] == pytest.approx(stages["gradient"] * (1 - math.exp(path["logprob"])))


@pytest.mark.slow
@pytest.mark.parametrize(
    "chosen",
    [
        agl.GRPO(epochs=2, **SMALL),
        agl.GRPO(old="proximal", epochs=2, minibatches=2, **SMALL),
        agl.PPO(minibatches=2, tasks_per_step=4, steps=2, max_tokens=2, temperature=2.0),
    ],
    ids=["grpo", "proximal", "ppo"],
)
def test_made_again_with_its_weights_a_step_has_the_loss_it_had(
    chosen: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Σ weight · loss over all tokens is the recorded loss of the policy, and ratios are 1 in the first optimiser step
    alone."""
    policy().save(tmp_path / "model")
    trainer(tmp_path, algorithm=chosen, model=tmp_path / "model").fit(agents.vowels, TASKS)
    directory = tmp_path / "run"
    recorded = json.loads((directory / "batches.jsonl").read_text().splitlines()[-1])
    metrics = json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])
    losses: dict[int, float] = {}
    ratios: dict[int, list[float]] = {}
    for name in itertools.chain(*recorded["groups"]):
        for call, token in itertools.product((0, 1), (0, 1)):
            capsys.readouterr()
            arguments = ["--explain", name, f"{call}:{token}", "--json"]
            if replay([str(directory), *arguments]) != 0:
                assert "there is no" in capsys.readouterr().err
                continue
            path = json.loads(capsys.readouterr().out)
            assert path["exact"]
            for ratio, weight, loss in zip(*_columns(path, "ratio", "weight", "loss"), strict=True):
                number = int(ratio["how"].rsplit(" ", 1)[1])
                losses[number] = losses.get(number, 0.0) + weight["value"] * loss["value"]
                ratios.setdefault(number, []).append(ratio["value"])
    of_critic = 0.5 * metrics.get("value_loss", 0.0)
    assert np.mean(list(losses.values())) == pytest.approx(metrics["loss"] - of_critic, abs=1e-6)
    assert ratios[1] == pytest.approx([1.0] * len(ratios[1]), abs=1e-4)
    assert max(abs(np.log(ratios[2]))) > 1e-3
    if chosen.name == "ppo":
        assert run(["rollouts", "show", name, "--store", str(directory / "store.sqlite"), "--explain"]) != 0
        assert "replay.py" in capsys.readouterr().err


def _columns(path: dict[str, Any], *names: str) -> list[list[dict[str, Any]]]:
    return [[one for one in path["stages"] if one["name"] == name] for name in names]


@pytest.mark.slow
def test_weights_of_a_batch_add_up_to_one_and_words_say_what_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, names = trained(tmp_path, level="tree")
    total = 0.0
    for name in names:
        for call in (0, 1):
            stages, token = explained(store, name, f"{call}", capsys)["stages"], 0
            while stages is not None:
                total += stages.get("weight", 0.0)
                token += 1
                code = run(["rollouts", "show", name, "--store", str(store), "--json", "--explain", f"{call}:{token}"])
                out = capsys.readouterr().out
                found = json.loads(out) if code == 0 else None
                stages = found and {one["name"]: one["value"] for one in found["stages"]}
    assert total == pytest.approx(1.0)
    assert run(["rollouts", "show", names[0], "--store", str(store), "--explain"]) == 0
    table = capsys.readouterr().out
    assert (
        table.startswith("step 1, call 0, token 0:") and "length_penalty" in table and "rollout-mean over 12" in table
    )
    for at, said in (("7", "has no call 7 that trains"), ("0:99", "there is no 99"), ("x", "write CALL or CALL:TOKEN")):
        assert run(["rollouts", "show", names[0], "--store", str(store), "--explain", at]) != 0
        assert said in capsys.readouterr().err
    held_out = next(path for path in _rollouts(store, capsys) if path["rollout"]["mode"] == "val")
    assert run(["rollouts", "show", held_out["rollout"]["rollout_id"], "--store", str(store), "--explain"]) != 0
    assert "held out or dropped" in capsys.readouterr().err


def _rollouts(store: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert run(["rollouts", "ls", "--store", str(store), "--json", "--limit", "100"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]
