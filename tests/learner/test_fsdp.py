"""A learner in several processes: what it computes is what one computes, and nothing of it is left
behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentlightning.errors import ConfigError, TrainingError
from agentlightning.learner.corrections import Corrections, corrected, prepare
from agentlightning.learner.fsdp import FsdpLearner, Settings
from agentlightning.learner.losses import Loss
from agentlightning.learner.policy import (
    Policy,
    empty_policy,
    load_policy,
    open_policy,
    saved_weights,
)
from agentlightning.learner.policy_config import AdamW, DType
from agentlightning.learner.tiny import make_tokenizer
from agentlightning.learner.torch import TorchLearner
from tests import agents
from tests.learner.test_objective import by_level, from_tasks, per_rollout
from tests.learner.test_observations import sequences as observing
from tests.learner.test_servers import wait_until_gone
from tests.learner.test_torch import batch
from tests.learner.vllm_standin import standin
from tests.models import tiny_model
from tests.test_trainer import TASKS, algorithm, policy, trainer

LOSS = Loss(
    clip_high=0.28,
    aggregation="rollout-mean",
    entropy_coefficient=0.01,
    temperature=0.8,
    kl_coefficient=0.04,
)
OPTIMIZER = AdamW(learning_rate=1e-3, micro_batch_tokens=64)


def own_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    return -advantages * (logprobs - old_logprobs)


def settings(model: Path, dtype: DType = "float32") -> Settings:
    return Settings(str(model), OPTIMIZER, True, "cpu", dtype, 1)


def one_process(model: Path, dtype: DType = "float32") -> TorchLearner:
    return TorchLearner(
        open_policy(model, seed=0, device="cpu", dtype=dtype), OPTIMIZER, reference=True
    )


def same(ours: Mapping[str, float], theirs: Mapping[str, float]) -> None:
    assert dict(ours) == pytest.approx(dict(theirs), rel=1e-5, abs=1e-5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    Policy(tiny_model(), make_tokenizer(["a plain corpus of a few words"], 300)).save(place)
    return place


@pytest.fixture(scope="module")
def started(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FsdpLearner]:
    learner = FsdpLearner(
        empty_policy(model), settings(model), 2, tmp_path_factory.mktemp("two") / "fsdp.log"
    )
    yield learner
    learner.close()
    wait_until_gone([one.pid for one in learner.processes])


@pytest.fixture
def two(started: FsdpLearner, model: Path, tmp_path: Path) -> FsdpLearner:
    """As at the start."""
    (tmp_path / "start").mkdir()
    one_process(model).save(tmp_path / "start")
    started.load(tmp_path / "start")
    return started


@pytest.mark.slow
def test_two_processes_compute_what_one_does(two: FsdpLearner, model: Path, tmp_path: Path) -> None:
    one = one_process(model)
    # also an odd number of micro-batches
    for number, level in enumerate(("transition", "trajectory", "tree")):
        sequences = batch(level, 3 + number)
        same(two.step(sequences, LOSS, 0), one.step(sequences, LOSS, 0))
    poisoned = batch()
    poisoned[0].advantages[0] = np.nan
    with pytest.raises(TrainingError, match="weights are unchanged"):
        two.step(poisoned, LOSS)
    two.export(tmp_path / "whole", "whole")
    weights = saved_weights(tmp_path / "whole")
    for name, tensor in load_policy(tmp_path / "whole", device="cpu").model.state_dict().items():
        torch.testing.assert_close(tensor, one.model.state_dict()[name], atol=1e-5, rtol=0)
    assert "lm_head.weight" not in weights  # it is tied
    for ours, theirs in zip(two.logprobs(batch()), one.logprobs(batch()), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_old_log_probabilities_and_losses_of_your_own_are_those_of_one(
    two: FsdpLearner, model: Path
) -> None:
    one, loss = one_process(model), replace(LOSS, kind=own_loss, clip_high=None, old="proximal")
    given = ["truncate", {"name": "bound", "statistic": "k2", "high": 8.0}]
    corrections = Corrections.read(given, "proximal")
    (first, told), (second, expected) = (
        prepare(learner, batch(), loss.temperature, 0) for learner in (two, one)
    )
    same(told, expected)
    (ours, masked), (theirs, also) = (
        corrected(some, corrections, "proximal") for some in (first, second)
    )
    same(masked, also)
    assert masked["masked"] > 0
    np.testing.assert_allclose(ours[0].advantages, theirs[0].advantages, atol=1e-5)
    same(two.step(ours, loss), one.step(theirs, loss))
    by_task = Loss(by_level, aggregation=per_rollout, temperature=0.8)
    (ours, theirs) = (
        learner.step(from_tasks(observing("tree", 5)), by_task, 0) for learner in (two, one)
    )
    same(ours, theirs)
    assert {"loss/level", "observation_loss"} <= {*ours}
    with pytest.raises(ConfigError, match="no critic"):
        two.values(batch())
    assert two.token_bytes is not None and two.mismatch_tolerance == one.mismatch_tolerance


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_checkpoint_that_cannot_be_written_holds_up_no_process(
    two: FsdpLearner, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(OSError):
        two.save(tmp_path / "file" / "checkpoint")
    assert two.logprobs(batch())


@pytest.mark.slow
def test_a_checkpoint_of_two_is_resumed_by_one(
    two: FsdpLearner, model: Path, tmp_path: Path
) -> None:
    two.step(batch(), LOSS)
    (tmp_path / "saved").mkdir()
    two.save(tmp_path / "saved")
    expected = two.step(batch(), LOSS)
    one = one_process(model)
    one.load(tmp_path / "saved")
    same(one.step(batch(), LOSS), expected)
    alone = FsdpLearner(empty_policy(model), settings(model), 1, tmp_path / "fsdp.log")
    try:
        alone.load(tmp_path / "saved")
        same(alone.step(batch(), LOSS), expected)
        (tmp_path / "saved" / "optimizer.pt").unlink()
        with pytest.raises(ConfigError, match="cannot be resumed from"):
            alone.load(tmp_path / "saved")
    finally:
        alone.close()


@pytest.mark.slow
def test_bfloat16_is_what_layers_compute_in_and_checkpoints_keep_all_bits(
    model: Path, tmp_path: Path
) -> None:
    one = one_process(model, "bfloat16")
    one.step(batch(), LOSS)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one.save(tmp_path / "one")
    two = FsdpLearner(empty_policy(model), settings(model, "bfloat16"), 2, tmp_path / "fsdp.log")
    try:
        two.load(tmp_path / "one")
        two.save(tmp_path / "two")
        saved, again = (
            torch.load(tmp_path / name / "optimizer.pt")["masters"] for name in ("one", "two")
        )
        assert all(torch.equal(a, b) for a, b in zip(saved, again, strict=True))
        weights, same_again = (saved_weights(tmp_path / name) for name in ("one", "two"))
        assert all(torch.equal(weights[name], same_again[name]) for name in weights)
        ours, theirs = two.step(batch(), LOSS), one.step(batch(), LOSS)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.02)
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-3)
        one.load(tmp_path / "two")
    finally:
        two.close()


@pytest.mark.slow
def test_nothing_of_it_is_left_when_the_trainer_is_killed(model: Path, tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from tests.learner.test_fsdp import FsdpLearner, empty_policy, settings\n"
        f"model = Path({str(model)!r})\n"
        "learner = FsdpLearner(empty_policy(model), settings(model), 2, "
        f"Path({str(tmp_path / 'log')!r}))\n"
        "print(*[one.pid for one in learner.processes], flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        processes = [int(one) for one in trainer.stdout.readline().split()]
        trainer.kill()
    assert len(processes) == 2
    wait_until_gone(processes)


@pytest.mark.slow
def test_a_run_whose_process_is_killed_ends_with_its_log_and_goes_on_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learners: list[FsdpLearner] = []
    step = FsdpLearner.step

    def step_once(self: FsdpLearner, *arguments: Any) -> dict[str, float]:
        learners.append(self)
        if len(learners) == 3:
            os.kill(self.processes[-1].pid, signal.SIGKILL)
        return step(self, *arguments)

    monkeypatch.setattr(FsdpLearner, "step", step_once)
    saving = algorithm(steps=6, checkpoint_every=1)
    with pytest.raises(
        TrainingError, match=r"has ended.*number 1 with SIGKILL.*--resume.*fsdp\.log"
    ):
        trainer(tmp_path, algorithm=saving, learner={"fsdp": 2}, device="cpu").fit(
            agents.vowels, TASKS
        )
    wait_until_gone([one.pid for one in learners[0].processes])
    result = trainer(tmp_path, algorithm=saving, device="cpu").fit(
        agents.vowels, TASKS, resume=True
    )
    assert result.stopped_because == "all steps done"
    assert [measured.step for measured in result.metrics] == [1, 2, 3, 4, 5, 6]
    mismatches = [measured.values.get("inference_mismatch") for measured in result.metrics]
    assert any(mismatches[:-4]) and max(one or 0.0 for one in mismatches) < 1e-4


@pytest.mark.slow
@pytest.mark.anyio
async def test_rollouts_go_on_while_weights_are_exported_to_a_server(tmp_path: Path) -> None:
    place = tmp_path / "model"
    policy().save(place)
    async with standin(place) as (url, server):
        given: dict[str, Any] = {"learner": {"fsdp": 2}, "sampler": {"vllm": url}, "device": "cpu"}
        overlapping = algorithm(steps=3, max_staleness=2, temperature=1.0)
        run = trainer(tmp_path, model=place, algorithm=overlapping, dtype="float32", **given)
        result = await run.fit_async(agents.vowels, TASKS)
        assert result.stopped_because == "all steps done"
        assert result.checkpoint is not None
        trained = load_policy(result.checkpoint, device="cpu").model.state_dict()
        for name, tensor in server.sampler.model.state_dict().items():
            assert torch.equal(tensor, trained[name]), name
