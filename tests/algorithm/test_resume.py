"""A run that was cut short, wherever it was, goes on as if it had not been; nothing it measured is
made worse by it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.algorithm import evaluation
from agentlightning.algorithm.rl import groups, reinforcement
from agentlightning.algorithm.rl.job import Checkpoints, LoopState
from agentlightning.algorithm.tracking import Tracking
from agentlightning.errors import ConfigError, TrainingError
from agentlightning.learner.torch import TorchLearner
from agentlightning.store.base import LightningStore
from agentlightning.store.sql import SqlStore
from agentlightning.types import Attempt, AttemptedRollout, Rollout
from tests import agents
from tests.algorithm.test_groups import right, solved
from tests.test_trainer import TASKS, algorithm, trainer


class Shared:
    """An agent that counts over all rollouts."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Shared:
        return self


class Interrupting(Shared):
    """An agent during whose n-th rollout of a mode the user presses Ctrl-C."""

    def __init__(self, mode: str, n: int) -> None:
        self.mode, self.left = mode, n

    async def __call__(self, task: dict, llm: agl.LLM, rollout: AttemptedRollout) -> float:
        if rollout.mode == self.mode:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.Event().wait()
        return await agents.vowels(task, llm)


@pytest.mark.anyio
async def test_the_event_loop_neither_writes_weights_nor_reads_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Store, gateway and heartbeats live on it, and a checkpoint may take minutes."""
    threads: dict[str, set[threading.Thread]] = {}

    def watch(owner: Any, name: str) -> None:
        work = getattr(owner, name)

        def watched(*given: Any, **named: Any) -> Any:
            threads.setdefault(name, set()).add(threading.current_thread())
            return work(*given, **named)

        monkeypatch.setattr(owner, name, watched)

    for owner, name in (
        (TorchLearner, "save"),
        (TorchLearner, "load"),
        (reinforcement, "make_batches"),
    ):
        watch(owner, name)
    for module in (groups, evaluation):
        watch(module, "trace_rollout")
    await trainer(tmp_path, algorithm=algorithm(steps=1)).fit_async(agents.vowels, TASKS, TASKS[:1])
    await trainer(tmp_path, algorithm=algorithm(steps=2)).fit_async(
        agents.vowels, TASKS, TASKS[:1], resume=True
    )
    assert threads.keys() == {"save", "load", "make_batches", "trace_rollout"}
    assert threading.main_thread() not in set().union(*threads.values())
    # as gradient steps do
    assert all(one.name.startswith("learner") for one in threads["save"] | threads["load"])


def rollouts_of(run: Path, wanted: Callable[[Rollout], bool]) -> list[Rollout]:
    async def read() -> list[Rollout]:
        store = await SqlStore.open(run / "store.sqlite")
        try:
            return [rollout for rollout in await store.query_rollouts() if wanted(rollout)]
        finally:
            await store.close()

    return asyncio.run(read())


class Killed(Shared):
    """An agent during whose n-th training rollout the power fails: `into` gets what the disk of
    `run` holds then."""

    def __init__(self, agent: Any, n: int, run: Path, into: Path) -> None:
        self.agent, self.left, self.run, self.into = agent, n, run, into

    async def __call__(self, task: dict, llm: agl.LLM, rollout: AttemptedRollout) -> float:
        self.left -= rollout.mode == "train"
        if self.left == 0 and not self.into.exists():
            shutil.copytree(self.run, self.into, ignore=shutil.ignore_patterns("store.sqlite*"))
            store, copy = (
                sqlite3.connect(place / "store.sqlite") for place in (self.run, self.into)
            )
            with closing(store), closing(copy):
                store.backup(copy)
        return await self.agent(task, llm)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "killed_at", "settings"),
    [
        (agents.vowels, 37, {"steps": 4, "checkpoint_every": 2, "evaluate_every": 2}),
        (right, 12, {"steps": 7, "checkpoint_every": 3, "tasks_per_step": 1, "group_size": 2}),
        (solved, 22, {"steps": 1, "dynamic_sampling": True, "tasks_per_step": 8, "group_size": 2}),
    ],
    ids=["during the evaluation", "of steps that taught nothing", "in the place of others"],
)
def test_groups_that_were_complete_when_the_run_was_killed_are_trained(
    tmp_path: Path, agent: Any, killed_at: int, settings: dict[str, Any]
) -> None:
    """Later ones than the next step's too: what they taught was not saved, and nobody reports them
    again."""
    run, left = tmp_path / "run", tmp_path / "left"
    trainer(tmp_path, algorithm=algorithm(**settings)).fit(
        Killed(agent, killed_at, run, left), TASKS, TASKS[:2]
    )
    resumed = trainer(tmp_path, run_dir=left, algorithm=algorithm(**settings), time_limit=60.0)
    assert resumed.fit(agent, TASKS, TASKS[:2], resume=True).stopped_because == "all steps done"
    abandoned = "-v3-"  # what the killed run had begun after a step that it never saved
    assert not rollouts_of(
        left, lambda one: one.status != "succeeded" and abandoned not in one.rollout_id
    )


@pytest.mark.slow
def test_no_call_of_a_resumed_run_is_answered_before_its_weights_are_served_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its runner finds what the killed one left, and waits for nothing."""
    run, left, resume_after = tmp_path / "run", tmp_path / "left", Tracking.resume_after

    async def resume_slowly(self: Tracking, step: int) -> None:
        await asyncio.sleep(1.0)
        await resume_after(self, step)

    settings: dict[str, Any] = {"algorithm": algorithm(steps=2, checkpoint_every=1), "n_runners": 1}
    trainer(tmp_path, **settings).fit(Killed(agents.vowels, 13, run, left), TASKS)
    monkeypatch.setattr(Tracking, "resume_after", resume_slowly)
    result = trainer(tmp_path, run_dir=left, **settings).fit(agents.vowels, TASKS, resume=True)
    assert result.metrics[-1].values["policy_version_oldest"] == 1
    assert result.metrics[-1].values["staleness/0"] == 12


@pytest.mark.slow
@pytest.mark.parametrize(("interrupted_at", "step"), [(2, 0), (6, 1)], ids=["first", "closing"])
def test_an_interrupted_evaluation_is_finished_by_the_resumed_run(
    tmp_path: Path, interrupted_at: int, step: int
) -> None:
    short: dict[str, Any] = {"algorithm": algorithm(steps=1), "n_runners": 1}
    stopped = trainer(tmp_path, **short).fit(Interrupting("val", interrupted_at), TASKS, TASKS[:4])
    assert stopped.stopped_because == "stopped by the user"
    result = trainer(tmp_path, **short).fit(agents.vowels, TASKS, TASKS[:4], resume=True)
    assert [(one.step, one.unrewarded) for one in result.evaluations] == [(0, 0), (1, 0)]
    assert not rollouts_of(tmp_path / "run", lambda rollout: rollout.status != "succeeded")


def test_a_checkpoint_that_finds_no_space_takes_none(tmp_path: Path) -> None:
    class Full:
        def save(self, directory: Path, resumable: bool = True) -> None:
            (directory / "model.safetensors").write_bytes(b"half of it")
            raise OSError(28, "No space left on device")

        def load(self, directory: Path) -> None: ...

    with pytest.raises(ConfigError, match="No space left"):
        Checkpoints(tmp_path).save(Full(), LoopState())
    assert list(tmp_path.iterdir()) == []


def test_a_kill_between_two_renames_loses_neither_checkpoint(tmp_path: Path) -> None:
    class Kept:
        def save(self, directory: Path, resumable: bool = True) -> None: ...
        def load(self, directory: Path) -> None: ...

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save_best(Kept(), LoopState(best_reward=0.5))
    checkpoints.save(Kept(), LoopState(step=1))
    (tmp_path / "best").rename(tmp_path / ".best.replaced")
    state = Checkpoints(tmp_path).restore(Kept())
    assert state is not None and state.best_reward == 0.5
    assert (tmp_path / "best").is_dir()


class Racing(LightningStore):
    """A store in which the attempts of `started_before` end as soon as somebody has looked at
    them."""

    def __init__(self, store: LightningStore, started_before: float) -> None:
        self._store, self._before, self.ended = store, started_before, list[str]()

    async def perform(self, call: Any) -> Any:
        answer = await self._store.perform(call)
        left = (
            isinstance(answer, Attempt) and answer.start_time < self._before and not answer.end_time
        )
        if left and call.method == "get_latest_attempt":
            await self._store.update_attempt(answer.rollout_id, answer.attempt_id, status="failed")
            self.ended.append(answer.attempt_id)
        return answer

    async def close(self) -> None:
        await self._store.close()


@pytest.mark.slow
@pytest.mark.anyio
async def test_an_attempt_that_ends_while_leftovers_are_withdrawn_does_not_end_the_resumed_run(
    tmp_path: Path,
) -> None:
    run, left = tmp_path / "run", tmp_path / "left"
    settings: dict[str, Any] = {"algorithm": algorithm(steps=1), "n_runners": 2}
    await trainer(tmp_path, **settings).fit_async(Killed(agents.slow_vowels, 5, run, left), TASKS)
    store = Racing(await SqlStore.open(left / "store.sqlite"), started_before=time.time())
    resumed = trainer(tmp_path, run_dir=left, store=store, **settings)
    assert (
        await resumed.fit_async(agents.vowels, TASKS, resume=True)
    ).stopped_because == "all steps done"
    await store.close()
    assert store.ended


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "val_tasks"),
    [(agents.raises, TASKS[:2]), (agents.unrewarded, None)],
    ids=["evaluation", "first step"],
)
def test_a_run_that_its_agent_ended_continues_with_the_agent_fixed(
    tmp_path: Path, agent: Any, val_tasks: Any
) -> None:
    with pytest.raises(TrainingError, match="rewarded"):
        trainer(tmp_path).fit(agent, TASKS, val_tasks)
    for steps in (2, 3):  # resumed twice: the first evaluation is found again
        result = trainer(tmp_path, algorithm=algorithm(steps=steps)).fit(
            agents.vowels, TASKS, val_tasks, resume=True
        )
        assert result.metrics[-1].step == steps
        assert all(evaluation.unrewarded == 0 for evaluation in result.evaluations)


def test_an_error_in_the_middle_of_a_step_saves_no_half_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, taken = TorchLearner.step, 0

    def failing_step(self: Any, batch: Any, *rest: Any) -> Any:
        nonlocal taken
        taken += 1
        if taken == 4:
            raise TrainingError("the step was not taken")
        return step(self, batch, *rest)

    monkeypatch.setattr(TorchLearner, "step", failing_step)
    with pytest.raises(TrainingError, match="not taken"):
        trainer(tmp_path, algorithm=algorithm(minibatches=2, checkpoint_every=1)).fit(
            agents.vowels, TASKS
        )
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]


def test_the_best_policy_is_not_forgotten_and_not_replaced_by_a_worse_one(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"algorithm": algorithm(steps=1)}

    async def score(task: dict, llm: agl.LLM, rollout: AttemptedRollout) -> float:
        reward = await agents.vowels(task, llm)
        return (
            reward if rollout.mode == "train" else scores[int("val-0-" not in rollout.rollout_id)]
        )

    scores = [-0.5, 0.0]
    trainer(tmp_path, **settings).fit(score, TASKS, TASKS[:2])
    scores = [-0.5, -0.25]
    trainer(tmp_path, algorithm=algorithm(steps=2)).fit(score, TASKS, TASKS[:2], resume=True)
    best = (tmp_path / "run" / "checkpoints" / "best" / "loop.json").read_text()
    assert '"step":1' in best
    assert '"best_reward":0.0' in best


def test_a_stated_reward_for_the_unrewarded_counts_everywhere(tmp_path: Path) -> None:
    stated = algorithm(steps=1, tasks_per_step=8, unrewarded=-1.0)
    result = trainer(tmp_path, algorithm=stated).fit(agents.raises_on_odd, TASKS, TASKS[1:2])
    assert result.metrics[-1].values["groups_too_few_rewarded"] == 0
    assert result.metrics[-1].values["reward"] < 0.0
    assert result.metrics[-1].values["unrewarded"] == 16


def misspelt() -> Any:
    return {}["logprob"]


@pytest.mark.parametrize(
    "mistake",
    [
        {"baseline": lambda returns: misspelt()},
        {"loss": lambda logprobs, advantages: misspelt()},
        {"aggregation": lambda tokens: misspelt()},
    ],
    ids=["baseline", "loss", "aggregation"],
)
def test_what_was_sampled_before_a_function_of_yours_failed_trains_once_it_is_fixed(
    tmp_path: Path, mistake: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"failed: KeyError: 'logprob' \(.*test_resume\.py:\d+\)"):
        trainer(tmp_path, algorithm=algorithm(steps=1, **mistake)).fit(agents.vowels, TASKS)
    sampled = [one.rollout_id for one in rollouts_of(tmp_path / "run", lambda _: True)]
    again = trainer(tmp_path, algorithm=algorithm(steps=1)).fit(agents.vowels, TASKS, resume=True)
    assert again.stopped_because == "all steps done"
    assert again.metrics[-1].values["policy_version"] == 1
    found = [one.rollout_id for one in rollouts_of(tmp_path / "run", lambda _: True)]
    assert sampled and found == sampled
