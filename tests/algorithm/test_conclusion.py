"""What a training that did not improve says at its end."""

from __future__ import annotations

import pytest

from agentlightning.algorithm.conclusion import conclusion
from agentlightning.algorithm.evaluation import EvaluatedTask, Evaluation
from agentlightning.types import Metrics, Rollout
from tests.data import recordings
from tests.data.recordings import trace_stored

STEPS = 8


def evaluated(*rewards: float) -> Evaluation:
    tasks = []
    for index, reward in enumerate(rewards):
        rollout = Rollout(
            rollout_id=f"ro-{index}", input=index, start_time=1.0, status="succeeded", end_time=2.0
        )
        spans = (recordings.reward(float(reward)),)
        tasks.append(EvaluatedTask(trace_stored(rollout, spans), spans))
    return Evaluation(0, 0, tuple(tasks))


def steps(start: float, end: float, **values: float) -> list[Metrics]:
    rise = (end - start) / (STEPS - 1)
    rest = {"advantage_zero": 0.1, "learning_rate": 1e-6} | values
    return [
        Metrics(
            run_id="run", step=step + 1, time=1.0, values={"reward": start + step * rise, **rest}
        )
        for step in range(STEPS)
    ]


@pytest.mark.parametrize(
    ("before", "after", "measured", "said"),
    [
        (
            [0, 0, 0, 1],
            [0, 0, 1, 0],
            steps(0.2, 0.2),
            ["did not rise by more than chance", "stayed at 0.200", "1e-06"],
        ),
        (
            [0, 0, 0, 1],
            [0, 1, 0, 0],
            steps(0.2, 0.8),
            ["rose from 0.243 to 0.757", "hold out more"],
        ),
        (
            [1, 1, 1, 0],
            [0, 0, 0, 0],
            steps(0.8, 0.1),
            ["fell (0.750 before, 0.000 after", "a third as large"],
        ),
        (
            [0, 0, 0, 1],
            [0, 0, 0, 1],
            steps(0.2, 0.2, advantage_zero=0.9),
            ["90% of the sampled tokens", "group_size"],
        ),
        ([1, 1, 1, 1], [1, 1, 1, 1], steps(1.0, 1.0), ["solved before"]),
    ],
)
def test_a_training_that_did_not_improve_says_so_with_numbers(
    before, after, measured, said
) -> None:
    text = conclusion([evaluated(*before), evaluated(*after)], measured)
    assert text is not None and all(part in text for part in said), text


def test_the_last_checkpoint_is_not_advised_against_where_it_is_the_best() -> None:
    for after, advised in (([0, 1, 0, 1], False), ([0, 0, 0, 0], True)):
        text = conclusion([evaluated(0, 0, 0, 1), evaluated(*after)], steps(0.8, 0.1))
        assert text is not None and "a third as large" in text
        assert ("not the last" in text) == advised


def test_a_training_that_improved_says_nothing() -> None:
    assert conclusion([evaluated(0, 0, 0, 0), evaluated(1, 1, 1, 1)], steps(0.1, 0.9)) is None
    assert conclusion([evaluated(0, 0)], steps(0.1, 0.9)) is None
