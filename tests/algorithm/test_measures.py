"""What rollouts come to: means over tasks, pass@k, tags, and two evaluations compared."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.algorithm.measures import (
    Ended,
    Measured,
    Measures,
    compare,
    mean_interval,
    measured,
    paired_p_value,
    pass_at_k,
    summarise,
)
from agentlightning.data.rewards import NOT_FINITE
from agentlightning.data.transitions import TracedRollout
from agentlightning.errors import ConfigError
from agentlightning.types import Rollout


def of(
    task: str, *rewards: float | None, tags: tuple[str, ...] = (), ended: Ended | None = None
) -> list[Measured]:
    return [
        Measured(
            f"{task}-{number}",
            task,
            frozenset(tags),
            reward,
            ended or ("failed" if reward is None else "rewarded"),
        )
        for number, reward in enumerate(rewards)
    ]


def values(rollouts: list[Measured], **asked: Any) -> dict[str, float]:
    return {
        name: estimate.value
        for name, estimate in summarise(rollouts, Measures(**asked)).estimates.items()
    }


def test_two_tasks_worked_by_hand() -> None:
    rollouts = [*of("hard", 1, 0, 0, 0), *of("easy", 1, 1, 1, 1)]
    assert values(rollouts, ks=(1, 2, 4)) == {
        "reward": 0.625,
        "pass@1": 0.625,
        "pass@2": 0.75,
        "pass@4": 1.0,
    }
    assert list(values(rollouts)) == ["reward", "pass@1", "pass@4"]  # without ks


def test_failing_counts_nothing_and_passes_nothing_and_is_distinct() -> None:
    rollouts = [*of("a", None, 0.5), *of("b", None, ended="no reward")]
    summary = summarise(rollouts, Measures(threshold=-1.0))
    assert summary.ended == {"failed": 1, "rewarded": 1, "no reward": 1}
    assert values(rollouts, threshold=-1.0) == {"reward": 0.125, "pass@1": 0.25}


def test_what_was_cancelled_or_is_not_over_is_left_out() -> None:
    assert values([*of("a", 1), *of("a", None, ended="left out")]) == {"reward": 1.0, "pass@1": 1.0}
    with pytest.raises(ConfigError, match="of 1 rollouts none succeeded or failed"):
        summarise(of("a", None, ended="left out"), Measures())


def rollout(given: Any, status: Any = "succeeded", **metadata: Any) -> Rollout:
    return Rollout(rollout_id="r", input=given, start_time=0.0, status=status, metadata=metadata)


def test_tags_are_read_from_the_task_and_from_the_rollout() -> None:
    one = rollout({"tags": ["hard", "long"], "kind": "sum", "level": 3}, tags="night")
    assert measured(TracedRollout(one, (), 1.0)).tags == {"hard", "long", "kind=sum", "night"}
    assert measured(TracedRollout(one, (), 1.0), ["level"]).tags == {"level=3"}
    assert measured(TracedRollout(rollout("just text"), (), 1.0)).tags == frozenset()


def test_how_a_rollout_ended_is_reported() -> None:
    crashed = msgspec.structs.replace(rollout(1, "failed"), error="LookupError: no such city")
    failed = measured(TracedRollout(crashed, (), None))
    assert (failed.ended, failed.problem) == ("failed", "LookupError: no such city")
    assert summarise([failed], Measures()).problem == "r: LookupError: no such city"
    for traced, ended in (
        (
            TracedRollout(rollout(1), (), None, rewards_lost=Counter({NOT_FINITE: 1})),
            "not a number",
        ),
        (TracedRollout(rollout(1), (), None), "no reward"),
        (TracedRollout(rollout(1, "cancelled"), (), None), "left out"),
        (TracedRollout(rollout(1, "running"), (), None), "left out"),
    ):
        assert measured(traced).ended == ended


def test_two_are_compared_on_the_tasks_of_both() -> None:
    before = [
        *of("a", 0, 0, tags=("odd",)),
        *of("b", 1, 0),
        *of("c", 0, 0),
        *of("only before", 1, 1),
    ]
    after = [*of("c", 1, 1), *of("a", 1, 0), *of("b", 1, 1)]
    found = compare(before, after, Measures())
    assert (found.unpaired, found.first.tasks, found.second.tasks) == (1, 3, 3)
    assert found.first.estimates["reward"].value == pytest.approx(1 / 6)
    reward = found.differences["reward"]
    assert (reward.value, reward.tasks, reward.p) == (pytest.approx(2 / 3), 3, 2 / 8)
    assert {name: one.value for name, one in found.tags["odd"].items()} == {
        "reward": 0.5,
        "pass@1": 0.5,
        "pass@2": 1.0,
    }
    turned = compare(after, before, Measures()).differences["reward"]
    assert (turned.value, turned.p) == (-reward.value, reward.p)


SCORES = np.array([(7 * i % 11) / 10 for i in range(60)])  # 0.0, 0.7, 0.3 …, of mean 0.49
DIFFERENCES = np.array([0.5, -0.25, 0.125, 0.75, 0.0, 0.25, -0.125, 0.375, 0.5, -0.5])


@st.composite
def attempts_passed_and_k(draw: st.DrawFn) -> tuple[int, int, int]:
    attempts = draw(st.integers(1, 8))
    return attempts, draw(st.integers(0, attempts)), draw(st.integers(1, attempts))


@given(attempts_passed_and_k())
def test_pass_at_k_is_the_share_of_all_choices_of_k_attempts_with_one_that_passed(
    drawn: tuple[int, int, int],
) -> None:
    attempts, passed, k = drawn
    choices = list(itertools.combinations([True] * passed + [False] * (attempts - passed), k))
    assert pass_at_k(attempts, passed, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_of_one_task_there_is_none() -> None:
    assert mean_interval(np.array([0.5]), 0.95) is None
    with pytest.raises(ConfigError, match=r"above 0 and below 1, such as 0\.95"):
        mean_interval(SCORES, 95)


def test_scipy_finds_the_same() -> None:
    """Version 1.17.1: `bootstrap(…, method="percentile")` and
    `permutation_test(…, permutation_type="samples")`."""
    assert mean_interval(SCORES, 0.9) == pytest.approx((0.43333, 0.56833), abs=0.004)
    assert paired_p_value(DIFFERENCES) == 0.25390625
    assert paired_p_value(SCORES - 0.4) == pytest.approx(0.01884, abs=0.004)


def test_one_task_or_no_difference_at_all_proves_nothing() -> None:
    assert paired_p_value(np.array([0.7])) == 1
    assert paired_p_value(np.zeros(5)) == paired_p_value(np.zeros(50)) == 1


@given(st.lists(st.integers(-8, 8), min_size=1, max_size=9))
def test_it_is_the_share_of_all_patterns_of_signs(eighths: list[int]) -> None:
    differences = np.array(eighths) / 8  # whose sums are exact
    patterns = itertools.product((-1, 1), repeat=len(eighths))
    at_least = [abs(np.dot(signs, differences)) >= abs(differences.sum()) for signs in patterns]
    assert paired_p_value(differences) == pytest.approx(np.mean(at_least))
    assert paired_p_value(-differences) == paired_p_value(differences)
