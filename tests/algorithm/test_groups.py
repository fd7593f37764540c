"""Groups on their way: how many may be, how old they may get, and what is done about those of no
use."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import agentlightning as agl
from agentlightning.algorithm.rl.groups import Groups
from agentlightning.errors import TrainingError
from agentlightning.learner.policy import load_policy
from agentlightning.learner.policy_config import AdamW
from agentlightning.learner.torch import TorchLearner
from agentlightning.types import AttemptedRollout
from tests import agents
from tests.test_trainer import TASKS, algorithm, trainer


async def uneven(task: dict, llm: agl.LLM) -> float:
    """Takes now and then a hundred times as long as usually."""
    reward = await agents.vowels(task, llm)
    await asyncio.sleep(0.5 if random.random() < 0.1 else 0.005)
    return reward


def flow(result: Any, name: str) -> list[float]:
    return [metrics.values.get(name, 0.0) for metrics in result.metrics if metrics.step]


@pytest.mark.slow
def test_rollouts_and_steps_overlap_within_the_bound_on_staleness(tmp_path: Path) -> None:
    overlapping = algorithm(steps=6, max_staleness=2, evaluate_every=2)
    result = trainer(tmp_path, algorithm=overlapping, n_runners=16).fit(uneven, TASKS, TASKS[:2])
    assert result.stopped_because == "all steps done"
    assert flow(result, "policy_version") == [1, 2, 3, 4, 5, 6]
    by_age = {age: sum(flow(result, f"staleness/{age}")) for age in range(4)}
    assert by_age[3] == 0
    assert by_age[1] + by_age[2] > 0
    assert sum(by_age.values()) == sum(flow(result, "rollouts"))
    assert [evaluation.step for evaluation in result.evaluations][-1] == 6


def test_calls_of_an_overlapping_run_have_the_probabilities_of_the_weights_that_sampled_them(
    tmp_path: Path,
) -> None:
    """With steps too small to matter, engine and learner agree whatever has been published
    meanwhile."""
    still = AdamW(learning_rate=1e-9)
    result = trainer(tmp_path, algorithm=algorithm(steps=4, max_staleness=1), optimizer=still).fit(
        agents.vowels, TASKS
    )
    assert all(error < 1e-3 for error in flow(result, "max_ratio_error"))


async def solved(task: dict, llm: agl.LLM) -> float:
    """Half of the tasks are always right: nothing is to be learned from them."""
    reward = await agents.vowels(task, llm)
    return 1.0 if task["index"] % 2 else reward


@pytest.mark.slow
@pytest.mark.parametrize("flowing", [{"dynamic_sampling": True}, {"max_staleness": 2}])
def test_a_group_without_variance_is_replaced_by_another(
    tmp_path: Path, flowing: dict[str, Any]
) -> None:
    result = trainer(tmp_path, algorithm=algorithm(steps=3, **flowing)).fit(solved, TASKS)
    assert sum(flow(result, "groups_dropped/without variance")) > 0
    assert flow(result, "groups_without_variance") == [0, 0, 0]
    assert flow(result, "rollouts") == [12, 12, 12]


async def right(task: dict, llm: agl.LLM) -> float:
    await agents.vowels(task, llm)
    return 1.0


@pytest.mark.slow
@pytest.mark.parametrize("flowing", [{"dynamic_sampling": True}, {"max_staleness": 1}])
def test_the_reward_of_a_step_counts_groups_that_were_replaced_for_being_right(
    tmp_path: Path, flowing: dict[str, Any]
) -> None:
    easy = algorithm(steps=9, tasks_per_step=1, group_size=2, target_reward=0.97, **flowing)
    result = trainer(tmp_path, algorithm=easy).fit(right, TASKS)
    assert result.stopped_because == "mean training reward reached 0.97"
    assert flow(result, "reward") == [1, 1, 1]
    assert all(count >= 10 for count in flow(result, "groups_dropped"))
    assert flow(result, "policy_version") == [0, 0, 0]  # such steps are skipped


async def fails_often(task: dict, llm: agl.LLM) -> float:
    reward = await agents.vowels(task, llm)
    if random.random() < 0.4:
        raise RuntimeError("the tool server is gone")
    return reward


@pytest.mark.slow
def test_failures_do_not_use_up_the_room_for_groups(tmp_path: Path) -> None:
    failing = algorithm(steps=8, group_size=2, max_staleness=1)
    result = trainer(tmp_path, algorithm=failing).fit(fails_often, TASKS)
    assert result.metrics[-1].step == 8
    assert sum(flow(result, "groups_dropped/too few rewarded")) > 0


@pytest.mark.slow
def test_what_goes_wrong_beside_a_step_ends_the_run_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, trained = Groups._take_in, Groups.trained

    def failing_later(self: Groups, *given: Any) -> None:
        if self.steps_left < 6:
            raise TrainingError("the store is gone")
        taken(self, *given)

    async def not_before_it_failed(self: Groups, version: int | None) -> None:
        await trained(self, version)
        while self._failure is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    monkeypatch.setattr(Groups, "_take_in", failing_later)
    monkeypatch.setattr(Groups, "trained", not_before_it_failed)
    with pytest.raises(TrainingError, match="the store is gone"):
        trainer(tmp_path, algorithm=algorithm(steps=6, max_staleness=1)).fit(agents.vowels, TASKS)


def test_the_best_weights_are_not_saved_while_a_step_changes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation beside training may end in the middle of a step; what it measured was set aside
    before."""
    step, save = TorchLearner.step, TorchLearner.save
    stepping, during_a_step = threading.Event(), list[bool]()

    def slow_step(self: Any, *given: Any) -> Any:
        stepping.set()
        time.sleep(0.5)
        metrics = step(self, *given)
        stepping.clear()
        return metrics

    def watched_save(self: Any, directory: Path, resumable: bool = True) -> None:
        during_a_step.append(stepping.is_set())
        save(self, directory, resumable=resumable)

    async def best_in_the_middle(task: dict, llm: agl.LLM, rollout: AttemptedRollout) -> float:
        reward = await agents.vowels(task, llm)
        if rollout.mode == "train":
            return reward
        if "-val-1-" not in rollout.rollout_id:
            return 0.5
        await asyncio.to_thread(stepping.wait, 10)
        return 1.0

    monkeypatch.setattr(TorchLearner, "step", slow_step)
    monkeypatch.setattr(TorchLearner, "save", watched_save)
    overlapping = algorithm(steps=2, max_staleness=1, evaluate_every=1)
    trainer(tmp_path, algorithm=overlapping).fit(best_in_the_middle, TASKS, TASKS[:2])
    assert during_a_step and not any(during_a_step)
    best = tmp_path / "run" / "checkpoints" / "best"
    assert '"step":1,' in (best / "loop.json").read_text()
    load_policy(best)
    assert not (best / "optimizer.pt").exists()  # training goes on from the newest


@pytest.mark.slow
def test_groups_that_are_too_old_make_room_although_none_is_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, staleness = TorchLearner.step, Groups.staleness

    def slow_step(self: Any, *given: Any) -> Any:
        time.sleep(0.5)  # all others are complete then
        return step(self, *given)

    def older(self: Groups, traced: Any, ticket: Any) -> int:
        return 9 if self._lineage[-1] > ticket.version == 0 else staleness(self, traced, ticket)

    monkeypatch.setattr(TorchLearner, "step", slow_step)
    monkeypatch.setattr(Groups, "staleness", older)
    overlapping = algorithm(steps=2, tasks_per_step=1, max_staleness=1)
    result = trainer(tmp_path, algorithm=overlapping, time_limit=20.0).fit(agents.vowels, TASKS)
    assert result.stopped_because == "all steps done"
    assert flow(result, "groups_dropped/stale")[1] > 0


@pytest.mark.parametrize("flowing", [{}, {"max_staleness": 2}])
def test_rollouts_of_weights_that_the_run_does_not_descend_from_are_never_fresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flowing: dict[str, Any]
) -> None:
    take_in = Groups._take_in

    def first_by_others(
        self: Groups, name: str, finished: int, rollouts: Any, *judged: Any
    ) -> None:
        first, *others = rollouts
        calls = (
            msgspec.structs.replace(one, versions=np.full_like(one.versions, 99))
            for one in first.transitions
        )
        kept = [replace(first, transitions=tuple(calls)), *others]
        take_in(self, name, finished, kept, *judged)

    monkeypatch.setattr(Groups, "_take_in", first_by_others)
    result = trainer(tmp_path, algorithm=algorithm(**flowing)).fit(agents.vowels, TASKS)
    assert sum(flow(result, "rollouts_dropped/stale")) >= 6
    assert all(count <= 9 for count in flow(result, "rollouts"))
