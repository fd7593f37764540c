"""What the loop decides by itself: which tasks, which checkpoints, which directory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.algorithm import GRPO, PPO, SFT, Reinforcement
from agentlightning.algorithm.directory import run_directory
from agentlightning.algorithm.rl.batch import minibatches
from agentlightning.algorithm.rl.job import Checkpoints, LoopState
from agentlightning.algorithm.rl.sampling import TaskSampler
from agentlightning.data.sequences import CreditedTransition
from agentlightning.errors import ConfigError
from agentlightning.trainer import Trainer
from tests.transitions import group_of


def taken(sampler: TaskSampler, count: int) -> list[Any]:
    return [sampler.task(*sampler.take()) for _ in range(count)]


def test_an_epoch_shows_every_task_once_and_the_next_in_another_order() -> None:
    tasks = list(range(10))
    sampler = TaskSampler(tasks, seed=1)
    first, second = taken(sampler, 10), taken(sampler, 10)
    assert sorted(first) == sorted(second) == tasks
    assert first != second
    assert taken(TaskSampler(tasks, seed=1), 20) == first + second
    assert taken(TaskSampler(tasks, seed=2), 10) != first


def test_a_curriculum_orders_each_epoch() -> None:
    easy_first = TaskSampler(
        ["hard", "easy"], 0, curriculum=lambda tasks, epoch: [1] if epoch == 0 else [1, 0]
    )
    assert taken(easy_first, 4) == ["easy", "easy", "hard", "easy"]
    with pytest.raises(ConfigError, match="returned \\[2\\] for epoch 0; give indices of 2 tasks"):
        taken(TaskSampler(["a", "b"], 0, curriculum=lambda tasks, epoch: [2]), 1)


def test_a_task_that_is_too_easy_is_left_out_of_the_next_epoch_and_then_tried_again() -> None:
    sampler = TaskSampler(["a", "b"], seed=0, difficulty=(0.1, 0.9))
    for _ in range(2):
        position, _ = sampler.take()
        sampler.report(position, 1.0 if sampler.task(position) == "a" else 0.5)
    assert taken(sampler, 1) == ["b"]
    assert sorted(taken(sampler, 2)) == ["a", "b"]


class Weights:
    """A learner whose weights are one line of text."""

    def __init__(self) -> None:
        self.text = ""

    def save(self, directory: Path, resumable: bool = True) -> None:
        (directory / "weights").write_text(self.text)

    def load(self, directory: Path) -> None:
        self.text = (directory / "weights").read_text()


def saved(tmp_path: Path, *steps: int) -> Checkpoints:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    learner = Weights()
    for step in steps:
        learner.text = f"weights of step {step}"
        checkpoints.save(learner, LoopState(step=step, policy_version=step))  # type: ignore[arg-type]
    return checkpoints


def test_the_newest_checkpoint_is_restored_and_the_last_two_are_kept(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 2, 4, 10)
    learner = Weights()
    assert checkpoints.restore(learner) == LoopState(step=10, policy_version=10)  # type: ignore[arg-type]
    assert learner.text == "weights of step 10"
    assert sorted(path.name for path in checkpoints.directory.iterdir()) == [
        "step-000004",
        "step-000010",
    ]


def test_a_checkpoint_that_was_being_written_when_the_process_died_does_not_count(
    tmp_path: Path,
) -> None:
    checkpoints = saved(tmp_path, 2)
    half = checkpoints.directory / ".step-000004.partial"
    half.mkdir()
    (half / "weights").write_text("half")
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.name == "step-000002"
    saved(tmp_path, 4)
    assert not half.exists()


def test_a_directory_serves_one_process_at_a_time(tmp_path: Path) -> None:
    with (
        run_directory(tmp_path / "run", "grpo", named=True, resume=False),
        pytest.raises(ConfigError, match="another process"),
        run_directory(tmp_path / "run", "grpo", named=True, resume=True),
    ):
        pass


def test_resuming_finds_the_newest_run_of_the_kind(tmp_path: Path) -> None:
    with run_directory(tmp_path, "grpo", named=False, resume=False) as first:
        pass
    with run_directory(tmp_path / "other", "baseline", named=True, resume=False):
        pass
    with run_directory(tmp_path, "grpo", named=False, resume=True) as found:
        assert found.path == first.path
        assert found.mark == first.mark
    with (
        pytest.raises(ConfigError, match="no apo run"),
        run_directory(tmp_path, "apo", named=False, resume=True),
    ):
        pass


def test_settings_out_of_range_are_refused_by_name() -> None:
    for wrong in (
        {"steps": 0},
        {"tasks_per_step": 0},
        {"temperature": 2.5},
        {"evaluate_every": -1},
        {"clip_low": 0.0},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong)).split("_")[0]):
            GRPO(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="unrewarded"):
        GRPO(unrewarded=math.nan)
    with pytest.raises(ConfigError, match="level is 'trees'; known: transition, trajectory, tree"):
        GRPO(level="trees")  # type: ignore[arg-type]


def constant(value: Any) -> type[GRPO]:
    class Constant(GRPO):
        def advantages(self, groups: Any) -> Any:
            return value(super().advantages(groups))

    return Constant


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: GRPO(dynamic_sampling=True, baseline="reinforce++"), "learns from any group"),
        (lambda: PPO(dynamic_sampling=True), "learns from any group"),
        (lambda: GRPO(loss="policy_gradient", max_staleness=4), "older ones may have"),
        (lambda: SFT(old="proximal"), "leave it out"),
    ],
)
def test_what_can_do_nothing_is_refused_when_it_is_made(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        (type("Empty", (Reinforcement,), {}), "Empty does not define advantages"),
        (
            type("Odd", (GRPO,), {"advantages": lambda self, batch: []}),
            "Odd.advantages has the parameter 'batch', which nothing fills: .*groups",
        ),
    ],
)
def test_a_class_that_lacks_what_its_run_calls_is_refused_before_anything_is_loaded(
    algorithm: Any, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Trainer(algorithm=algorithm())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            constant(lambda credited: credited[:1]),
            r"of groups of \[2, 2\] rollouts.*returned lists for \[2\]",
        ),
        (constant(lambda credited: None), "a list for each rollout of each group.*returned None"),
        (
            constant(lambda credited: [[[1.0] for _ in group] for group in credited]),
            r"Transition.*returned 1\.0",
        ),
        (
            constant(
                lambda credited: [[[worth(item, int)] for item, *_ in group] for group in credited]
            ),
            "finite float.*array",
        ),
        (
            constant(
                lambda credited: [[[worth(item, 9)] for item, *_ in group] for group in credited]
            ),
            "finite float",
        ),
        (
            constant(lambda credited: 1 / 0),
            r"Constant.advantages failed: ZeroDivisionError: .*\(.*test_loop\.py:\d+\)",
        ),
    ],
)
def test_what_advantages_returns_is_checked_at_each_call(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make().credited([group_of(0.0, 1.0), group_of(1.0, 0.0)])


def worth(item: CreditedTransition, what: Any) -> CreditedTransition:
    """Integers, or a number too many."""
    values = item.advantages.astype(int) if what is int else np.ones(what, np.float32)
    return CreditedTransition(item.transition, values)


def best_of_group(returns: Any) -> Any:
    return returns.values - returns.per_group(np.max)[returns.rollouts]


@pytest.mark.parametrize(
    "algorithm",
    [GRPO(), GRPO(baseline=best_of_group), GRPO(baseline="reinforce++_baseline"), SFT()],
)
def test_a_group_whose_rewards_are_equal_is_of_no_use_whatever_the_baseline(algorithm: Any) -> None:
    assert algorithm.why_useless(group_of(0.3, 0.3, 0.3)) == "without variance"
    assert algorithm.why_useless(group_of(0.3, 0.3, 0.4)) is None
    assert GRPO(baseline="reinforce++").why_useless(group_of(0.3, 0.3, 0.3)) is None


def test_a_kl_term_needs_a_reference_and_has_a_weight_where_there_is_one() -> None:
    with pytest.raises(ConfigError, match="reference=True"):
        GRPO(kl_coefficient=0.1)
    assert GRPO().make_loss().kl_coefficient == 0.0
    assert GRPO(reference=True).make_loss().kl_coefficient == 0.04
    assert GRPO(reference=True, kl_coefficient=0.0).make_loss().kl_coefficient == 0.0


@given(st.integers(1, 40), st.integers(1, 9))
def test_a_step_makes_as_many_optimiser_steps_as_it_was_asked_for(
    sequences: int, count: int
) -> None:
    parts = minibatches(range(sequences), count, seed=1, step=2)
    sizes = list(map(len, parts))
    assert len(parts) == min(count, sequences) and max(sizes) - min(sizes) <= 1
    assert sorted(number for part in parts for number in part) == list(range(sequences))
