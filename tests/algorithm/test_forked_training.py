"""Trainings that fork the rollouts of a group before they train on it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.algorithm.rl.batch import recorded_batches
from agentlightning.dashboard.views import Sources
from agentlightning.data.recordings import finished_rollouts, recorded_groups, whole_group
from agentlightning.errors import ConfigError
from agentlightning.rewards import RelativeJudge
from agentlightning.store.sql import SqlStore
from tests import agents
from tests.algorithm.test_groups import flow
from tests.algorithm.test_resume import Killed, rollouts_of
from tests.test_trainer import TASKS, algorithm, trainer

FORKING: dict[str, Any] = {
    "returns": "fork",
    "baseline": "none",
    "aggregation": "constant",
    "constant_length": 16,
    "group_size": 2,
    "forks": (1, 1),
}


async def vowels(task: dict, llm: agl.LLM) -> float:
    """Every third task takes one call, so that call 1 cannot be forked."""
    turns = 1 if task["index"] % 3 == 0 else 2
    answer = await agents.ask(task, llm, turns=turns)
    return sum(letter in "aeiou" for letter in answer) / max(1, len(answer))


@asynccontextmanager
async def opened(run: Path) -> AsyncIterator[SqlStore]:
    store = await SqlStore.open(run / "store.sqlite")
    yield store
    await store.close()


async def forked_groups(run: Path) -> list[list[str]]:
    async with opened(run) as store:
        return [
            [recorded.rollout.rollout_id for recorded in group]
            async for group in recorded_groups(store, finished_rollouts())
        ]


@pytest.mark.parametrize("flowing", [{}, {"max_staleness": 1}])
def test_a_group_is_trained_with_the_forks_of_its_rollouts(
    tmp_path: Path, flowing: dict[str, Any]
) -> None:
    forking = algorithm(steps=3, **FORKING, **flowing)
    result = trainer(tmp_path, algorithm=forking).fit(vowels, TASKS)
    run = tmp_path / "run"
    batches = recorded_batches(run)
    for step, rollouts in enumerate(flow(result, "rollouts"), 1):
        groups = batches[step].groups
        assert rollouts == sum(map(len, groups))
        for group in groups:
            forks = [name for name in group if "-forks-" in name]
            assert len(forks) in (0, 2 * 2)
            assert len(group) == 2 + len(forks)
    assert any(len(group) == 6 for group in batches[1].groups)
    in_store = {rollout.rollout_id: rollout for rollout in rollouts_of(run, lambda one: True)}
    forks = [rollout for rollout in in_store.values() if rollout.source]
    assert forks
    for fork in forks:
        source = in_store[fork.source.rollout_id]
        assert (fork.source.at, fork.status) == (1, "succeeded")
        assert fork.group_id == f"{source.group_id}-forks"
    samples = [rollout.metadata["sample"] for rollout in in_store.values()]
    assert len(set(samples)) == len(samples)


@pytest.mark.anyio
async def test_readers_of_a_store_see_a_group_with_its_forks(tmp_path: Path) -> None:
    await trainer(tmp_path, algorithm=algorithm(steps=1, **FORKING)).fit_async(vowels, TASKS)
    run = tmp_path / "run"
    trained = {frozenset(group) for group in recorded_batches(run)[1].groups}
    assert {frozenset(group) for group in await forked_groups(run)} == trained
    largest = max(trained, key=len)
    async with opened(run) as store:
        for name in largest:
            rollout = await store.get_rollout_by_id(name)
            assert rollout is not None and rollout.group_id is not None
            whole = await whole_group(store, rollout.group_id)
            assert whole is not None and set(whole.rollout_ids) == largest
            shown = await Sources(store, None, None, "").compared_with(rollout)
            assert {one.rollout.rollout_id for one in shown.traced} == largest
        assert await whole_group(store, "none") is None


@pytest.mark.slow
@pytest.mark.parametrize("killed_at", range(7, 17, 3))
def test_forks_of_a_killed_training_are_trained_once_it_is_resumed(
    tmp_path: Path, killed_at: int
) -> None:
    settings = {**FORKING, "steps": 2}
    run, left = tmp_path / "run", tmp_path / "left"
    trainer(tmp_path, algorithm=algorithm(**settings)).fit(
        Killed(vowels, killed_at, run, left), TASKS
    )
    resumed = trainer(tmp_path, run_dir=left, algorithm=algorithm(**settings), time_limit=60.0)
    assert resumed.fit(vowels, TASKS, resume=True).stopped_because == "all steps done"
    assert not rollouts_of(left, lambda one: one.status != "succeeded")
    trained = [
        [batch.groups for batch in recorded_batches(place).values()] for place in (run, left)
    ]
    assert trained[0] == trained[1]
    assert {len(group) for groups in trained[0] for group in groups} == {2, 6}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"returns": "identical"}, "give returns='fork' or 'tree'"),
        ({"forks": (-1,)}, "indices of calls"),
        ({"forks": ("1",)}, "forks"),
        ({"reward": agl.RewardSpec(length_penalty=0.1)}, "compare whole rollouts"),
        (
            {"judge": RelativeJudge(agl.LLM(endpoint="http://localhost", model="judge"), "good")},
            "compare whole rollouts",
        ),
    ],
)
def test_settings_that_forks_would_spoil_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        algorithm(**{**FORKING, **changed})
    algorithm(**{**FORKING, "group_size": 1})
