"""Budgets of trainings and evaluations: where they stop, and what they count."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import ConfigError
from tests import agents
from tests.test_trainer import TASKS, algorithm, trainer


async def rollouts_of(result: agl.FitResult) -> int:
    store = await agl.SqlStore.open(result.directory / "store.sqlite")
    try:
        return len(await store.query_rollouts())
    finally:
        await store.close()


@pytest.mark.parametrize("settings", [{}, {"max_staleness": 2}])
def test_a_training_stops_before_it_exceeds_its_budget_and_goes_on_with_a_larger_one(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Each step takes 12 rollouts, each evaluation 2."""
    for limit in (30, 54):
        chosen = algorithm(steps=6, budget=agl.Budget(rollouts=limit), **settings)
        result = trainer(tmp_path, algorithm=chosen, resume=limit > 30).fit(
            agents.vowels, TASKS, TASKS[:2]
        )
        assert result.stopped_because.startswith(f"the budget is {limit} rollouts: ")
        assert asyncio.run(rollouts_of(result)) <= limit
        assert result.evaluations[-1].step == result.metrics[-1].step > 0
    assert result.metrics[-1].values["tokens"] > 0
    if not settings:
        assert [evaluation.step for evaluation in result.evaluations] == [0, 4]


def test_a_budget_that_leaves_nothing_to_train_is_refused(tmp_path: Path) -> None:
    chosen = algorithm(steps=2, budget=agl.Budget(rollouts=15))
    with pytest.raises(ConfigError, match=r"before and after take 2 rollouts each and a step 12"):
        trainer(tmp_path, algorithm=chosen).fit(agents.vowels, TASKS, TASKS[:2])


def test_hours_end_a_training(tmp_path: Path) -> None:
    chosen = algorithm(steps=500, budget=agl.Budget(hours=1e-3))
    result = trainer(tmp_path, algorithm=chosen).fit(agents.vowels, TASKS)
    assert result.stopped_because == "the budget is 0.001 hours: they are over"
    assert 0 < result.metrics[-1].step < 500


@pytest.mark.parametrize(
    ("budget", "reason", "run"),
    [
        ({"rollouts": 11}, "the budget is 11 rollouts: 10 are done, the next need 2", 5),
        ({"tokens": 1}, "the budget is 1 tokens: ", 8),
    ],
)
def test_an_evaluation_within_a_budget_reports_the_tasks_that_were_run(
    tmp_path: Path, budget: dict[str, Any], reason: str, run: int
) -> None:
    tasks = TASKS * 3
    for resume in (False, True):
        measuring = agl.Baseline(samples=2, budget=agl.Budget(**budget))
        result = trainer(tmp_path, algorithm=measuring, resume=resume).fit(
            agents.vowels, TASKS[:1], tasks
        )
        assert result.stopped_because.startswith(reason)
        assert result.stopped_because.endswith(f"{run} of {len(tasks)} tasks were run")
        assert len(result.evaluations[0].tasks) == 2 * run


@pytest.mark.anyio
async def test_dollars_are_counted_by_the_price_of_each_model(tmp_path: Path) -> None:
    given = {"llm": agl.LLM(endpoint="http://127.0.0.1:9/v1", model="hosted")}
    with pytest.raises(ConfigError, match="price of 'hosted' is unknown"):
        await agl.Trainer(
            algorithm=agl.Baseline(budget=agl.Budget(usd=1.0)),
            run_dir=tmp_path / "run",
            initial_resources=given,
            progress=False,
        ).fit_async(agents.vowels, TASKS[:1], TASKS)
