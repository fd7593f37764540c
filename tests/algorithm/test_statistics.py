"""Statistics of an evaluation against hand-worked figures, brute force and scipy's own."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.algorithm.measures import mean_interval, paired_p_value, pass_at_k
from agentlightning.errors import ConfigError

SCORES = np.array([(7 * i % 11) / 10 for i in range(60)])  # 0.0, 0.7, 0.3 …, of mean 0.49
DIFFERENCES = np.array([0.5, -0.25, 0.125, 0.75, 0.0, 0.25, -0.125, 0.375, 0.5, -0.5])


@st.composite
def attempts_passed_and_k(draw: st.DrawFn) -> tuple[int, int, int]:
    attempts = draw(st.integers(1, 8))
    return attempts, draw(st.integers(0, attempts)), draw(st.integers(1, attempts))


@given(attempts_passed_and_k())
def test_pass_at_k_is_the_share_of_all_choices_of_k_attempts_with_one_that_passed(drawn: tuple[int, int, int]) -> None:
    attempts, passed, k = drawn
    choices = list(itertools.combinations([True] * passed + [False] * (attempts - passed), k))
    assert pass_at_k(attempts, passed, k) == pytest.approx(sum(map(any, choices)) / len(choices))


@pytest.mark.parametrize("given", [(4, 2, 0), (4, 2, 5), (4, 5, 1), (4, -1, 1)])
def test_what_is_no_such_count_is_refused(given: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="k must be from 1 to the number"):
        pass_at_k(*given)


def test_it_holds_the_mean_about_as_often_as_it_says_where_they_are_few() -> None:
    chance = np.random.default_rng(1)
    found = [mean_interval(chance.normal(size=10), 0.9) for _ in range(200)]
    held = sum(low <= 0 <= high for low, high in filter(None, found))
    assert 0.82 <= held / 200 <= 0.95


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=12))
def test_it_lies_among_the_values_around_their_mean_and_is_the_same_every_time(values: list[float]) -> None:
    array = np.array(values)
    interval = mean_interval(array, 0.95)
    assert interval is not None
    low, high = interval
    assert min(values) - 1e-9 <= low <= array.mean() + 1e-9
    assert array.mean() - 1e-9 <= high <= max(values) + 1e-9
    assert mean_interval(array, 0.95) == interval


def test_of_one_task_there_is_none() -> None:
    assert mean_interval(np.array([0.5]), 0.95) is None
    with pytest.raises(ConfigError, match=r"above 0 and below 1, such as 0\.95"):
        mean_interval(SCORES, 95)


def test_scipy_finds_the_same() -> None:
    """Version 1.17.1: `bootstrap(…, method="percentile")` and `permutation_test(…, permutation_type="samples")`."""
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


def test_of_many_tasks_it_is_drawn_and_never_nothing() -> None:
    drawn = paired_p_value(np.concatenate([DIFFERENCES, np.zeros(10)]))  # zeros change no sum
    assert drawn == pytest.approx(paired_p_value(DIFFERENCES), abs=0.02)
    assert paired_p_value(np.ones(40)) == 1 / 10_001
