"""Imitating the best of the policy's own rollouts."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import agentlightning as agl
from agentlightning.algorithm.rl.batch import BATCHES_FILE, RecordedBatch
from agentlightning.cli.main import run
from agentlightning.data.credit import RewardedGroup
from agentlightning.data.sequences import TrainingSequence
from agentlightning.data.transitions import Transition
from agentlightning.errors import ConfigError, TrainingError
from agentlightning.learner.policy import Policy
from agentlightning.learner.tiny import make_model, make_tokenizer
from agentlightning.learner.torch import TorchLearner
from agentlightning.store.sql import SqlStore
from agentlightning.trainer import FitResult
from tests import agents
from tests.test_trainer import TASKS, policy, trainer
from tests.test_trainer import algorithm as grpo

ONE = np.ones(2, np.int32)


def group(*rewards: float) -> RewardedGroup:
    call = Transition("r", "a", "s", 0, 0, "policy", ONE, ONE, np.zeros(2, np.float32), ONE, "stop")
    return RewardedGroup([[call, call] for _ in rewards], list(rewards))


def kept(algorithm: agl.SFT, *groups: RewardedGroup) -> list[list[bool]]:
    """Of each group, which rollouts are trained; all tokens of all calls of those, with weight
    1."""
    credited = algorithm.advantages(groups)
    assert all(
        (one.advantages == 1).all()
        for members in credited
        for rollout in members
        for one in rollout
    )
    assert all(len(rollout) in (0, 2) for members in credited for rollout in members)
    return [[bool(rollout) for rollout in members] for members in credited]


def test_the_best_of_each_group_is_kept() -> None:
    assert kept(agl.SFT(), group(0, 1, 0.5), group(3, 2, 3)) == [
        [False, True, False],
        [True, False, False],
    ]
    assert kept(agl.SFT(best=2), group(0, 1, 0.5)) == [[False, True, True]]


def test_of_equals_no_more_are_kept_than_the_fraction_says() -> None:
    assert kept(agl.SFT(best=None, fraction=0.5), group(1, 0, 0, 0)) == [[True, True, False, False]]
    assert kept(agl.SFT(best=None, fraction=0.5, threshold=1), group(1, 0, 0, 0)) == [
        [True, False, False, False]
    ]
    assert (
        kept(agl.SFT(fraction=0.25), group(1, 0, 1, 0), group(1, 0, 1, 0))
        == [[True, False, False, False]] * 2
    )


def test_a_threshold_keeps_all_that_reach_it() -> None:
    assert kept(agl.SFT(best=None, threshold=0.5), group(1, 0, 0.5, 0)) == [
        [True, False, True, False]
    ]
    assert kept(agl.SFT(best=2, threshold=1), group(1, 0, 0.5, 0)) == [[True, False, False, False]]


RECORDED: dict[str, Any] = {"steps": 2, "tasks_per_step": 2, "max_tokens": 6, "temperature": 2.0}


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of three groups of four, and of held-out rollouts."""
    directory = tmp_path_factory.mktemp("earlier")
    trainer(directory, algorithm=grpo(steps=1)).fit(agents.vowels, TASKS, TASKS[:2])
    return directory / "run"


def batches(directory: Path) -> list[RecordedBatch]:
    lines = (directory / BATCHES_FILE).read_bytes().splitlines()
    return [msgspec.json.decode(line, type=RecordedBatch) for line in lines]


def test_recorded_rollouts_are_imitated_without_new_ones(
    tmp_path: Path, earlier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[TrainingSequence] = []
    step = TorchLearner.step

    def listening_step(self: Any, batch: Any, *rest: Any) -> Any:
        trained.extend(batch)
        return step(self, batch, *rest)

    monkeypatch.setattr(TorchLearner, "step", listening_step)
    result = trainer(tmp_path, algorithm=agl.SFT(traces=str(earlier), **RECORDED)).fit(
        agents.vowels
    )
    assert [one.step for one in result.metrics] == [1, 2] and result.checkpoint is not None
    # versions of the other run
    assert all("inference_mismatch" not in one.values for one in result.metrics)
    (first, second) = batches(result.directory)
    (whole,) = batches(earlier)
    # two of three, then the third and one of the next pass
    assert {*first.groups, *second.groups} == {*whole.groups}
    sampled = asyncio.run(tokens_of(earlier))
    for sequence in trained:
        for number in np.unique(sequence.transitions):
            own = sequence.positions[sequence.transitions == number]
            assert (tuple(sequence.token_ids[: own[0]]), tuple(sequence.token_ids[own])) in sampled
    assert not asyncio.run(rollouts_of(tmp_path / "run"))


async def tokens_of(directory: Path) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    store = await SqlStore.open(directory / "store.sqlite")
    spans = [
        span
        for one in await store.query_rollouts()
        for span in await store.query_spans(one.rollout_id)
    ]
    await store.close()
    captured = [span.tokens for span in spans if span.tokens is not None]
    return {(tuple(one.prompt_token_ids), tuple(one.choices[0].token_ids)) for one in captured}


async def rollouts_of(directory: Path) -> list[str]:
    store = await SqlStore.open(directory / "store.sqlite")
    found = [one.rollout_id for one in await store.query_rollouts()]
    await store.close()
    return found


def test_a_run_on_recorded_rollouts_is_measured_resumed_and_replayed(
    tmp_path: Path, earlier: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fit(steps: int, resume: bool = False) -> FitResult:
        algorithm = agl.SFT(
            traces=str(earlier), **RECORDED | {"steps": steps, "checkpoint_every": 1}
        )
        return trainer(tmp_path, model=str(start), algorithm=algorithm).fit(
            agents.vowels, val_dataset=TASKS[:2], resume=resume
        )

    start = tmp_path / "start"
    policy().save(start)
    fit(1)
    result = fit(3, resume=True)
    assert [one.step for one in result.evaluations] == [0, 3]
    visited = [group for batch in batches(result.directory) for group in batch.groups]
    assert len(set(visited[:3])) == 3  # the second step went on where the first had ended
    assert run(["replay", str(result.directory), "--steps", "3"]) == 0
    assert "bit for bit" in capsys.readouterr().out


def test_a_run_that_was_stopped_while_it_learned_goes_through_all_groups_all_the_same(
    tmp_path: Path, earlier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(**more: Any) -> FitResult:
        algorithm = agl.SFT(traces=str(earlier), **RECORDED | {"steps": 3, "tasks_per_step": 1})
        return trainer(tmp_path, algorithm=algorithm).fit(agents.vowels, **more)

    step = TorchLearner.step

    def interrupted_step(self: Any, *given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return step(self, *given)

    with monkeypatch.context() as patched:
        patched.setattr(TorchLearner, "step", interrupted_step)
        assert fit().stopped_because == "stopped by the user"
    result = fit(resume=True)
    visited = [group for batch in batches(result.directory) for group in batch.groups]
    assert [one.step for one in result.metrics] == [1, 2, 3] and len(set(visited)) == 3


def refusal(tmp_path: Path, kind: type[Exception], algorithm: agl.SFT, **changes: Any) -> str:
    with pytest.raises(kind) as caught:
        trainer(tmp_path, algorithm=algorithm, **changes).fit(agents.vowels)
    assert not list((tmp_path / "run").glob("checkpoints/*"))
    return str(caught.value)


def test_where_nothing_is_kept_the_error_says_what_there_was(tmp_path: Path, earlier: Path) -> None:
    told = refusal(tmp_path / "a", TrainingError, agl.SFT(traces=str(earlier), threshold=2.0))
    assert "none is kept for policy: 12 trainable" in told and "Nothing was trained" in told
    told = refusal(tmp_path / "b", TrainingError, agl.SFT(traces=str(earlier)), model_name="writer")
    assert "24 calls left out (other model). Their model is called policy: give model_name" in told
    told = refusal(
        tmp_path / "c", TrainingError, agl.SFT(traces=str(earlier), traces_run="nobody's")
    )
    assert "there is none" in told


def test_ids_that_another_tokenizer_made_are_refused(tmp_path: Path, earlier: Path) -> None:
    fewer = make_tokenizer(["a b c"], 270)
    told = refusal(
        tmp_path / "a",
        ConfigError,
        agl.SFT(traces=str(earlier)),
        model=Policy(make_model(fewer, seed=0), fewer),
    )
    assert "which the model's tokenizer (" in told and "agl export --format sft" in told
    other = make_tokenizer(["".join(pair) for pair in itertools.product("zqxjvk", repeat=4)], 400)
    told = refusal(
        tmp_path / "b",
        ConfigError,
        agl.SFT(traces=str(earlier)),
        model=Policy(make_model(other, seed=0), other),
    )
    assert "do not contain what was asked, as the tokenizer of policy reads them" in told


def test_what_cannot_be_said_of_recorded_rollouts_is_refused(tmp_path: Path, earlier: Path) -> None:
    with pytest.raises(ConfigError, match="budget is for new rollouts"):
        agl.SFT(traces=str(earlier), budget=agl.Budget(rollouts=9))
    with pytest.raises(ConfigError, match="max_staleness is for new rollouts"):
        agl.SFT(traces="x", max_staleness=2)
    with pytest.raises(ConfigError, match="also give traces, the store"):
        agl.SFT(traces_run="r")
    assert agl.SFT(traces="x", group_size=1).traces == str(Path("x").absolute())
    assert "there is no store at" in refusal(tmp_path, ConfigError, agl.SFT(traces=str(tmp_path)))
    with pytest.raises(ConfigError, match="traces replace the training dataset"):
        trainer(tmp_path / "t", algorithm=agl.SFT(traces=str(earlier))).fit(agents.vowels, TASKS)
    with pytest.raises(ConfigError, match="give a training dataset"):
        trainer(tmp_path / "u").fit(agents.vowels)
