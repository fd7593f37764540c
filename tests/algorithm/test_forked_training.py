"""Trainings that fork the rollouts of a group before they train on it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

import agentlightning as agl
from agentlightning.algorithm.rl.batch import recorded_batches
from agentlightning.dashboard.views import Sources
from agentlightning.data.recordings import finished_rollouts, recorded_groups, whole_group
from agentlightning.data.transitions import TracedRollout
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
def test_a_group_is_trained_with_the_forks_group_its_rollouts(
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
        # of a rollout that was imported, no group is stored
        alone = msgspec.structs.replace(rollout, group_id="none")
        shown = await Sources(store, None, None, "").compared_with(alone)
        assert [one.rollout.rollout_id for one in shown.traced] == [rollout.rollout_id]


@pytest.mark.slow
@pytest.mark.parametrize("killed_at", range(7, 17, 3))
def test_forks_group_a_killed_training_are_trained_once_it_is_resumed(
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


class Varying:
    """An agent whose every second rollout asks something of its own."""

    def __init__(self) -> None:
        self.rollouts = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Varying:
        return self

    async def __call__(self, task: dict, llm: agl.LLM) -> float:
        self.rollouts += 1
        asked = {**task, "word": f"{task['word']} {self.rollouts}"}
        return await agents.vowels(asked, llm)


@pytest.mark.parametrize("unrewarded", ["exclude", 0.0])
def test_forks_that_ask_something_else_are_left_out_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], unrewarded: Any
) -> None:
    forking = algorithm(steps=1, **FORKING, unrewarded=unrewarded)
    result = trainer(tmp_path, algorithm=forking).fit(Varying(), TASKS)
    assert flow(result, "forks") == flow(result, "forks_lost") == [12]
    in_store = rollouts_of(tmp_path / "run", lambda one: one.source is None)
    rewards = [rollout.reward for rollout in in_store]
    assert flow(result, "reward") == [pytest.approx(sum(rewards) / len(rewards))]
    assert "12 of 12 forks ended before their call" in capsys.readouterr().err


def test_it_is_said_that_no_rollout_has_the_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forking = algorithm(steps=2, **{**FORKING, "forks": (1000,)})
    trainer(tmp_path, algorithm=forking).fit(vowels, TASKS)
    assert capsys.readouterr().err.count("no rollout has a call that is to be forked") == 1


class Last(agl.GRPO):
    """Forks the second call of even tasks."""

    wrong: ClassVar[Any] = None

    def calls_to_fork(self, rollout: TracedRollout) -> Any:
        even = rollout.rollout.input["index"] % 2 == 0
        return self.wrong or ([1] if even else [])


def test_an_algorithm_chooses_the_calls(tmp_path: Path) -> None:
    own = {name: value for name, value in FORKING.items() if name != "forks"}
    with pytest.raises(ConfigError, match="give returns='fork' or 'tree'"):
        Last(steps=1)
    forking = Last(steps=1, tasks_per_step=4, max_tokens=6, **own)
    trainer(tmp_path, algorithm=forking).fit(agents.vowels, TASKS)
    forks = rollouts_of(tmp_path / "run", lambda one: one.source is not None)
    assert forks and all(fork.input["index"] % 2 == 0 for fork in forks)
    for wrong in (["1"], [-1], 3):
        Last.wrong = wrong
        with pytest.raises(ConfigError, match="give indices of calls"):
            trainer(tmp_path, run_dir=tmp_path / str(wrong), algorithm=forking).fit(
                agents.vowels, TASKS
            )
    Last.wrong = None


@pytest.mark.slow
def test_a_training_that_is_resumed_with_other_forks_trains_those_it_had_begun(
    tmp_path: Path,
) -> None:
    run, left = tmp_path / "run", tmp_path / "left"
    settings = {**FORKING, "steps": 1, "tasks_per_step": 1}
    trainer(tmp_path, algorithm=algorithm(**settings)).fit(
        Killed(agents.vowels, 4, run, left), TASKS
    )
    other = algorithm(**{**settings, "forks": (1,)})
    trainer(tmp_path, run_dir=left, algorithm=other).fit(agents.vowels, TASKS, resume=True)
    assert [len(group) for group in recorded_batches(left)[1].groups] == [6]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"forks": (-1,)}, "give indices of calls"),
        ({"forks": ("1",)}, "give indices of calls"),
        ({"returns": "identical"}, "give returns='fork' or 'tree'"),
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
